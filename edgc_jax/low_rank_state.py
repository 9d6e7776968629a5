"""What the low-rank exchange keeps from step to step: Q and the residual."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from edgc_jax.comm_cost import Plan


class LowRankState(NamedTuple):
  """Both are trees like the parameters, `MaskedNode` where a leaf is dense."""

  factor_q: Any  # float32 [k, n, columns]; equal on all replicas
  residual: Any  # float32, the leaf's shape; each replica has its own


def init_factors(plan: Plan, seed: int) -> list[jax.Array]:
  """Gaussian first factors, the same on every replica and stage."""
  key = jax.random.key(seed)
  factors = []
  for i in plan.compressible:
    leaf = plan.leaves[i]
    shape = (leaf.view.count, leaf.view.cols, plan.factor_columns(leaf))
    own_key = jax.random.fold_in(key, plan.positions[i])
    draw = jax.random.normal(own_key, shape, jnp.float32)
    factors.append(gaussian_columns(draw))
  return factors


def init_residual(plan: Plan) -> list[jax.Array]:
  """Zeros, a replica's own, for each compressible leaf."""
  return [
    jnp.zeros(plan.leaves[i].shape, jnp.float32) for i in plan.compressible
  ]


def gaussian_columns(gaussian: jax.Array) -> jax.Array:
  """Scales [k, n, r] Gaussian entries to columns of expected length one."""
  return gaussian * gaussian.shape[1] ** -0.5


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
  """The state from such lists."""
  return LowRankState(
    like_tree(plans, tree, factor_q), like_tree(plans, tree, residual)
  )


def like_tree(
  plans: Sequence[Plan], tree: Any, values: Sequence[Sequence]
) -> Any:
  """A tree like `tree`, with `optax.MaskedNode` where a leaf is dense.

  Args:
    plans: The plans of some or all leaves.
    tree: Parameters or gradients.
    values: For each plan, one value for each compressible leaf.

  Returns:
    The tree.
  """
  structure = jax.tree.structure(tree)
  slots: list[Any] = [optax.MaskedNode()] * structure.num_leaves
  for plan, own in zip(plans, values, strict=True):
    for place, value in zip(_places(plan), own, strict=True):
      slots[place] = value
  return jax.tree.unflatten(structure, slots)


def _places(plan: Plan) -> list[int]:
  """Where the compressible leaves stand in the whole tree."""
  return [plan.positions[i] for i in plan.compressible]
