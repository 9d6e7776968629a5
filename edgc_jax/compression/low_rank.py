"""Exchanges gradients as factors; leaves that are not worth it are sent dense.

For every matrix M [m, n] = gradient + residual of a leaf sent at rank r:

  P   = orth(mean_i M_i unit(Q))       all-reduce of [m, r]
  Q_i = M_i^T P,  Q' = mean_i Q_i      all-reduce of [n, r]
  update = P Q'^T,  residual_i = M_i - P Q_i^T

This is one step of subspace iteration, warm-started by the last Q (Vogels et
al. 2019, Algorithm 1, arXiv:1905.13727). Departures from the paper:

- A replica subtracts the approximation P Q_i^T of its own M_i; the paper
  subtracts the mean update. Both residuals have the same mean, so all updates
  are the same. But the paper's residual never sends the differences between
  replicas, which add up in it from step to step.
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
packed into as many bytes as they would take at the rung's rank (`packing`).
With a `plan.code`, factors and dense matrices are encoded. The residual keeps
the encoding error of Q. The encoding error of P does not matter, since all
replicas use the P that they received.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from edgc_jax.comm import dataflow
from edgc_jax.compression import linear_algebra
from edgc_jax.compression.base import Exchange
from edgc_jax.compression.linear_algebra import Basis
from edgc_jax.compression.packing import FactorBuffers, Received
from edgc_jax.plan.plan import Layout, Plan


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
    linear_algebra.gaussian_columns(
      jax.random.fold_in(key, plan.positions[i]), shape
    )
    for i, shape in zip(plan.compressible, plan.factor_shapes, strict=True)
  ]


def exchange(
  plan: Plan,
  rung: jax.Array,
  matrices: Sequence[jax.Array],
  factors: list[jax.Array],
  key: jax.Array,
  axis_name: str,
  ranks: jax.Array | None = None,
) -> Exchange:
  """Averages all leaves over replicas at a rung chosen in the graph.

  Each rung is a branch with collectives of its own size, so one compiled
  program sends, at each step, only the bytes of the rung in use.

  Wire: `plan.wire_bytes` at the rank of the rung.

  Args:
    plan: Static: leaves, ladder, least ratio, spread, encoding.
    rung: int32 [], index into the ladder, equal on all replicas.
    matrices: All leaves in order, float32, residual added.
    factors: Q of the compressible leaves.
    key: Source of new directions, signs of sketches and random rounding; equal
      on all replicas, new at each step.
    axis_name: The bound axis of the replicas.
    ranks: int32 [K], columns of each matrix, if `plan.spread` lets them
      differ; the sizes of all P and of all Q must not exceed the sizes at the
      rung's rank (`adaptation.allocation`).

  Returns:
    The exchange.
  """
  # Rungs with equal layouts share a branch, since every branch is compiled.
  layouts = list(dict.fromkeys(plan.layouts))
  branches = [
    functools.partial(_exchange_at, plan, layout, key, axis_name)
    for layout in layouts
  ]
  own_ranks = [None] * len(factors) if plan.spread == 1 else plan.by_leaf(ranks)
  operands = (list(matrices), factors, own_ranks)
  # With TF32 or bf16 products bases would be orthonormal to 1e-3 only.
  with jax.default_matmul_precision("highest"):
    if len(branches) == 1:
      return branches[0](*operands)
    # Without barriers the compiler moves the last operations of the branches
    # behind the conditional.
    hold = lambda tree: jax.tree.map(jax.lax.optimization_barrier, tree)  # noqa: E731
    held = [lambda *o, run=run: hold(run(*o)) for run in branches]
    branch = jnp.array([layouts.index(layout) for layout in plan.layouts])
    return jax.lax.switch(branch[rung], held, *operands)


def _exchange_at(
  plan: Plan,
  layout: Layout,
  key: jax.Array,
  axis_name: str,
  leaves: list[jax.Array],
  factors: list[jax.Array],
  ranks: list[jax.Array | None],
) -> Exchange:
  """Runs the exchange of one static layout, in the order of the header."""
  slots = [plan.slots[i] for i in layout.factored]
  stacks = [leaves[i].reshape(plan.leaves[i].view) for i in layout.factored]
  buffers = FactorBuffers(plan, layout, [ranks[slot] for slot in slots])
  unit = jnp.ones((), jnp.float32)
  if factors:  # gives `unit` their type, which varies over stages
    unit = jnp.ones_like(factors[0], shape=())
  basis, is_finite = Basis([], []), jnp.array(True)
  if stacks:
    start = buffers.slices([factors[slot] for slot in slots])
    basis, unit, is_finite = _average_p(stacks, start, buffers, key, axis_name)
  received = _average_q(
    stacks,
    basis,
    buffers,
    key,
    axis_name,
    unit=unit,
    encoded=[leaves[i] for i in layout.encoded],
    exact=[leaves[i] for i in layout.exact],
  )
  return _reconstruct(
    plan,
    layout,
    buffers,
    leaves,
    factors,
    basis,
    received,
    key,
    unit=unit,
    is_finite=is_finite,
  )


def _average_p(
  stacks: list[jax.Array],
  start: list[jax.Array],
  buffers: FactorBuffers,
  key: jax.Array,
  axis_name: str,
) -> tuple[Basis, jax.Array, jax.Array]:
  """Returns the basis P, the unit for energies, and whether P was finite.

  A non-finite entry on any replica makes the mean non-finite on all, so all
  replicas agree without another collective.
  """
  # P_i = M_i unit(Q)
  local = linear_algebra.products(stacks, linear_algebra.unit_columns(start))
  own_key = jax.random.fold_in(key, 2)
  received = buffers.average(local, own_key, axis_name).factors
  is_finite = dataflow.all_finite(received)
  mean = [jnp.where(is_finite, p, 0.0) for p in received]
  # P = orth(mean_i P_i)
  basis = linear_algebra.orthonormalize(mean)
  return basis, linear_algebra.largest_magnitude(mean), is_finite


def _average_q(
  stacks: list[jax.Array],
  basis: Basis,
  buffers: FactorBuffers,
  key: jax.Array,
  axis_name: str,
  *,
  unit: jax.Array,
  encoded: list[jax.Array],
  exact: list[jax.Array],
) -> Received:
  """Averages Q and all dense leaves, with sketches and energies of residuals.

  Returns:
    The means; `exact` is (dense leaves, sketches of the residuals' mean
    [k, SKETCH_VALUES], mean energies of the residuals [k]).
  """
  signs = linear_algebra.draw_signs(jax.random.fold_in(key, 1), stacks)
  # Q_i = M_i^T P
  local, rows = linear_algebra.transposed_products(
    stacks, basis.columns, [u for u, _ in signs]
  )
  # |M_i - P Q_i^T|^2 = |M_i|^2 - |Q_i|^2; the encoding error is much smaller.
  whole = linear_algebra.energies(stacks, unit)
  sent = linear_algebra.energies(local, unit)
  energies = [a - b for a, b in zip(whole, sent, strict=True)]
  sketches = linear_algebra.residual_sketches(rows, basis.columns, local, signs)
  # Q' = mean_i Q_i
  return buffers.average(
    local,
    jax.random.fold_in(key, 3),
    axis_name,
    dense=encoded,
    exact=(exact, sketches, energies),
  )


def _reconstruct(
  plan: Plan,
  layout: Layout,
  buffers: FactorBuffers,
  leaves: list[jax.Array],
  factors: list[jax.Array],
  basis: Basis,
  received: Received,
  key: jax.Array,
  *,
  unit: jax.Array,
  is_finite: jax.Array,
) -> Exchange:
  """Computes the updates, the residuals, the next Q, and the energies."""
  exact, sketches, energies = received.exact
  is_finite &= dataflow.all_finite((received.factors, received.dense, exact))
  # P is finite, so zeros for Q' make the product P Q'^T zero.
  exact, dense, mean_q = dataflow.zeros_unless(
    is_finite, (exact, received.dense, received.factors)
  )
  averaged: list[Any] = [None] * len(leaves)
  # A leaf that is sent dense and not encoded has no residual.
  residual = [jnp.zeros_like(leaves[i]) for i in plan.compressible]
  columns = [jnp.zeros_like(q[:, 0]) for q in factors]
  lost = [jnp.zeros_like(c, shape=len(c)) for c in columns]
  residual_energy = list(lost)
  next_q = list(factors)
  for i, value in zip(layout.exact, exact, strict=True):
    averaged[i] = value
  for i, value, sent in zip(
    layout.encoded, dense, received.sent_dense, strict=True
  ):
    averaged[i] = value
    if i in plan.slots:
      residual[plan.slots[i]] = leaves[i] - sent
  # update = P Q'^T,  residual_i = M_i - P Q_i^T
  updates = linear_algebra.outer_products(basis.columns, mean_q)
  own = linear_algebra.outer_products(basis.columns, received.sent_factors)
  revived = linear_algebra.revive(mean_q, basis.shares, key, unit)
  slots = [plan.slots[i] for i in layout.factored]
  merged = buffers.merge(revived, [factors[slot] for slot in slots])
  for j, (i, slot) in enumerate(zip(layout.factored, slots, strict=True)):
    shape = plan.leaves[i].shape
    averaged[i] = updates[j].reshape(shape)
    residual[slot] = leaves[i] - own[j].reshape(shape)
    # |mean_i residual_i|^2 from its sketch, |Q'_c|^2 of each column c
    lost[slot] = jnp.sum(jnp.square(sketches[j] / unit), axis=1)
    residual_energy[slot] = jnp.maximum(energies[j], 0.0)
    norms = jnp.sum(jnp.square(mean_q[j] / unit), axis=1)
    columns[slot] = columns[slot].at[:, : norms.shape[1]].set(norms)
    next_q[slot] = merged[j]
  return Exchange(
    averaged, residual, next_q, columns, lost, residual_energy, unit, is_finite
  )
