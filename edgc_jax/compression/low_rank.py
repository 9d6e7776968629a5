"""One exchange of a gradient: factors for matrices, dense for the rest.

For every matrix M [m, n] = gradient + residual of a leaf sent at rank r:

  P   = orth(mean_i M_i unit(Q))       P [m, r] travels
  Q_i = M_i^T P,  Q' = mean_i Q_i      Q' [n, r] travels
  update = P Q'^T,  residual_i = M_i - P Q_i^T

One step of subspace iteration, warm-started by the last Q (Vogels et al.
2019, Algorithm 1, arXiv:1905.13727). Differences:

- A replica keeps what the factors could not carry of its own M_i, where the
  paper subtracts the mean update. The means of both residuals are equal, and
  so are all updates; but what sets replicas apart is never sent by the
  paper's, and piles up in it from step to step.
- Q is made nearly orthonormal before it is used, and directions that die (a
  gradient of low rank leaves zero columns, and M^T 0 = 0 would keep them so for
  ever) are given new ones (`revive`).
- Bases are those of Gram-Schmidt in the order of columns, so this is orthogonal
  iteration, whose columns tend to the singular vectors, the strongest first:
  slicing Q to a smaller rank keeps the best. Columns beyond the rank in use
  stay in the state and serve again when the rank grows back. The residual does
  not depend on the rank, and stays.

Replicas on processors that round differently get the same update to some
1e-6 of its norm, at every step. Each computes P by itself, but from a factor
that all have received, by a continuous map (`orthonormalize`); what a replica
does before its numbers are averaged need not agree with others at all.

Where factors alternate (`plan.alternating`), only one travels in a step, and
the other is the basis of what it was when it travelled last:

  even steps   P_i = M_i orth(Q),    P' = mean_i P_i,  update = P' orth(Q)^T
  odd steps    Q_i = M_i^T orth(P),  Q' = mean_i Q_i,  update = orth(P) Q'^T

Half a subspace iteration a step, for half the bytes and one collective instead
of two that wait for each other (ACP-SGD, Zhang et al. 2023, arXiv:2306.08881).

Every `plan.refresh_every` steps, if it is set, all travels dense, and factors
are made anew from the mean (`refresh`), whatever step it would have been.

Where matrices have ranks of their own (`plan.spread` above 1), their factors
travel packed (`packing`), in as many bytes as if all had the rung's rank. With
a `plan.code` factors and dense matrices travel coded: what the coding of Q
(of what travels, where factors alternate) loses is in the residual, and that
of P does not matter, since all replicas go on from the P that came.

What is stacked are factors, not gradients: a leaf is multiplied where it
lies, and only the small [r, r] problems of all matrices are batched.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from edgc_jax import validation
from edgc_jax.comm import agreement
from edgc_jax.compression import sketch
from edgc_jax.compression.base import Exchange, Factors, unit_of, zeros_unless
from edgc_jax.compression.linear_algebra import (
  Basis,
  orthonormalize,
  outer_product,
  revive,
  transposed_products,
  unit_columns,
)
from edgc_jax.compression.packing import FactorWire
from edgc_jax.compression.refresh import leading_factors
from edgc_jax.plan.plan import Plan

_SENDS_P, _SENDS_Q = 0, 1


def exchange(
  plan: Plan,
  rung: jax.Array,
  matrices: Sequence[jax.Array],
  factors: Factors,
  key: jax.Array,
  axis_name: str,
  *,
  count: jax.Array,
  ranks: jax.Array | None = None,
) -> Exchange:
  """Averages over replicas at the rung chosen in the graph.

  Every rung is a branch with collectives of that rung's own size, so one
  compiled program sends, at each step, the bytes of the rung it is on.

  Args:
    plan: Static: leaves, ladder, least ratio, spread, code.
    rung: int32 [], index into the ladder, equal on all replicas.
    matrices: All leaves in order, float32, residual added.
    factors: P and Q of the compressible leaves.
    key: Draws new directions and the sketches' signs.
    axis_name: The bound axis of the replicas.
    count: int32 [], steps done: which factor travels, where they alternate.
    ranks: int32 [K], columns of each matrix, where `plan.spread` lets them
      differ; the sums over P and over Q must not exceed those at the rung's
      own rank (`allocation`).

  Returns:
    The exchange.
  """
  if plan.alternating:
    validation.require(
      jax.process_count() == 1,
      "alternating",
      True,
      f"False between processes (there are {jax.process_count()}), whose hosts"
      " may round differently: a basis that is a step old may have little of a"
      " direction in which the gradient has much, and multiplies that rounding"
      " until replicas part",
      "use wire_dtype='bfloat16' for half the bytes",
    )
  widths = [
    tuple(plan.columns(leaf, rank) for leaf in plan.leaves)
    for rank in plan.ladder
  ]
  # Rungs that send the same are one branch: every branch is compiled.
  distinct = list(dict.fromkeys(widths))
  rungs = [plan.ladder[widths.index(width)] for width in distinct]
  alternates = plan.alternating and any(rungs)
  sides = (_SENDS_P, _SENDS_Q) if alternates else (None,)
  branches = [
    _branch(plan, rank, side, key, axis_name)
    for rank in rungs
    for side in sides
  ]
  if plan.refresh_every and plan.compressible:
    branches.append(_branch(plan, 0, None, key, axis_name, refreshes=True))
  own = [None] * len(factors.q) if plan.spread == 1 else plan.by_leaf(ranks)
  operands = (list(matrices), factors, own)
  # TF32 or bf16 products would leave bases orthonormal to 1e-3 only.
  with jax.default_matmul_precision("highest"):
    if len(branches) == 1:
      return branches[0](*operands)
    index = jnp.array([distinct.index(width) for width in widths])[rung]
    index = len(sides) * index + count % len(sides)
    if plan.refresh_every and plan.compressible:
      index = jnp.where(plan.refreshes(count), len(branches) - 1, index)
    # Else the compiler moves what branches end with behind the conditional.
    hold = lambda tree: jax.tree.map(jax.lax.optimization_barrier, tree)  # noqa: E731
    held = [lambda *o, run=run: hold(run(*o)) for run in branches]
    return jax.lax.switch(index, held, *operands)


def _branch(
  plan: Plan,
  rank: int,
  side: int | None,
  key: jax.Array,
  axis_name: str,
  *,
  refreshes: bool = False,
) -> Callable:
  """The exchange at one static rung; `side` is what travels, None both."""
  slot = {leaf: position for position, leaf in enumerate(plan.compressible)}
  low = [i for i, leaf in enumerate(plan.leaves) if plan.columns(leaf, rank)]
  others = [i for i in range(len(plan.leaves)) if i not in set(low)]
  coded = [i for i in others if plan.is_coded(plan.leaves[i])]
  plain = [i for i in others if i not in set(coded)]

  def pair(basis: jax.Array, factor: jax.Array) -> tuple[jax.Array, jax.Array]:
    return (factor, basis) if side == _SENDS_P else (basis, factor)

  def run(
    leaves: list[jax.Array],
    factors: Factors,
    ranks: list[jax.Array | None],
  ) -> Exchange:
    averaged: list[Any] = [None] * len(leaves)
    # What is sent dense, and not coded, leaves nothing behind.
    residual = [jnp.zeros_like(leaves[i]) for i in plan.compressible]
    columns = [jnp.zeros_like(q[:, 0]) for q in factors.q]
    lost = [jnp.zeros_like(c, shape=len(c)) for c in columns]
    residual_energy = list(lost)
    wire = FactorWire(plan, rank, low, [ranks[slot[i]] for i in low])
    stacks = [leaves[i].reshape(plan.leaves[i].view) for i in low]

    def in_use(state: list[jax.Array]) -> list[jax.Array]:
      return wire.slices([state[slot[i]] for i in low])

    # One factor is fixed, a basis; the other is what travels in the end.
    is_finite, basis = jnp.array(True), Basis([], [])
    unit = jnp.ones((), jnp.float32)
    if factors.q:  # which vary over stages, if there are any
      unit = jnp.ones_like(factors.q[0], shape=())
    if side is None:
      local_p = [
        m @ q for m, q in _zip(stacks, unit_columns(in_use(factors.q)))
      ]
      if local_p:
        own_key = jax.random.fold_in(key, 2)
        received = wire.average(local_p, own_key, axis_name)
        # A non-finite entry anywhere makes what arrives non-finite
        # everywhere, so all replicas agree without a collective for it.
        is_finite = agreement.all_finite(received.factors)
        mean_p = [jnp.where(is_finite, p, 0.0) for p in received.factors]
        basis, unit = orthonormalize(mean_p), unit_of(mean_p)
    else:
      last = factors.q if side == _SENDS_P else factors.p
      basis = orthonormalize(in_use(last))
    fixed = basis.columns
    signs = sketch.draw_signs(jax.random.fold_in(key, 1), stacks)
    if side == _SENDS_P:
      local = [m @ q for m, q in _zip(stacks, fixed)]
      across = [u @ m for m, (u, _) in _zip(stacks, signs)]
    else:
      products = [
        transposed_products(m, p, u)
        for m, p, (u, _) in _zip(stacks, fixed, signs)
      ]
      local, across = [a for a, _ in products], [b for _, b in products]
    # Before coding, whose losses are small beside these.
    own = [
      _energy(m / unit) - _energy(f / unit) for m, f in _zip(stacks, local)
    ]
    sketches = [
      sketch.residual_sketch(row, *pair(basis, factor), own_signs)
      for row, basis, factor, own_signs in _zip(across, fixed, local, signs)
    ]
    received = wire.average(
      local,
      jax.random.fold_in(key, 3),
      axis_name,
      dense=[leaves[i] for i in coded],
      exact=([leaves[i] for i in plain], sketches, own),
    )
    whole, sketches, own = received.exact
    is_finite &= agreement.all_finite((received.factors, received.dense, whole))
    for i, value in _zip(plain, whole):
      averaged[i] = zeros_unless(is_finite, value)
    for i, value, sent in _zip(coded, received.dense, received.sent_dense):
      averaged[i] = zeros_unless(is_finite, value)
      if i in slot:
        residual[slot[i]] = leaves[i] - sent
    kept = Factors(list(factors.p), list(factors.q))
    kept_now = kept.p if side == _SENDS_P else kept.q
    # Small beside the product, which is zero then, too: bases are finite.
    mean_factors = [zeros_unless(is_finite, f) for f in received.factors]
    to_keep = revive(mean_factors, basis.shares, key, unit)
    for j, i in enumerate(low):
      shape, place = plan.leaves[i].shape, slot[i]
      factor, sent = mean_factors[j], received.sent_factors[j]
      averaged[i] = outer_product(*pair(fixed[j], factor)).reshape(shape)
      kept_back = stacks[j] - outer_product(*pair(fixed[j], sent))
      residual[place] = kept_back.reshape(shape)
      lost[place] = jnp.sum(jnp.square(sketches[j] / unit), axis=1)
      residual_energy[place] = jnp.maximum(own[j], 0.0)
      norms = jnp.sum(jnp.square(factor / unit), axis=1)
      columns[place] = columns[place].at[:, : norms.shape[1]].set(norms)
      kept_now[place] = wire.merged(j, to_keep[j], kept_now[place])
    if refreshes:
      kept = _refreshed(plan, averaged, kept, key)
    return Exchange(
      averaged, residual, kept, columns, lost, residual_energy, unit, is_finite
    )

  return run


def _refreshed(
  plan: Plan,
  averaged: list[jax.Array],
  factors: Factors,
  key: jax.Array,
) -> Factors:
  """The factors of what all replicas have, in place of those kept."""
  stacks = [averaged[i].reshape(plan.leaves[i].view) for i in plan.compressible]
  widths = [q.shape[2] for q in factors.q]
  p, q = leading_factors(stacks, widths, jax.random.fold_in(key, 4))
  return Factors(p if factors.p else [], q)


def _energy(stack: jax.Array) -> jax.Array:
  """Sum of squares of each matrix, [k]."""
  return jnp.sum(jnp.square(stack), axis=(1, 2))


def _zip(*sequences: Sequence) -> Any:
  return zip(*sequences, strict=True)
