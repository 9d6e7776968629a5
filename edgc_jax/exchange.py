"""What every exchange of gradients gives back, whatever travels in it."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp

from edgc_jax.comm.dataflow import varying_axes
from edgc_jax.exchange_state import Factors
from edgc_jax.plan.plan import Plan


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
