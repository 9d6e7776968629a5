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
from edgc_jax.comm import agreement
from edgc_jax.plan.plan import Plan

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
    columns = jnp.zeros((num, width), jnp.float32)
    sums = Measured(per_matrix(), columns)
    return AllocatorState(
      jnp.array(self._tables.uniform[rung]),
      jnp.zeros((), jnp.float32),
      per_matrix(),
      sums,
      jnp.zeros((), jnp.float32),
    )

  def observe(
    self, state: AllocatorState, measured: Measured, is_usable: jax.Array
  ) -> AllocatorState:
    """Adds what a step measured; dense and non-finite steps add nothing.

    Nor does a step of finite gradients whose squares are not.
    """
    is_usable &= jnp.any(state.ranks > 0) & agreement.all_finite(measured)
    sums = jax.tree.map(
      lambda total, x: jnp.where(is_usable, total + x, total),
      state.sums,
      measured,
    )
    return state._replace(sums=sums, num_steps=state.num_steps + is_usable)

  def share_out(
    self,
    state: AllocatorState,
    rungs: tuple[jax.Array, jax.Array],
    variance: jax.Array,
  ) -> AllocatorState:
    """Shares the bytes of a rung out anew, when a window has ended.

    As for the rung, one replica decides for all.

    Args:
      state: The state after the step before, the last one of a window.
      rungs: int32 [] each, those of the step before and of the step to come.
      variance: float32 [K], mean square of the entries in the last window.

    Returns:
      The state to use in the step to come.
    """
    before, tables = self._tables.at(rungs[0]), self._tables.at(rungs[1])
    mean = jax.tree.map(
      lambda total: total / jnp.maximum(state.num_steps, 1.0), state.sums
    )
    gains, energy = self._gains(state, mean, variance)
    weights = allocation.scale_weights(variance, self.scale_exponent)
    floors, limits = _near(state.ranks, before, tables, self.plan.sides)
    chosen = allocation.allocate(
      weights[:, None] * gains,
      self.plan.sides,
      tables.budgets,
      floors,
      limits,
    )
    # Without a measurement, as after dense steps, or without any gradient.
    is_measured = jnp.any(gains > 0)
    ranks = jnp.where(is_measured, chosen, tables.uniform)
    live = jnp.arange(self._width) < ranks[:, None]
    left = energy - jnp.where(live, gains, 0.0).sum(1)
    left = jnp.where(is_measured & (ranks > 0), left, 0.0)
    left = jnp.clip(left, 0.0, energy)
    compressed = jnp.where(ranks > 0, energy, 0.0)
    return AllocatorState(
      ranks,
      jnp.sum(left) / jnp.maximum(jnp.sum(compressed), _TINY),
      left / jnp.maximum(energy, _TINY),
      jax.tree.map(jnp.zeros_like, state.sums),
      jnp.zeros_like(state.num_steps),
    )

  def _gains(
    self, state: AllocatorState, mean: Measured, variance: jax.Array
  ) -> tuple[jax.Array, jax.Array]:
    """What each column removes [K, width], and all there is [K]."""
    ranks = jnp.maximum(state.ranks, 1)
    if self.curves == "energy":
      gains = allocation.energy_gains(mean.columns, mean.energy, ranks)
      return gains, mean.energy
    sides, width = self.plan.sides, self._width
    if self.curves == "entropy":
      gains = allocation.model_gains(variance, sides, width)
      return gains, variance * self.plan.sizes
    gains = allocation.calibrated_gains(
      mean.energy / self.plan.sizes,
      sides,
      width,
      allocation.lost_share(mean.lost, mean.energy),
      ranks,
    )
    return gains, mean.energy

  @property
  def _width(self) -> int:
    """Columns of the matrix that may have most."""
    return int(self._tables.limits.max(initial=0))

  @functools.cached_property
  def _tables(self) -> "_Allowed":
    return _allowed(self.plan)


class _Allowed(NamedTuple):
  """What each rung allows; integers with a first axis of rungs, or of one."""

  uniform: np.ndarray  # [rungs, K], the ranks if all are alike
  budgets: np.ndarray  # [rungs, 2], values of P and of Q
  floors: np.ndarray  # [rungs, K]
  limits: np.ndarray  # [rungs, K]

  def at(self, rung: jax.Array) -> "_Allowed":
    """That of one rung, without the first axis."""
    return jax.tree.map(lambda table: jnp.asarray(table)[rung], self)


def _near(
  ranks: jax.Array, before: _Allowed, now: _Allowed, sides: np.ndarray
) -> tuple[jax.Array, jax.Array]:
  """Floors and limits between half and twice the ranks so far.

  What was measured tells little of ranks far off; and what a matrix is owed
  depends on the ranks it had. Without this they swing from the floor to the
  limit and back. If the rung changes, ranks are taken to have changed with it.
  A matrix that was sent dense has what all would have: nothing was measured.
  """
  was_dense = before.uniform == 0
  scaled = ranks * now.uniform // jnp.maximum(before.uniform, 1)
  floors = jnp.maximum(scaled // 2, now.floors)
  limits = jnp.minimum(jnp.maximum(2 * scaled, floors), now.limits)
  floors = jnp.where(was_dense, now.uniform, jnp.minimum(floors, limits))
  limits = jnp.where(was_dense, now.uniform, limits)
  # Ranks that cannot follow the rung, being as small as their matrix, may
  # leave no room for half of the others.
  fits = jnp.all(floors @ jnp.asarray(sides, jnp.int32) <= now.budgets)
  least = jnp.where(was_dense, now.uniform, now.floors)
  return jnp.where(fits, floors, jnp.minimum(least, limits)), limits


def _allowed(plan: Plan) -> _Allowed:
  uniform = plan.uniform_ranks
  limits = [
    [plan.limit(leaf, rank) for leaf in plan.matrices] for rank in plan.ladder
  ]
  budgets = (uniform.astype(np.int64) @ plan.sides).astype(np.int32)
  return _Allowed(
    uniform,
    budgets,
    np.minimum(uniform, _FLOOR),
    np.array(limits, np.int32).reshape(uniform.shape),
  )
