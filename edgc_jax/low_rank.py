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

What is stacked are factors, not gradients: a leaf is multiplied where it
lies, and only the small [r, r] problems of all matrices are batched.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from edgc_jax import collectives
from edgc_jax.comm_cost import Plan
from edgc_jax.orthonormalize import orthonormalize, principal_columns


class LowRankState(NamedTuple):
  """Both are trees like the parameters, `MaskedNode` where a leaf is dense."""

  factor_q: Any  # float32 [k, n, rank_max]; equal on all replicas
  residual: Any  # float32, the leaf's shape; each replica has its own


class Exchange(NamedTuple):
  """What came back: equal on all replicas, but for the residual."""

  averaged: list[jax.Array]  # float32, one per leaf, the leaf's shape
  residual: list[jax.Array]  # float32, compressible leaves, local
  factor_q: list[jax.Array]  # float32 [k, n, rank_max], compressible leaves
  energy: jax.Array  # float32 [], mean_i sum |M_i|^2 over factor leaves
  kept: jax.Array  # float32 [], mean_i sum |P Q_i^T|^2 over them
  is_finite: jax.Array  # bool []


def init_factors(plan: Plan, seed: int) -> list[jax.Array]:
  """Gaussian first factors, the same on every replica and stage."""
  key = jax.random.key(seed)
  factors = []
  for i in plan.compressible:
    leaf = plan.leaves[i]
    shape = (leaf.view.count, leaf.view.cols, plan.factor_columns(leaf))
    own_key = jax.random.fold_in(key, plan.positions[i])
    draw = jax.random.normal(own_key, shape, jnp.float32)
    factors.append(_unit_columns(draw))
  return factors


def init_residual(plan: Plan) -> list[jax.Array]:
  """Zeros, a replica's own, for each compressible leaf."""
  return [
    jnp.zeros(plan.leaves[i].shape, jnp.float32) for i in plan.compressible
  ]


def exchange(
  plan: Plan,
  rung: jax.Array,
  matrices: Sequence[jax.Array],
  factor_q: Sequence[jax.Array],
  key: jax.Array,
  axis_name: str,
) -> Exchange:
  """Averages over replicas at the rung chosen in the graph.

  Every rung is a branch with collectives of that rung's own size, so one
  compiled program sends, at each step, the bytes of the rung it is on.

  Args:
    plan: Static: leaves, ladder, least ratio.
    rung: int32 [], index into the ladder, equal on all replicas.
    matrices: All leaves in order, float32, residual added.
    factor_q: Q of the compressible leaves.
    key: Draws new columns for directions that died.
    axis_name: The bound axis of the replicas.

  Returns:
    The exchange; wire bytes are `plan.wire_bytes(plan.ladder[rung])`.
  """
  widths = [
    tuple(plan.columns(leaf, rank) for leaf in plan.leaves)
    for rank in plan.ladder
  ]
  # Rungs that send the same are one branch: every branch is compiled.
  distinct = list(dict.fromkeys(widths))
  ranks = [plan.ladder[widths.index(width)] for width in distinct]
  branches = [_branch(plan, rank, key, axis_name) for rank in ranks]
  operands = (list(matrices), list(factor_q))
  # TF32 or bf16 products would leave bases orthonormal to 1e-3 only.
  with jax.default_matmul_precision("highest"):
    if len(branches) == 1:
      return branches[0](*operands)
    branch = jnp.array([distinct.index(width) for width in widths])[rung]
    return jax.lax.switch(branch, branches, *operands)


def _branch(plan: Plan, rank: int, key: jax.Array, axis_name: str) -> Callable:
  """The exchange at one static rank."""
  slot = {leaf: position for position, leaf in enumerate(plan.compressible)}
  low = [i for i, leaf in enumerate(plan.leaves) if plan.columns(leaf, rank)]
  dense = [i for i in range(len(plan.leaves)) if i not in set(low)]

  def run(leaves: list[jax.Array], factor_q: list[jax.Array]) -> Exchange:
    factor_q = list(factor_q)
    averaged: list[Any] = [None] * len(leaves)
    # What is sent dense leaves nothing behind.
    residual = [jnp.zeros_like(leaves[i]) for i in plan.compressible]
    stacks = [leaves[i].reshape(plan.leaves[i].view) for i in low]
    widths = [plan.columns(plan.leaves[i], rank) for i in low]
    bases = _bases(
      [factor_q[slot[i]][..., :w] for i, w in zip(low, widths, strict=True)],
      key,
    )
    sent = {
      "dense": [leaves[i] for i in dense],
      "factor_p": [m @ q for m, q in zip(stacks, bases, strict=True)],
      "energy": _energy(stacks),
    }
    received = collectives.mean(sent, axis_name)
    for i, value in zip(dense, received["dense"], strict=True):
      averaged[i] = value
    # A non-finite entry anywhere makes what arrives non-finite everywhere,
    # so all replicas agree without a collective for it.
    is_finite = _all_finite(received["dense"] + received["factor_p"])
    factor_p = orthonormalize(
      [jnp.where(is_finite, p, 0.0) for p in received["factor_p"]]
    )
    local_q = [
      jnp.swapaxes(m, 1, 2) @ p for m, p in zip(stacks, factor_p, strict=True)
    ]
    mean_q, kept = collectives.mean((local_q, _energy(local_q)), axis_name)
    is_finite &= _all_finite(mean_q)
    for i, m, p, own, q in zip(
      low, stacks, factor_p, local_q, mean_q, strict=True
    ):
      shape, place = plan.leaves[i].shape, slot[i]
      averaged[i] = (p @ jnp.swapaxes(q, 1, 2)).reshape(shape)
      residual[place] = (m - p @ jnp.swapaxes(own, 1, 2)).reshape(shape)
      unused = factor_q[place][:, :, q.shape[-1] :]
      factor_q[place] = jnp.concatenate([q, unused], axis=-1)
    # What no leaf was sent for is zero, of the type that the leaves give.
    zero = sum(jnp.zeros_like(x, shape=()) for x in received["dense"])
    return Exchange(
      averaged,
      residual,
      factor_q,
      received["energy"] if low else zero,
      kept if low else zero,
      is_finite,
    )

  return run


def _bases(factors: list[jax.Array], key: jax.Array) -> list[jax.Array]:
  """Orthogonal unit columns spanning Q; dead ones replaced by Gaussian ones."""
  if not factors:
    return []
  columns, alive = principal_columns(factors)

  def refill(columns: list[jax.Array]) -> list[jax.Array]:
    # One draw for all leaves: a generator for each compiles slowly.
    sizes = [q.size for q in columns]
    draws = jax.random.normal(key, (sum(sizes),), jnp.float32)
    draws = jnp.split(draws, np.cumsum(sizes[:-1]))
    return [
      jnp.where(live[:, None, :], q, _unit_columns(new.reshape(q.shape)))
      for q, live, new in zip(columns, alive, draws, strict=True)
    ]

  # Drawing random numbers costs more than all else here: only when needed.
  nothing_died = jnp.all(jnp.stack([jnp.all(live) for live in alive]))
  return jax.lax.cond(nothing_died, lambda c: c, refill, columns)


def _unit_columns(gaussian: jax.Array) -> jax.Array:
  """Scales [k, n, r] Gaussian entries to columns of expected length one."""
  return gaussian * gaussian.shape[1] ** -0.5


def _energy(stacks: Sequence[jax.Array]) -> jax.Array | tuple[()]:
  """Sum of all squares; nothing, and no bytes, where there is no matrix."""
  return sum(jnp.sum(jnp.square(m)) for m in stacks) if stacks else ()


def _all_finite(values: Sequence[jax.Array]) -> jax.Array:
  if not values:
    return jnp.array(True)
  return jnp.all(jnp.stack([jnp.all(jnp.isfinite(v)) for v in values]))


def unpack(
  plans: Sequence[Plan], state: LowRankState
) -> tuple[list[list[jax.Array]], list[list[jax.Array]]]:
  """The arrays of Q and of the residual, a list for each plan."""
  places = sorted(p for plan in plans for p in _places(plan))

  def by_plan(tree: Any) -> list[list[jax.Array]]:
    arrays = dict(zip(places, jax.tree.leaves(tree), strict=True))
    return [[arrays[p] for p in _places(plan)] for plan in plans]

  return by_plan(state.factor_q), by_plan(state.residual)


def pack(
  plans: Sequence[Plan],
  tree: Any,
  factor_q: Sequence[Sequence],
  residual: Sequence[Sequence],
) -> LowRankState:
  """Trees like `tree`, with `optax.MaskedNode` where a leaf is dense."""
  structure = jax.tree.structure(tree)

  def like_tree(values: Sequence[Sequence]) -> Any:
    slots: list[Any] = [optax.MaskedNode()] * structure.num_leaves
    for plan, own in zip(plans, values, strict=True):
      for place, value in zip(_places(plan), own, strict=True):
        slots[place] = value
    return jax.tree.unflatten(structure, slots)

  return LowRankState(like_tree(factor_q), like_tree(residual))


def _places(plan: Plan) -> list[int]:
  """Where the compressible leaves stand in the whole tree."""
  return [plan.positions[i] for i in plan.compressible]
