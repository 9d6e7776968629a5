"""What an exchange keeps from step to step: warm factors and the residual."""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import optax

from edgc_jax import validation
from edgc_jax.comm.dataflow import varying_axes
from edgc_jax.plan.plan import Plan


class ExchangeState(NamedTuple):
  """Trees like the parameters, `MaskedNode` where a leaf is dense.

  Empty where a reducer keeps no such thing.
  """

  factor_p: Any  # float32 [k, m, columns], where factors alternate
  factor_q: Any  # float32 [k, n, columns]; equal on all replicas, as P is
  residual: Any  # float32, the leaf's shape; each replica has its own


class Factors(NamedTuple):
  """The factors of one plan's compressible leaves; none where not kept."""

  p: list[jax.Array]
  q: list[jax.Array]


def init_factors(plan: Plan, seed: int) -> Factors:
  """Gaussian first factors, the same on every replica and stage."""
  key = jax.random.key(seed)
  p, q = [], []
  for i in plan.compressible if plan.has_factors else ():
    leaf = plan.leaves[i]
    own_key = jax.random.fold_in(key, plan.positions[i])
    columns = plan.factor_columns(leaf)
    count, rows, cols = leaf.view
    draw = jax.random.normal(own_key, (count, cols, columns), jnp.float32)
    q.append(gaussian_columns(draw))
    if plan.alternating:
      draw = jax.random.normal(
        jax.random.fold_in(own_key, 1), (count, rows, columns), jnp.float32
      )
      p.append(gaussian_columns(draw))
  return Factors(p, q)


def init_residual(plan: Plan) -> list[jax.Array]:
  """Zeros, a replica's own, for each compressible leaf."""
  if not plan.has_residual:
    return []
  return [
    jnp.zeros(plan.leaves[i].shape, jnp.float32) for i in plan.compressible
  ]


def gaussian_columns(gaussian: jax.Array) -> jax.Array:
  """Scales [k, n, r] Gaussian entries to columns of expected length one."""
  return gaussian * gaussian.shape[1] ** -0.5


def unpack(
  plans: Sequence[Plan], state: ExchangeState
) -> tuple[list[Factors], list[list[jax.Array]]]:
  """The factors and the residual's arrays, for each plan.

  Raises:
    ValueError: if an array is not of the shape that one replica has.
  """
  places = sorted(p for plan in plans for p in _places(plan))

  def by_plan(tree: Any) -> list[list[jax.Array]]:
    leaves = jax.tree.leaves(tree)
    if not leaves:
      return [[] for _ in plans]
    arrays = dict(zip(places, leaves, strict=True))
    return [[arrays[p] for p in _places(plan)] for plan in plans]

  p, q = by_plan(state.factor_p), by_plan(state.factor_q)
  residuals = by_plan(state.residual)
  for plan, own_p, own_q, residual in zip(plans, p, q, residuals, strict=True):
    leaves = [plan.leaves[i] for i in plan.compressible]
    for leaf, e in zip(leaves, residual, strict=False):
      validation.require_shape("residual", leaf.path, e.shape, leaf.shape)
    for name, factors, side in (
      ("factor_p", own_p, "rows"),
      ("factor_q", own_q, "cols"),
    ):
      for leaf, factor in zip(leaves, factors, strict=False):
        height = getattr(leaf.view, side)
        shape = (leaf.view.count, height, plan.factor_columns(leaf))
        validation.require_shape(name, leaf.path, factor.shape, shape)
  return [Factors(*both) for both in zip(p, q, strict=True)], residuals


def pack(
  plans: Sequence[Plan],
  tree: Any,
  factors: Sequence[Factors],
  residual: Sequence[Sequence],
) -> ExchangeState:
  """The state from such lists."""

  def kept(values: Sequence[Sequence], is_kept: bool) -> Any:
    return like_tree(plans, tree, values) if is_kept else ()

  plan = plans[0]
  return ExchangeState(
    kept([f.p for f in factors], plan.has_factors and plan.alternating),
    kept([f.q for f in factors], plan.has_factors),
    kept(residual, plan.has_residual),
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


class Exchange(NamedTuple):
  """What came back: equal on all replicas, but for the residual.

  Equal to rounding where replicas round differently; what came in bits decides
  `is_finite`, which is equal always. Numbers of a leaf's k matrices are zero
  where it was sent dense, in float32, and squares are in units of `unit`
  squared, so that those of 1e-30 or 1e+30 are in range.
  """

  # float32, one per leaf, the leaf's shape; see `zeros_unless`
  averaged: list[jax.Array]
  residual: list[jax.Array]  # float32, compressible leaves, local
  factors: Factors  # as in the state
  columns: list[jax.Array]  # float32 [k, columns], squared norms of Q' columns
  lost: list[jax.Array]  # float32 [k], |mean_i residual_i|^2, from a sketch
  residual_energy: list[jax.Array]  # float32 [k], mean_i |residual_i|^2
  unit: jax.Array  # float32 [], positive
  is_finite: jax.Array  # bool []


def unit_of(received: Sequence[jax.Array]) -> jax.Array:
  """The largest magnitude in what all replicas received; 1 if that is zero."""
  largest = jnp.max(jnp.stack([jnp.max(jnp.abs(x)) for x in received]))
  return jnp.where((largest > 0) & jnp.isfinite(largest), largest, 1.0)


def zeros_unless(is_finite: jax.Array, mean: jax.Array) -> jax.Array:
  """What came back, or zeros where something in the exchange is not finite.

  Where stages differ in what is finite, what they share stays as it is: they
  have to agree first.
  """
  differs = set(varying_axes(is_finite))
  if not differs <= set(varying_axes(mean)):
    return mean
  return jnp.where(is_finite, mean, jnp.zeros_like(mean))


class ExchangeFn(Protocol):
  """Averages over replicas at the rung chosen in the graph."""

  def __call__(
    self,
    plan: Plan,
    rung: jax.Array,
    matrices: list[jax.Array],
    factors: Factors,
    key: jax.Array,
    axis_name: str,
    *,
    count: jax.Array,
    ranks: jax.Array | None,
  ) -> Exchange:
    """One exchange.

    Args:
      plan: Static: leaves, ladder, how values travel.
      rung: int32 [], index into the ladder, equal on all replicas.
      matrices: All leaves in order, float32, residual added.
      factors: Those of the state.
      key: For whatever is drawn; the same on all replicas, new in each step.
      axis_name: The bound axis of the replicas.
      count: int32 [], steps done.
      ranks: int32 [K], columns of each matrix, where these may differ.

    Returns:
      The exchange.
    """
