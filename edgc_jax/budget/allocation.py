"""Allocation: how the matrices of a stage share the bytes of its rank.

Uniform: every matrix has the rank. By error: each column of the factors of
matrix i sends m_i + n_i values, and its gain is the squared error that it
removes. If gains fall from column to column, taking columns by gain per value
until the budget is spent leaves the least total error, up to one column:
reverse water-filling. `scale_weights` sets how the errors of matrices of
different scale compare. The gains are those of the model, stretched to the
measured error of each matrix (`error_model.calibrated_gains`).

`ErrorAllocator` measures over a window, and sets the ranks when the window
ends. Any budget may be shared so. Arrays are over the K matrices of a stage.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from edgc_jax import validation
from edgc_jax.budget import error_model
from edgc_jax.budget.base import Report
from edgc_jax.leaves.leaf import Leaf
from edgc_jax.wire import order

UNIFORM, BY_ERROR = "uniform", "error"
_SPREAD = 3  # largest ratio of a matrix's rank to the rank of the stage
# More columns take more products; whether they are worth it is not measured.
_WIDE = 64
# P and Q have separate buffers; the price of a column depends on how scarce
# space in either is, which is found by trying these weights of P.
_PRICES = np.linspace(0.0, 1.0, 9, dtype=np.float32)
# Least columns of a matrix, so that its gradient is always measured.
_FLOOR = 2
_TINY = float(np.finfo(np.float32).tiny)


@dataclasses.dataclass(frozen=True)
class ErrorAllocation:
  """Shares the bytes of a rank so that all matrices together lose least.

  A matrix has at least 2 columns (1 at rank 1), at most three times the rank
  but no more than the larger of 64 and twice the rank, and between half and
  twice its rank of the window before. Leaves split over stages always have one
  rank.

  Attributes:
    scale_exponent: The squared error of a matrix is divided by this power of
      the root mean square of its entries: of sampled gradients, or of gradient
      plus residual if the budget does not sample. 0 minimises the sum of
      absolute errors, 2 the sum of relative errors.

  Raises:
    TypeError: if `scale_exponent` is not a Python number.
    ValueError: if it is out of range.
  """

  scale_exponent: float = 1.0

  def __post_init__(self) -> None:
    validation.require_number("scale_exponent", self.scale_exponent)
    validation.require(
      0 <= self.scale_exponent <= 2,
      "scale_exponent",
      self.scale_exponent,
      "between 0 (absolute errors) and 2 (relative ones)",
      "use 1",
    )


def allocation_of(allocation: Any) -> ErrorAllocation | None:
  """Returns the options that `allocation` names; None for uniform ranks.

  Raises:
    ValueError: if it is not "uniform", "error" or an `ErrorAllocation`.
  """
  if isinstance(allocation, ErrorAllocation):
    return allocation
  validation.require_one_of("allocation", allocation, (UNIFORM, BY_ERROR))
  return ErrorAllocation() if allocation == BY_ERROR else None


def most_columns(columns: int, cap: int) -> int:
  """Returns the most columns that a matrix may get at a rank by error.

  Args:
    columns: Its columns if all matrices have the rank.
    cap: Most columns that save enough.
  """
  return min(max(columns, min(_SPREAD * columns, max(_WIDE, 2 * columns))), cap)


def allocate(
  gains: jax.Array,
  sides: np.ndarray,
  budgets: jax.Array,
  floors: jax.Array,
  limits: jax.Array,
) -> jax.Array:
  """Chooses the ranks that remove the most error within the budgets.

    max  sum_i sum_(c < r_i) gains[i, c]
    over floors_i <= r_i <= limits_i
    with sum_i r_i sides[i, j] <= budgets[j]    for P (j = 0) and Q (j = 1)

  Takes columns in the order of gain per price, if they fit, with the price

    p sides[i, 0] / budgets[0] + (1 - p) sides[i, 1] / budgets[1]

  and keeps the result of the p in `_PRICES` that removes most. The ranks of
  equal matrices differ by one column at most; a matrix without any gain stays
  at its floor.

  Args:
    gains: float32 [K, width], squared error removed by each column. Gains that
      rise along the columns are levelled, since a column needs all columns
      before it.
    sides: int [K, 2], heights of P and Q, static.
    budgets: int32 [2], values in the buffers of P and Q.
    floors: int32 [K], least ranks; they must fit into the budgets.
    limits: int32 [K], largest ranks, at most `width`; 0 leaves a matrix out.

  Returns:
    int32 [K], the ranks.
  """
  num, width = gains.shape
  largest = jnp.max(gains)
  gains = gains / jnp.where(largest > 0, largest, 1.0)
  gains = jax.lax.cummin(jnp.maximum(gains, 0.0), axis=1)
  columns = jnp.arange(width)
  is_open = (columns >= floors[:, None]) & (columns < limits[:, None])
  is_open &= gains > 0
  heights = jnp.asarray(sides, jnp.int32)
  left = budgets - floors @ heights
  share = heights.astype(jnp.float32) / jnp.maximum(budgets, 1)

  # One row per price.
  price = jnp.asarray(_PRICES)[:, None]
  cost = price * share[:, 0] + (1.0 - price) * share[:, 1]
  score = jnp.where(is_open, gains / cost[:, :, None], -1.0)
  # Ordered by column first: of equal gains, every matrix gets one column
  # before any matrix gets two.
  score = jnp.swapaxes(score, 1, 2).reshape(len(_PRICES), -1)
  column, matrix = jnp.divmod(jnp.argsort(-score, axis=1, stable=True), num)
  taken = _take(heights[matrix], is_open[matrix, column], left)
  removed = jnp.sum(jnp.where(taken, gains[matrix, column], 0.0), axis=1)
  best = jnp.argmax(removed)
  return floors.at[matrix[best]].add(taken[best].astype(jnp.int32))


def _take(sizes: jax.Array, is_open: jax.Array, left: jax.Array) -> jax.Array:
  """Takes entries in order, each if it fits into what is left; bool [..., N].

  Each round takes the longest run of entries that fits, and drops those that no
  longer fit. The first entry after the run is among them, so there are at most
  as many rounds as different sizes, and one more.

  Args:
    sizes: int32 [..., N, 2].
    is_open: bool [..., N], the entries that may be taken.
    left: int32 [2].
  """

  def one_round(state: tuple) -> tuple:
    taken, is_open, left = state
    wanted = jnp.where(is_open[..., None], sizes, 0)
    # Sums beyond the range of int32 fit nowhere.
    in_range = jnp.cumsum(wanted.astype(jnp.float32), axis=-2) < 2.0**30
    does_fit = in_range & (jnp.cumsum(wanted, axis=-2) <= left)
    fits = is_open & jnp.all(does_fit, axis=-1)
    used = jnp.where(fits[..., None], sizes, 0)
    left = left - jnp.sum(used, -2, sizes.dtype, keepdims=True)
    is_open = is_open & ~fits & jnp.all(sizes <= left, axis=-1)
    return taken | fits, is_open, left

  left = jnp.zeros_like(sizes[..., :1, :]) + left
  start = (jnp.zeros_like(is_open), is_open, left)
  return jax.lax.while_loop(lambda x: jnp.any(x[1]), one_round, start)[0]


def scale_weights(variance: jax.Array, exponent: float) -> jax.Array:
  """Returns the weight of the squared error of each matrix.

    w_i = (sigma_i / max_j sigma_j)^(-exponent)

  Exponent 0 weights absolute errors; 2 weights errors relative to the matrix's
  mean square entry, as an optimiser sees them that divides by it. Weights are
  at most 1e12^(exponent / 2).

  Args:
    variance: float32 [K], sigma_i^2; 0 for a matrix without a measurement.
    exponent: The exponent of sigma.

  Returns:
    float32 [K], at least 1; 1 for a matrix without a measurement.
  """
  largest = jnp.max(variance, initial=0.0)
  # A matrix without a gradient so far must not outweigh all others.
  relative = jnp.where(variance > 0, variance / largest, 1.0)
  return jnp.maximum(relative, 1e-12) ** (-0.5 * exponent)


class Measured(NamedTuple):
  """Energies of K matrices."""

  lost: jax.Array  # float32 [K], |mean of residuals|^2
  total: jax.Array  # float32 [K], |mean of gradients plus residuals|^2


class AllocationState(NamedTuple):
  """Ranks and window sums, equal over the data axis; each stage has its own."""

  level: jax.Array  # int32 [], index into the ladder that the ranks are for
  ranks: jax.Array  # int32 [K], columns in use
  predicted_error: jax.Array  # float32 [], predicted share of energy lost
  predicted_errors: jax.Array  # float32 [K], the same for each matrix
  sums: Measured  # over the compressed steps of this window
  num_steps: jax.Array  # float32 [], number of steps in `sums`


@dataclasses.dataclass(frozen=True)
class ErrorAllocator:
  """Shares the bytes of a rank among matrices.

  Attributes:
    matrices: The leaf of each of K matrices, ordered by leaf, then along the
      stack.
    ladder: The ranks that may be used; 0 is dense.
    options: How the matrices share the bytes.
  """

  matrices: tuple[Leaf, ...]
  ladder: tuple[int, ...]
  options: ErrorAllocation

  def init(self, level: int) -> AllocationState:
    """Returns the state before the first step: all have the ladder's rank."""
    # A new array for every field: an array used twice cannot be donated.
    per_matrix = functools.partial(jnp.zeros, len(self.matrices), jnp.float32)
    return AllocationState(
      jnp.array(level, jnp.int32),
      jnp.array(self._tables.uniform[level]),
      jnp.zeros((), jnp.float32),
      per_matrix(),
      Measured(per_matrix(), per_matrix()),
      jnp.zeros((), jnp.float32),
    )

  def ranks(self, state: AllocationState, level: jax.Array) -> jax.Array:
    """Returns the ranks at a level; int32 [K].

    After a change of the level they are uniform until the window ends.
    """
    uniform = jnp.asarray(self._tables.uniform)[level]
    return jnp.where(self._is_at(state, level), state.ranks, uniform)

  def _is_at(self, state: AllocationState, level: jax.Array) -> jax.Array:
    """Returns whether the state's ranks are for this level.

    They are not if a checkpoint is from a run with other ranks, of which the
    level is an index.
    """
    tables, sides = self._tables.at(level), jnp.asarray(self._sides, jnp.int32)
    fit = jnp.all(state.ranks @ sides <= tables.budgets)
    fit &= jnp.all((state.ranks > 0) == (tables.uniform > 0))
    return (state.level == level) & fit

  def observe(
    self,
    state: AllocationState,
    level: jax.Array,
    measured: Measured,
    is_usable: jax.Array,
  ) -> AllocationState:
    """Adds the measurement of a step to the window.

    Ignores dense steps, steps that are not usable, and steps whose gradients
    are finite but their squares are not.

    Args:
      state: The state before the step.
      level: int32 [], of the step; another one than before starts the window
        anew.
      measured: Energies of the step.
      is_usable: bool [], whether all gradients were finite.
    """
    ranks, is_same = self.ranks(state, level), self._is_at(state, level)
    is_usable &= jnp.any(ranks > 0) & order.all_finite(measured)
    fresh = lambda x: jnp.where(is_same, x, jnp.zeros_like(x))  # noqa: E731
    sums = jax.tree.map(
      lambda total, x: jnp.where(is_usable, fresh(total) + x, fresh(total)),
      state.sums,
      measured,
    )
    return state._replace(
      level=level,
      ranks=ranks,
      sums=sums,
      num_steps=fresh(state.num_steps) + is_usable,
    )

  def share_out(
    self,
    state: AllocationState,
    level: jax.Array,
    variance: jax.Array | None,
  ) -> AllocationState:
    """Chooses the ranks of the next window.

    Replicas that round differently may choose different ranks, so one of them
    decides for all (`reducer.reducer`).

    Args:
      state: The state after the last step of a window.
      level: int32 [], of the next window.
      variance: float32 [K], mean square of the entries in this window; None if
        the budget does not sample.

    Returns:
      The state at the first step of the next window.
    """
    before, tables = self._tables.at(state.level), self._tables.at(level)
    lost, total = jax.tree.map(
      lambda x: x / jnp.maximum(state.num_steps, 1.0), state.sums
    )
    mean_square = total / np.prod(self._sides, 1).astype(np.float32)
    if variance is None:
      variance = mean_square
    gains = error_model.calibrated_gains(
      mean_square,
      self._sides,
      int(self._tables.limits.max(initial=0)),
      lost / jnp.where(total > 0, total, 1.0),
      jnp.maximum(state.ranks, 1),
    )
    weights = scale_weights(variance, self.options.scale_exponent)
    floors, limits = _bounds(state.ranks, before, tables, self._sides)
    budgets = jnp.asarray(tables.budgets)
    chosen = allocate(
      weights[:, None] * gains, self._sides, budgets, floors, limits
    )
    # Nothing is measured in dense steps or without any gradient: equal ranks.
    is_measured = jnp.any(gains > 0)
    ranks = jnp.where(is_measured, chosen, tables.uniform)
    # Predicted loss: the energy less the gains of all columns sent.
    is_sent = jnp.arange(gains.shape[1]) < ranks[:, None]
    left = total - jnp.where(is_sent, gains, 0.0).sum(1)
    left = jnp.where(is_measured & (ranks > 0), left, 0.0)
    left = jnp.clip(left, 0.0, total)
    compressed = jnp.where(ranks > 0, total, 0.0)
    return AllocationState(
      level,
      ranks,
      jnp.sum(left) / jnp.maximum(jnp.sum(compressed), _TINY),
      left / jnp.maximum(total, _TINY),
      jax.tree.map(jnp.zeros_like, state.sums),
      jnp.zeros_like(state.num_steps),
    )

  def report(self, state: AllocationState, report: Report) -> Report:
    """Returns a budget's diagnostics with the errors predicted here, if any.

    Before a window has been measured, they are the budget's own.
    """
    is_known = jnp.any(state.predicted_errors > 0)

    def known(own: jax.Array, other: jax.Array | None) -> jax.Array:
      return own if other is None else jnp.where(is_known, own, other)

    return report._replace(
      predicted_error=known(state.predicted_error, report.predicted_error),
      predicted_errors=known(state.predicted_errors, report.predicted_errors),
    )

  @functools.cached_property
  def _sides(self) -> np.ndarray:
    """Heights of P and Q of each matrix; int64 [K, 2]."""
    sides = [leaf.sides for leaf in self.matrices]
    return np.array(sides, np.int64).reshape(-1, 2)

  @functools.cached_property
  def _tables(self) -> "_Tables":
    def of_all(columns: Callable[[Leaf, int], int]) -> np.ndarray:
      ranks = [
        [columns(x, rank) for x in self.matrices] for rank in self.ladder
      ]
      return np.array(ranks, np.int32).reshape(len(self.ladder), -1)

    uniform = of_all(lambda leaf, rank: leaf.columns(rank))
    return _Tables(
      uniform,
      (uniform.astype(np.int64) @ self._sides).astype(np.int32),
      np.minimum(uniform, _FLOOR),
      of_all(lambda x, rank: most_columns(x.columns(rank), x.cap)),
    )


_Ints = np.ndarray | jax.Array  # static, or at a level that the graph chooses


class _Tables(NamedTuple):
  """Bounds of the ranks at every level, or at one level; integers."""

  uniform: _Ints  # [levels, K], ranks if all matrices have the ladder's
  budgets: _Ints  # [levels, 2], values of P and of Q
  floors: _Ints  # [levels, K], least ranks
  limits: _Ints  # [levels, K], largest ranks

  def at(self, level: jax.Array) -> "_Tables":
    """Returns the bounds at one level, without the first axis."""
    return jax.tree.map(lambda table: jnp.asarray(table)[level], self)


def _bounds(
  ranks: jax.Array, before: _Tables, now: _Tables, sides: np.ndarray
) -> tuple[jax.Array, jax.Array]:
  """Limits new ranks to between half and twice the present ranks.

  A measurement says little about ranks far from the one at which it was taken,
  and the residual that it includes depends on the past ranks. Without these
  bounds, ranks swing from the floor to the limit and back. If the level
  changes, the present ranks are scaled with it. A matrix that was sent dense
  gets the rank of the level, since nothing was measured.

  Args:
    ranks: int32 [K], the present ranks.
    before: The bounds at the present level.
    now: The bounds at the next level.
    sides: int [K, 2], heights of P and Q.

  Returns:
    Floors and limits, int32 [K] each.
  """
  was_dense = before.uniform == 0
  scaled = ranks * now.uniform // jnp.maximum(before.uniform, 1)
  floors = jnp.maximum(scaled // 2, now.floors)
  limits = jnp.minimum(jnp.maximum(2 * scaled, floors), now.limits)
  floors = jnp.where(was_dense, now.uniform, jnp.minimum(floors, limits))
  limits = jnp.where(was_dense, now.uniform, limits)
  # Ranks that do not scale with the level, since their matrix is too small, may
  # leave too little of the budget for half the ranks of the others.
  fits = jnp.all(floors @ jnp.asarray(sides, jnp.int32) <= now.budgets)
  least = jnp.where(was_dense, now.uniform, now.floors)
  return jnp.where(fits, floors, jnp.minimum(least, limits)), limits
