"""One exchange of a gradient: factors for matrices, dense for the rest.

For every matrix M [m, n] = gradient + residual of a leaf sent at rank r:

  P   = orth(mean_i M_i basis(Q))      P [m, r] travels
  Q_i = M_i^T P,  Q' = mean_i Q_i      Q' [n, r] travels
  update = P Q'^T,  residual_i = M_i - P Q_i^T

One step of subspace iteration, warm-started by the last Q (Vogels et al.
2019, Algorithm 1, arXiv:1905.13727). Differences:

- A replica keeps what the factors could not carry of its own M_i, where the
  paper subtracts the mean update. The means of both residuals are equal, and
  so are all updates; but what sets replicas apart is never sent by the
  paper's, and piles up in it from step to step.
- Q is made orthonormal before it is used, and directions that died (a
  gradient of low rank leaves zero columns, and M^T 0 = 0 would keep them so
  for ever) are drawn anew.
- Columns stay sorted by energy, so that slicing Q to a smaller rank keeps the
  best. Columns beyond the rank in use stay in the state and serve again when
  the rank grows back. The residual does not depend on the rank, and stays.

Where matrices have ranks of their own (`plan.spread` above 1), their factors
travel packed (`packing`), in as many bytes as if all had the rung's rank.

What is stacked are factors, not gradients: a leaf is multiplied where it
lies, and only the small [r, r] problems of all matrices are batched.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from edgc_jax import collectives, packing, sketch
from edgc_jax.comm_cost import Plan
from edgc_jax.low_rank_state import gaussian_columns
from edgc_jax.orthonormalize import (
  orthonormalize,
  principal_columns,
  unit_columns,
)


class Exchange(NamedTuple):
  """What came back: equal on all replicas, but for the residual.

  Numbers of a leaf's k matrices are zero where it was sent dense.
  """

  averaged: list[jax.Array]  # float32, one per leaf, the leaf's shape
  residual: list[jax.Array]  # float32, compressible leaves, local
  factor_q: list[jax.Array]  # as in the state, compressible leaves
  columns: list[jax.Array]  # float32 [k, columns], squared norms of Q' columns
  lost: list[jax.Array]  # float32 [k], |mean_i residual_i|^2, from a sketch
  residual_energy: list[jax.Array]  # float32 [k], mean_i |residual_i|^2
  is_finite: jax.Array  # bool []


def exchange(
  plan: Plan,
  rung: jax.Array,
  matrices: Sequence[jax.Array],
  factor_q: Sequence[jax.Array],
  key: jax.Array,
  axis_name: str,
  ranks: jax.Array | None = None,
) -> Exchange:
  """Averages over replicas at the rung chosen in the graph.

  Every rung is a branch with collectives of that rung's own size, so one
  compiled program sends, at each step, the bytes of the rung it is on.

  Args:
    plan: Static: leaves, ladder, least ratio, spread.
    rung: int32 [], index into the ladder, equal on all replicas.
    matrices: All leaves in order, float32, residual added.
    factor_q: Q of the compressible leaves.
    key: Draws new columns for directions that died, and the sketches' signs.
    axis_name: The bound axis of the replicas.
    ranks: int32 [K], columns of each matrix, where `plan.spread` lets them
      differ; the sums over P and over Q must not exceed those at the rung's
      own rank (`allocation`).

  Returns:
    The exchange; wire bytes are `plan.wire_bytes(plan.ladder[rung])`.
  """
  widths = [
    tuple(plan.columns(leaf, rank) for leaf in plan.leaves)
    for rank in plan.ladder
  ]
  # Rungs that send the same are one branch: every branch is compiled.
  distinct = list(dict.fromkeys(widths))
  rungs = [plan.ladder[widths.index(width)] for width in distinct]
  branches = [_branch(plan, rank, key, axis_name) for rank in rungs]
  own = [None] * len(factor_q) if plan.spread == 1 else plan.by_leaf(ranks)
  operands = (list(matrices), list(factor_q), own)
  # TF32 or bf16 products would leave bases orthonormal to 1e-3 only.
  with jax.default_matmul_precision("highest"):
    if len(branches) == 1:
      return branches[0](*operands)
    branch = jnp.array([distinct.index(width) for width in widths])[rung]
    return jax.lax.switch(branch, branches, *operands)


def _branch(plan: Plan, rank: int, key: jax.Array, axis_name: str) -> Callable:
  """The exchange at one static rung."""
  slot = {leaf: position for position, leaf in enumerate(plan.compressible)}
  low = [i for i, leaf in enumerate(plan.leaves) if plan.columns(leaf, rank)]
  dense = [i for i in range(len(plan.leaves)) if i not in set(low)]

  def run(
    leaves: list[jax.Array],
    factor_q: list[jax.Array],
    ranks: list[jax.Array | None],
  ) -> Exchange:
    averaged: list[Any] = [None] * len(leaves)
    # What is sent dense leaves nothing behind.
    residual = [jnp.zeros_like(leaves[i]) for i in plan.compressible]
    columns = [jnp.zeros_like(q[:, 0]) for q in factor_q]
    lost = [jnp.zeros_like(c, shape=len(c)) for c in columns]
    residual_energy, factor_q = list(lost), list(factor_q)
    wire = _Wire(plan, rank, low, [ranks[slot[i]] for i in low])
    stacks = [leaves[i].reshape(plan.leaves[i].view) for i in low]
    bases = _bases(
      wire.slices([factor_q[slot[i]] for i in low]), wire.live, key
    )
    local_p = [m @ q for m, q in _zip(stacks, bases)]
    sent = {
      "dense": [leaves[i] for i in dense],
      "factor_p": wire.pack(local_p),
    }
    received = collectives.mean(sent, axis_name)
    # A non-finite entry anywhere makes what arrives non-finite everywhere,
    # so all replicas agree without a collective for it.
    is_finite = _all_finite((received["dense"], received["factor_p"]))
    factor_p = orthonormalize(
      [
        jnp.where(is_finite, p, 0.0)
        for p in wire.unpack(received["factor_p"], local_p)
      ]
    )
    local_q = [jnp.swapaxes(m, 1, 2) @ p for m, p in _zip(stacks, factor_p)]
    own = [_energy(m) - _energy(q) for m, q in _zip(stacks, local_q)]
    signs = sketch.draw_signs(jax.random.fold_in(key, 1), stacks)
    sketches = [
      sketch.residual_sketch(*parts)
      for parts in _zip(stacks, factor_p, local_q, signs)
    ]
    mean_q, sketches, own = collectives.mean(
      (wire.pack(local_q), sketches, own), axis_name
    )
    is_finite &= _all_finite(mean_q)
    mean_q = wire.unpack(mean_q, local_q)
    for i, value in _zip(dense, received["dense"]):
      averaged[i] = value
    for j, (i, m, p, q) in enumerate(_zip(low, stacks, factor_p, mean_q)):
      shape, place = plan.leaves[i].shape, slot[i]
      averaged[i] = _product(p, q).reshape(shape)
      residual[place] = (m - _product(p, local_q[j])).reshape(shape)
      lost[place] = jnp.sum(jnp.square(sketches[j]), axis=1)
      residual_energy[place] = jnp.maximum(own[j], 0.0)
      norms = jnp.sum(jnp.square(q), axis=1)
      columns[place] = columns[place].at[:, : norms.shape[1]].set(norms)
      factor_q[place] = wire.merged(j, q, factor_q[place])
    return Exchange(
      averaged, residual, factor_q, columns, lost, residual_energy, is_finite
    )

  return run


class _Wire:
  """How the factors of one rung travel: as they are, or packed."""

  def __init__(
    self,
    plan: Plan,
    rank: int,
    low: Sequence[int],
    ranks: Sequence[jax.Array | None],
  ):
    leaves = [plan.leaves[i] for i in low]
    self._widths = [plan.limit(leaf, rank) for leaf in leaves]
    # Columns that all matrices of a leaf have together.
    self._columns = [
      leaf.view.count * plan.columns(leaf, rank) for leaf in leaves
    ]
    self._ranks = ranks
    self._is_packed = plan.spread > 1 and bool(low)
    self.live = None
    if self._is_packed:
      self.live = [
        packing.live_columns(r, w) for r, w in _zip(ranks, self._widths)
      ]

  def slices(self, factor_q: Sequence[jax.Array]) -> list[jax.Array]:
    """The columns of Q that this rung uses, zero where not live."""
    sliced = [q[..., :width] for q, width in _zip(factor_q, self._widths)]
    if self.live is None:
      return sliced
    return [jnp.where(live, q, 0.0) for q, live in _zip(sliced, self.live)]

  def pack(self, factors: list[jax.Array]) -> Any:
    if not self._is_packed:
      return factors
    sizes = [n * f.shape[1] for n, f in _zip(self._columns, factors)]
    return packing.pack(factors, self._ranks, sum(sizes))

  def unpack(self, sent: Any, like: list[jax.Array]) -> list[jax.Array]:
    if not self._is_packed:
      return sent
    return packing.unpack(sent, like, self._ranks)

  def merged(self, j: int, new: jax.Array, old: jax.Array) -> jax.Array:
    """Q for the state: columns that were not in use stay as they were."""
    width = new.shape[-1]
    if self.live is not None:
      new = jnp.where(self.live[j], new, old[..., :width])
    return jnp.concatenate([new, old[..., width:]], axis=-1)


def _bases(
  factors: list[jax.Array], live: list[jax.Array] | None, key: jax.Array
) -> list[jax.Array]:
  """Orthogonal unit columns spanning Q; dead ones replaced by Gaussian ones.

  Where there is a rank per matrix, columns beyond it stay zero.
  """
  if not factors:
    return []
  # Columns differ in age and scale: those of a first use, or of louder times,
  # must not make the others look like rounding noise.
  columns, alive = principal_columns([unit_columns(q) for q in factors])
  alive = [a[:, None, :] for a in alive]
  if live is not None:
    alive = [a | ~inside for a, inside in _zip(alive, live)]

  def refill(columns: list[jax.Array]) -> list[jax.Array]:
    # One draw for all leaves: a generator for each compiles slowly.
    sizes = [q.size for q in columns]
    draws = jax.random.normal(key, (sum(sizes),), jnp.float32)
    draws = jnp.split(draws, np.cumsum(sizes[:-1]))
    return [
      jnp.where(a, q, gaussian_columns(new.reshape(q.shape)))
      for q, a, new in _zip(columns, alive, draws)
    ]

  # So many random numbers cost more than all else here: only when needed.
  nothing_died = jnp.all(jnp.stack([jnp.all(a) for a in alive]))
  return jax.lax.cond(nothing_died, lambda c: c, refill, columns)


def _product(p: jax.Array, q: jax.Array) -> jax.Array:
  """P Q^T for all matrices of a stack."""
  return p @ jnp.swapaxes(q, 1, 2)


def _energy(stack: jax.Array) -> jax.Array:
  """Sum of squares of each matrix, [k]."""
  return jnp.sum(jnp.square(stack), axis=(1, 2))


def _all_finite(values: Any) -> jax.Array:
  values = jax.tree.leaves(values)
  if not values:
    return jnp.array(True)
  return jnp.all(jnp.stack([jnp.all(jnp.isfinite(v)) for v in values]))


def _zip(*sequences: Sequence) -> Any:
  return zip(*sequences, strict=True)
