"""Types that all exchanges share: their state, result and signature."""

from typing import Any, NamedTuple, Protocol

import jax

from edgc_jax.plan.plan import Plan


class ExchangeState(NamedTuple):
  """State of the exchanges, in trees like the parameters.

  Leaves that are always sent dense have an `optax.MaskedNode`. A field is ()
  if the reducer has no factors, or no error feedback.
  """

  factor_q: Any  # float32 [k, n, columns]; equal on all replicas
  residual: Any  # float32, the leaf's shape; each replica has its own


class Exchange(NamedTuple):
  """Result of one exchange.

  All fields except `residual` are equal on all replicas, up to rounding if
  their processors round differently; `is_finite` is always equal. If it is
  false, `averaged` is zero, and `residual` and `factors` are those from before
  the step. `columns`, `lost` and `residual_energy` of a leaf are zero if it was
  sent dense in float32. They are in units of `unit` squared, so that gradients
  of 1e-30 or 1e+30 stay in range.
  """

  averaged: list[jax.Array]  # in the leaves' dtypes; see `zeros_unless`
  residual: list[jax.Array]  # float32, of `plan.with_residual`, local
  factors: list[jax.Array]  # Q, as in the state
  columns: list[jax.Array]  # float32 [k, columns], squared norms of Q' columns
  lost: list[jax.Array]  # float32 [k], |mean_i residual_i|^2, from a sketch
  residual_energy: list[jax.Array]  # float32 [k], mean_i |residual_i|^2
  unit: jax.Array  # float32 [], positive
  is_finite: jax.Array  # bool []


class ExchangeFn(Protocol):
  """A function that averages all leaves at a rung chosen in the graph."""

  def __call__(
    self,
    plan: Plan,
    rung: jax.Array,
    gradients: list[jax.Array],
    residuals: list[jax.Array],
    factors: list[jax.Array],
    key: jax.Array,
    axis_name: str,
    ranks: jax.Array | None = None,
    earlier: Any = (),
  ) -> Exchange:
    """Runs one exchange.

    Args:
      plan: Static: leaves, ladder, encoding.
      rung: int32 [], index into the ladder, equal on all replicas.
      gradients: All leaves in order, local.
      residuals: Residuals of the leaves of `plan.with_residual`.
      factors: Q of the compressible leaves.
      key: Source of all random draws; equal on all replicas, new at each step.
      axis_name: The bound axis of the replicas.
      ranks: int32 [K], columns of each matrix; None if all have the rank of
        the rung.
      earlier: Results of the collectives before; those of the exchange follow
        them (`dataflow.in_turn`).

    Returns:
      The means, the next factors and residuals, and energies of the error.
    """
