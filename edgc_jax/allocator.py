"""Which ranks the matrices of a model have, from window to window.

The controller says how much may be sent, by its rung; the allocator says
where. It measures in every step what the columns of each matrix carry, and
at the end of a window shares the rung's bytes out anew (`allocation`).
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from edgc_jax import allocation
from edgc_jax.comm_cost import Plan

# Least columns of a matrix, so that none goes blind to its own gradient.
_FLOOR = 2
_TINY = float(np.finfo(np.float32).tiny)


class Measured(NamedTuple):
  """What a step, or the mean of a window, says about K matrices."""

  lost: jax.Array  # float32 [K], |mean of residuals|^2
  columns: jax.Array  # float32 [K, width], squared norms of the columns of Q

  @property
  def energy(self) -> jax.Array:
    """Of the mean of gradients and residuals, float32 [K]."""
    return self.lost + jnp.sum(self.columns, axis=1)


class AllocatorState(NamedTuple):
  """Ranks and window sums; equal over the data axis, one a stage on stages."""

  ranks: jax.Array  # int32 [K], columns in use, 0 where sent dense
  predicted_error: jax.Array  # float32 [], share of energy expected to be lost
  predicted_errors: jax.Array  # float32 [K], the same of each matrix
  sums: Measured  # over the compressed steps of this window
  num_steps: jax.Array  # float32 []


@dataclasses.dataclass(frozen=True)
class Allocator:
  """Shares out the bytes of a rung; see `edgc` for the options' meaning."""

  plan: Plan
  curves: str
  scale_exponent: float

  def init(self, rung: int) -> AllocatorState:
    """Before the first step every matrix has the rank of the rung."""
    # A new array for every field: one that served twice cannot be donated.
    num, width = len(self.plan.matrices), self._width
    per_matrix = functools.partial(jnp.zeros, num, jnp.float32)
    sums = Measured(per_matrix(), jnp.zeros((num, width)))
    return AllocatorState(
      jnp.array(self._tables.uniform[rung]),
      jnp.zeros((), jnp.float32),
      per_matrix(),
      sums,
      jnp.zeros((), jnp.float32),
    )

  def advance(
    self,
    state: AllocatorState,
    is_closed: jax.Array,
    rung: jax.Array,
    variance: jax.Array,
  ) -> AllocatorState:
    """Shares out anew where a window has ended.

    Args:
      state: The state after the step before.
      is_closed: bool [], a window ended with it (`Controller.closes_window`).
      rung: int32 [], that of the step to come.
      variance: float32 [K], mean square of the entries in the last window.

    Returns:
      The state to use in the step to come.
    """
    return jax.lax.cond(
      is_closed,
      self._share_out,
      lambda s, *_: s,
      state,
      rung,
      variance,
    )

  def observe(
    self, state: AllocatorState, measured: Measured, is_usable: jax.Array
  ) -> AllocatorState:
    """Adds what a step measured; dense and non-finite steps add nothing."""
    is_usable &= jnp.any(state.ranks > 0)
    sums = jax.tree.map(
      lambda total, x: jnp.where(is_usable, total + x, total),
      state.sums,
      measured,
    )
    return state._replace(sums=sums, num_steps=state.num_steps + is_usable)

  def _share_out(
    self, state: AllocatorState, rung: jax.Array, variance: jax.Array
  ) -> AllocatorState:
    tables = jax.tree.map(lambda t: jnp.asarray(t)[rung], self._tables)
    mean = jax.tree.map(
      lambda total: total / jnp.maximum(state.num_steps, 1.0), state.sums
    )
    is_measured = state.num_steps > 0
    sides, width = self.plan.sides, self._width
    last = jnp.maximum(state.ranks, 1)
    energy = mean.energy
    if self.curves == "energy":
      gains = allocation.energy_gains(mean.columns, energy, last)
    else:
      energy = variance * self.plan.sizes
    if self.curves == "entropy":
      is_measured = jnp.any(variance > 0)
      gains = allocation.model_gains(variance, sides, width)
    elif self.curves == "calibrated":
      share = allocation.lost_share(mean.lost, mean.energy)
      gains = allocation.calibrated_gains(variance, sides, width, share, last)
    weights = allocation.scale_weights(variance, self.scale_exponent)
    floors, limits = _near(state.ranks, tables, sides)
    chosen = allocation.allocate(
      weights[:, None] * gains, sides, tables.budgets, floors, limits
    )
    ranks = jnp.where(is_measured, chosen, tables.uniform)
    live = jnp.arange(width) < ranks[:, None]
    left = energy - jnp.where(live, gains, 0.0).sum(1)
    left = jnp.where(is_measured & (ranks > 0), left, 0.0)
    left = jnp.clip(left, 0.0, energy)
    low = jnp.where(ranks > 0, energy, 0.0)
    return AllocatorState(
      ranks,
      jnp.sum(left) / jnp.maximum(jnp.sum(low), _TINY),
      left / jnp.maximum(energy, _TINY),
      jax.tree.map(jnp.zeros_like, state.sums),
      jnp.zeros_like(state.num_steps),
    )

  @property
  def _width(self) -> int:
    """Columns of the matrix that may have most."""
    plan = self.plan
    return max((plan.factor_columns(leaf) for leaf in plan.matrices), default=0)

  @functools.cached_property
  def _tables(self) -> "_Tables":
    return _tables(self.plan)


class _Tables(NamedTuple):
  """What each rung allows; integers with a first axis of rungs."""

  uniform: np.ndarray  # [rungs, K], the ranks if all are alike
  budgets: np.ndarray  # [rungs, 2], values of P and of Q
  floors: np.ndarray  # [rungs, K]
  limits: np.ndarray  # [rungs, K]


def _near(
  ranks: jax.Array, tables: _Tables, sides: np.ndarray
) -> tuple[jax.Array, jax.Array]:
  """Floors and limits between half and twice the ranks so far.

  What was measured tells little of ranks far off; and what a matrix is owed
  depends on the ranks it had. Without this they swing from the floor to the
  limit and back.
  """
  has_some = ranks > 0
  limits = jnp.minimum(tables.limits, jnp.maximum(2 * ranks, tables.floors))
  limits = jnp.where(has_some, limits, tables.limits)
  floors = jnp.minimum(jnp.maximum(ranks // 2, tables.floors), limits)
  # A budget that fell by half and more leaves no room for that.
  fit = jnp.all(floors @ jnp.asarray(sides, jnp.int32) <= tables.budgets)
  return jnp.where(fit, floors, tables.floors), limits


def _tables(plan: Plan) -> _Tables:
  uniform = plan.uniform_ranks
  limits = [
    [plan.limit(leaf, rank) for leaf in plan.matrices] for rank in plan.ladder
  ]
  budgets = (uniform.astype(np.int64) @ plan.sides).astype(np.int32)
  return _Tables(
    uniform,
    budgets,
    np.minimum(uniform, _FLOOR),
    np.array(limits, np.int32).reshape(uniform.shape),
  )
