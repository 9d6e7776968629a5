"""Exchanges gradients as factors; leaves that are not worth it are sent dense.

For every matrix M [m, n] = gradient + residual of a leaf sent at rank r, or for
M^T if M has more rows than columns:

  P   = orth(mean_i M_i unit(Q))       all-reduce of [m, r]
  Q_i = M_i^T P,  Q' = mean_i Q_i      all-reduce of [n, r]
  update = P Q'^T,  residual_i = M_i - P Q_i^T

This is one step of subspace iteration, warm-started by the last Q (Vogels et
al. 2019, Algorithm 1, arXiv:1905.13727). Departures from the paper:

- A replica subtracts the approximation P Q_i^T of its own M_i; the paper
  subtracts the mean update. Both residuals have the same mean, so all updates
  are the same. But the paper's residual never sends the differences between
  replicas, which add up in it from step to step.
- P is on the smaller side of M, where r directions are a larger share of all.
- Q is made nearly orthonormal before use, and vanishing columns get new
  directions (`linear_algebra.revive`): a gradient of low rank leaves zero
  columns, and M^T 0 = 0 would keep them zero permanently.
- The basis is a Gram-Schmidt basis in the order of columns. That makes the
  step an orthogonal iteration, whose columns converge to the singular vectors,
  the strongest first: slicing Q to a smaller rank keeps the best ones. Columns
  beyond the rank in use stay in the state and are used again when the rank
  grows back. The residual does not depend on the rank and is kept.

Replicas on processors that round differently get the same update, to about
1e-6 of its norm, at every step. Each computes P by itself, but as a continuous
function of a factor that all have received. Numbers that are averaged later
may differ between replicas.

If the ranks of matrices differ (`plan.spread` above 1), their factors are
packed into as many bytes as they would take at the rung's rank (`factors`).
With a `plan.code`, factors and dense matrices are encoded. The residual keeps
the encoding error of Q. The encoding error of P does not matter, since all
replicas use the P that they received.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from edgc_jax.comm import dataflow
from edgc_jax.compression import error_feedback, linear_algebra
from edgc_jax.compression.base import Exchange
from edgc_jax.compression.factors import (
  FactorBuffers,
  Received,
  Stack,
  map_matrices,
  map_rows,
)
from edgc_jax.compression.linear_algebra import Projection
from edgc_jax.plan.plan import Group, Plan

# Entries of a stack; a smaller one takes longer to compile in classes than it
# would ever save.
_SMALL = 2**18
_GRANULE = 8  # columns; kernels for CPUs compute at least as many at once


def init_factors(plan: Plan, seed: int) -> list[jax.Array]:
  """Draws the first Q of each leaf, equal on all replicas and stages.

  Args:
    plan: Names the compressible leaves and the shapes of their Q.
    seed: Seed of the Gaussian entries.

  Returns:
    float32 [k, n, columns] each, columns of expected length one.
  """
  if not plan.has_factors:
    return []
  key = jax.random.key(seed)
  return [
    shape[1] ** -0.5
    * jax.random.normal(
      jax.random.fold_in(key, plan.positions[i]), shape, jnp.float32
    )
    for i, shape in zip(plan.compressible, plan.factor_shapes, strict=True)
  ]


def exchange(
  plan: Plan,
  rung: jax.Array,
  gradients: Sequence[jax.Array],
  residuals: list[jax.Array],
  factors: list[jax.Array],
  key: jax.Array,
  axis_name: str,
  ranks: jax.Array | None = None,
  earlier: Any = (),
) -> Exchange:
  """Averages all leaves over replicas at a rung chosen in the graph.

  One compiled program sends, at each step, only the bytes of the rung in use:
  each rung has collectives of its own size. Rungs at which the same leaves are
  factors share everything else.

  Wire: `plan.wire_bytes` at the rank of the rung.

  Args:
    plan: Static: leaves, ladder, least ratio, spread, encoding.
    rung: int32 [], index into the ladder, equal on all replicas; at least
      `plan.first_rung`.
    gradients: All leaves in order, local.
    residuals: Residuals of the leaves of `plan.with_residual`.
    factors: Q of the compressible leaves.
    key: Source of new directions, signs of sketches and random rounding; equal
      on all replicas, new at each step.
    axis_name: The bound axis of the replicas.
    ranks: int32 [K], columns of each matrix, if `plan.spread` lets them
      differ; the sizes of all P and of all Q must not exceed the sizes at the
      rung's rank (`adaptation.allocation`).
    earlier: Results of the collectives before, which this exchange follows.

  Returns:
    The exchange.
  """
  if plan.spread == 1:
    ranks = jnp.asarray(plan.uniform_ranks)[rung]
  branches = [
    functools.partial(_exchange_group, plan, group, axis_name)
    for group in plan.groups
  ]
  of_leaves = [
    dict(zip(members, arrays, strict=True))
    for members, arrays in (
      (plan.with_residual, residuals),
      (plan.compressible, factors),
      (plan.compressible, plan.by_leaf(ranks)),
    )
  ]
  operands = _Operands(rung, key, earlier, list(gradients), *of_leaves)
  if len(branches) == 1:
    return branches[0](operands)
  # Without barriers the compiler moves the last operations of the branches
  # behind the conditional.
  hold = lambda tree: jax.tree.map(jax.lax.optimization_barrier, tree)  # noqa: E731
  held = [lambda o, run=run: hold(run(o)) for run in branches]
  of_rung = np.argmax([np.array(g.by_rung) >= 0 for g in plan.groups], axis=0)
  return jax.lax.switch(jnp.asarray(of_rung)[rung], held, operands)


class _Operands(NamedTuple):
  """Arguments of the branches of an exchange.

  Leaves are named by their index in the plan. Indices rise, so the order in
  which JAX rebuilds a dict is that of `plan.compressible`, or `with_residual`.
  """

  rung: jax.Array  # int32 []
  key: jax.Array
  earlier: Any  # results of the collectives before
  gradients: list[jax.Array]  # all leaves
  residuals: dict[int, jax.Array]
  factors: dict[int, jax.Array]
  ranks: dict[int, jax.Array]  # int32 [k]


def _exchange_group(
  plan: Plan, group: Group, axis_name: str, operands: _Operands
) -> Exchange:
  """Runs the exchange of a group of rungs, in the order of the header."""
  stacks = _stacks(plan, group, operands)
  index = jnp.array(group.by_rung)[operands.rung]
  buffers = FactorBuffers(plan, group, index, stacks)
  unit = jnp.ones((), jnp.float32)
  if operands.factors:  # gives `unit` their type, which varies over stages
    unit = jnp.ones_like(next(iter(operands.factors.values())), shape=())
  mean_p, is_finite = [], jnp.array(True)
  dense = _dense_matrices(plan, group, operands)
  if stacks:
    mean_p, dense, unit, is_finite = _average_p(
      stacks, buffers, dense, operands, axis_name
    )
  else:
    dense = dataflow.in_turn(dense, operands.earlier)
  projections, received = _average_q(
    stacks, mean_p, buffers, dense, operands.key, axis_name, unit
  )
  return _reconstruct(
    group,
    operands,
    stacks,
    projections,
    buffers,
    received,
    unit,
    is_finite,
  )


def _stacks(plan: Plan, group: Group, operands: _Operands) -> list[Stack]:
  """Returns the matrices of the leaves that are sent as factors."""
  stacks = []
  for j, leaf in enumerate(group.factored):
    view = plan.leaves[leaf].view
    narrowest = min([layout.columns[j] for layout in group.layouts])
    stacks.append(
      Stack(
        leaf,
        operands.gradients[leaf].reshape(view),
        operands.residuals[leaf].reshape(view),
        operands.factors[leaf],
        operands.ranks[leaf],
        _width_classes(narrowest, group.widths[j], plan.leaf_sizes[leaf]),
      )
    )
  return stacks


def _width_classes(narrowest: int, widest: int, size: int) -> tuple[int, ...]:
  """Returns the classes of width for ranks between two bounds.

  The full width, a half and a quarter of it, and an eighth if a rung is that
  narrow.

  Args:
    narrowest: Least rank of a rung.
    widest: Largest rank of a matrix.
    size: Entries of the stack of matrices.

  >>> _width_classes(32, 64, 10**6), _width_classes(8, 64, 10**6)
  ((16, 32, 64), (8, 16, 32, 64))
  >>> _width_classes(23, 23, 10**6), _width_classes(8, 64, 10**4)
  ((23,), (64,))
  """
  is_cpu = jax.default_backend() == "cpu"
  if narrowest == widest or size < _SMALL or not is_cpu:
    return (widest,)
  shares = [8, 4, 2] if narrowest <= widest / 8 else [4, 2]
  parts = {-(-widest // (n * _GRANULE)) * _GRANULE for n in shares}
  return (*sorted(n for n in parts if n < widest), widest)


def _dense_matrices(
  plan: Plan, group: Group, operands: _Operands
) -> tuple[list[jax.Array], list[jax.Array]]:
  """Returns M of the leaves that are sent encoded, and in float32."""

  def read(leaf: int) -> jax.Array:
    gradient, residual = operands.gradients[leaf], operands.residuals.get(leaf)
    if residual is None:
      return gradient.astype(jnp.float32)
    return error_feedback.added(gradient, residual)

  return [read(i) for i in group.encoded], [read(i) for i in group.exact]


def _average_p(
  stacks: list[Stack],
  buffers: FactorBuffers,
  dense: tuple[list[jax.Array], list[jax.Array]],
  operands: _Operands,
  axis_name: str,
) -> tuple[list[jax.Array], Any, jax.Array, jax.Array]:
  """Returns the mean P, the unit for energies, and whether P was finite.

  Also returns the dense leaves, to be sent after `operands.earlier`, like P.
  A non-finite entry on any replica makes the mean non-finite on all, so all
  replicas agree without another collective.
  """
  # P_i = M_i unit(Q)
  local = map_rows(
    stacks,
    buffers.rows(),
    linear_algebra.unit_columns,
    linear_algebra.product,
  )
  local, dense = dataflow.in_turn((local, dense), operands.earlier)
  key = jax.random.fold_in(operands.key, 2)
  received = buffers.average(local, key, axis_name).factors
  is_finite = dataflow.all_finite(received)
  mean = [jnp.where(is_finite, p, 0.0) for p in received]
  return mean, dense, linear_algebra.unit_of(mean), is_finite


def _average_q(
  stacks: list[Stack],
  mean_p: list[jax.Array],
  buffers: FactorBuffers,
  dense: tuple[list[jax.Array], list[jax.Array]],
  key: jax.Array,
  axis_name: str,
  unit: jax.Array,
) -> tuple[list[Projection], Received]:
  """Averages Q and all dense leaves, with sketches and energies of residuals.

  Returns:
    The bases P and the own Q, and the means; `exact` is (dense leaves, sketches
    of the residuals' mean [k, SKETCH_VALUES], mean energies of the residuals
    [k]).
  """
  signs = linear_algebra.draw_signs(
    jax.random.fold_in(key, 1),
    [
      (len(s.factor), p.shape[2], s.factor.shape[1])
      for s, p in zip(stacks, mean_p, strict=True)
    ],
  )
  # P = orth(mean_i P_i),  Q_i = M_i^T P
  projections = map_rows(
    stacks,
    mean_p,
    linear_algebra.orthonormalize,
    functools.partial(linear_algebra.projection, unit=unit),
    [(u,) for u, _ in signs],
  )
  local = [found.rows[:, 1:] for found in projections]
  # |M_i - P Q_i^T|^2 = |M_i|^2 - |Q_i|^2; the encoding error is much smaller.
  energies = [
    found.energy - linear_algebra.energy(q, unit)
    for found, q in zip(projections, local, strict=True)
  ]
  sketches = [
    linear_algebra.residual_sketches(found.rows[:, :1], found.basis.rows, q, s)
    for found, q, s in zip(projections, local, signs, strict=True)
  ]
  encoded, exact = dense
  # Q' = mean_i Q_i
  return projections, buffers.average(
    local,
    jax.random.fold_in(key, 3),
    axis_name,
    dense=encoded,
    exact=(exact, sketches, energies),
  )


def _reconstruct(
  group: Group,
  operands: _Operands,
  stacks: list[Stack],
  projections: list[Projection],
  buffers: FactorBuffers,
  received: Received,
  unit: jax.Array,
  is_finite: jax.Array,
) -> Exchange:
  """Computes the updates, the residuals, the next Q, and the energies."""
  exact, sketches, energies = received.exact
  is_finite &= dataflow.all_finite((received.factors, received.dense, exact))
  # P is finite, so zeros for Q' make the product P Q'^T zero.
  exact, encoded, mean_q = dataflow.zeros_unless(
    is_finite, (exact, received.dense, received.factors)
  )
  bases = [found.basis for found in projections]
  shares = buffers.live_shares([basis.shares for basis in bases])
  # |Q'_c|^2 of each column c
  norms = [jnp.sum(jnp.square(q / unit), axis=2) for q in mean_q]
  merged = buffers.merge(
    linear_algebra.revive(mean_q, shares, norms, operands.key, unit)
  )
  settle = functools.partial(error_feedback.settled, is_finite=is_finite)
  # update = P Q'^T,  residual_i = M_i - P Q_i^T
  own_q = received.sent_factors
  updates = map_matrices(
    stacks,
    [(b.rows, q, own) for b, q, own in zip(bases, mean_q, own_q, strict=True)],
    linear_algebra.outer_products,
    settle,
  )
  settled = {s.leaf: found for s, found in zip(stacks, updates, strict=True)}
  means = (
    *zip(group.exact, exact, strict=True),
    *zip(group.encoded, encoded, strict=True),
  )
  sent = dict(zip(group.encoded, received.sent_dense, strict=True))
  for leaf, mean in means:
    gradient, old = operands.gradients[leaf], operands.residuals.get(leaf)
    left = None  # M was sent as it is, or there is no residual
    if leaf in sent and old is not None:
      left = error_feedback.added(gradient, old) - sent[leaf]
    settled[leaf] = settle(mean, left, gradient, old)
  averaged = [
    settled[i][0].reshape(g.shape) for i, g in enumerate(operands.gradients)
  ]
  residual = {
    i: settled[i][1].reshape(e.shape) for i, e in operands.residuals.items()
  }
  next_q = dict(operands.factors)
  columns = {i: jnp.zeros_like(q[:, 0]) for i, q in next_q.items()}
  lost = {i: jnp.zeros_like(c, shape=len(c)) for i, c in columns.items()}
  residual_energy = dict(lost)
  for j, stack in enumerate(stacks):
    leaf = stack.leaf
    # |mean_i residual_i|^2 from its sketch
    lost[leaf] = jnp.sum(jnp.square(sketches[j] / unit), axis=1)
    residual_energy[leaf] = jnp.maximum(energies[j], 0.0)
    columns[leaf] = columns[leaf].at[:, : norms[j].shape[1]].set(norms[j])
    next_q[leaf] = jnp.where(is_finite, merged[j], stack.factor)
  of_leaves = (residual, next_q, columns, lost, residual_energy)
  lists = [list(arrays.values()) for arrays in of_leaves]
  return Exchange(averaged, *lists, unit, is_finite)
