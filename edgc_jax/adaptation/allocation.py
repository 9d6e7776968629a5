"""Allocates the bytes of a rung among the matrices of a stage.

Each column of the factors of matrix i sends m_i + n_i values; its gain is the
squared error that it removes. If gains fall from column to column, taking
columns by gain per value until the budget is spent leaves the least total
error, up to one column: reverse water-filling. `scale_weights` sets how the
errors of matrices of different scale compare. The gains are (`error_model`)

  energy      measured: squared column norms of Q, and the energy not sent
  entropy     modelled: differences of sigma_i^2 m_i n_i T(r / m_i)
  calibrated  the same, with T stretched to the measured error of each matrix

`Allocator` measures over a window, and sets the ranks when the window ends.
Arrays are over the K matrices of a plan.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from edgc_jax import validation
from edgc_jax.adaptation import error_model
from edgc_jax.comm import dataflow
from edgc_jax.plan.leaves import Measurement
from edgc_jax.plan.plan import Plan

CURVES = ("energy", "entropy", "calibrated")
GRANULARITIES = ("matrix", "stage")
_SPREAD = 3  # largest ratio of a matrix's rank to the rank of the rung
# P and Q have separate buffers; the price of a column depends on how scarce
# space in either is, which is found by trying these weights of P.
_PRICES = np.linspace(0.0, 1.0, 9, dtype=np.float32)
# Least columns of a matrix, so that its gradient is always measured.
_FLOOR = 2
_TINY = float(np.finfo(np.float32).tiny)


@dataclasses.dataclass(frozen=True)
class Allocation:
  """Options of how the matrices of a stage share the bytes of its rank.

  Attributes:
    granularity: "matrix": the rank of the rule sets the bytes of a stage, and
      its matrices share them so that together they lose least. A matrix has at
      least 2 columns, at most three times the rank but no more than the larger
      of 64 and twice the rank, and between half and twice its rank of the
      window before. "stage": all matrices have the rank of the rule. Leaves
      split over stages always have one rank.
    curves: Prediction of the error that a column removes: "calibrated", the
      model of `error_model` stretched to the measured error of each matrix;
      "energy", the measured energy of each column; "entropy", the model as it
      is.
    scale_exponent: The squared error of a matrix is divided by this power of
      the root mean square of its entries. 0 minimises the sum of absolute
      errors, 2 the sum of relative errors.

  Raises:
    TypeError: if `scale_exponent` is not a Python number.
    ValueError: if an attribute is out of range.
  """

  granularity: str = "matrix"
  curves: str = "calibrated"
  scale_exponent: float = 1.0

  def __post_init__(self) -> None:
    validation.require_one_of("granularity", self.granularity, GRANULARITIES)
    validation.require_one_of("curves", self.curves, CURVES)
    validation.require_number("scale_exponent", self.scale_exponent)
    validation.require(
      0 <= self.scale_exponent <= 2,
      "scale_exponent",
      self.scale_exponent,
      "between 0 (absolute errors) and 2 (relative ones)",
      "use 1",
    )

  @property
  def spread(self) -> int:
    """Largest ratio of a matrix's rank to the rank of the rung."""
    return _SPREAD if self.granularity == "matrix" else 1


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
  sides = jnp.asarray(sides, jnp.int32)
  left = budgets - floors @ sides
  share = sides.astype(jnp.float32) / jnp.maximum(budgets, 1)

  # One row per price.
  price = jnp.asarray(_PRICES)[:, None]
  cost = price * share[:, 0] + (1.0 - price) * share[:, 1]
  score = jnp.where(is_open, gains / cost[:, :, None], -1.0)
  # Ordered by column first: of equal gains, every matrix gets one column
  # before any matrix gets two.
  score = jnp.swapaxes(score, 1, 2).reshape(len(_PRICES), -1)
  column, matrix = jnp.divmod(jnp.argsort(-score, axis=1, stable=True), num)
  taken = _take(sides[matrix], is_open[matrix, column], left)
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


class AllocatorState(NamedTuple):
  """Ranks and window sums, equal over the data axis; each stage has its own."""

  ranks: jax.Array  # int32 [K], columns in use; 0 if sent dense
  predicted_error: jax.Array  # float32 [], predicted share of energy lost
  predicted_errors: jax.Array  # float32 [K], the same for each matrix
  sums: Measurement  # over the compressed steps of this window
  num_steps: jax.Array  # float32 [], number of steps in `sums`


@dataclasses.dataclass(frozen=True)
class Allocator:
  """Shares the bytes of a rung among the matrices of a plan.

  Attributes:
    plan: The leaves that are exchanged together, and the ladder.
    options: How the matrices share the bytes.
  """

  plan: Plan
  options: Allocation

  def init(self, rung: int) -> AllocatorState:
    """Returns the state before the first step: all ranks are the rung's."""
    # A new array for every field: an array used twice cannot be donated.
    num, width = len(self.plan.matrices), self._width
    per_matrix = functools.partial(jnp.zeros, num, jnp.float32)
    columns = jnp.zeros((num, width), jnp.float32)
    sums = Measurement(per_matrix(), columns)
    return AllocatorState(
      jnp.array(self._tables.uniform[rung]),
      jnp.zeros((), jnp.float32),
      per_matrix(),
      sums,
      jnp.zeros((), jnp.float32),
    )

  def observe(
    self, state: AllocatorState, measured: Measurement, is_usable: jax.Array
  ) -> AllocatorState:
    """Adds the measurement of a step to the window.

    Ignores dense steps, steps that are not usable, and steps whose gradients
    are finite but their squares are not.

    Args:
      state: The state before the step.
      measured: Energies of the step, [K].
      is_usable: bool [], whether all gradients were finite.

    Returns:
      The state after the step.
    """
    is_usable &= jnp.any(state.ranks > 0) & dataflow.all_finite(measured)
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
    """Chooses the ranks of the next window.

    Replicas that round differently may choose different ranks, so one of them
    decides for all (`policy`).

    Args:
      state: The state after the last step of a window.
      rungs: int32 [] each, the rungs of this window and of the next.
      variance: float32 [K], mean square of the entries in this window.

    Returns:
      The state at the first step of the next window.
    """
    before, tables = self._tables.at(rungs[0]), self._tables.at(rungs[1])
    mean = jax.tree.map(
      lambda total: total / jnp.maximum(state.num_steps, 1.0), state.sums
    )
    gains, energy = self._gains(state, mean, variance)
    weights = scale_weights(variance, self.options.scale_exponent)
    floors, limits = _bounds(state.ranks, before, tables, self.plan.sides)
    chosen = allocate(
      weights[:, None] * gains,
      self.plan.sides,
      tables.budgets,
      floors,
      limits,
    )
    # Nothing is measured in dense steps or without any gradient: equal ranks.
    is_measured = jnp.any(gains > 0)
    ranks = jnp.where(is_measured, chosen, tables.uniform)
    # Predicted loss: the energy less the gains of all columns sent.
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
    self, state: AllocatorState, mean: Measurement, variance: jax.Array
  ) -> tuple[jax.Array, jax.Array]:
    """Returns the gain of each column [K, width] and the energies [K]."""
    ranks = jnp.maximum(state.ranks, 1)
    if self.options.curves == "energy":
      gains = error_model.energy_gains(mean.columns, mean.energy, ranks)
      return gains, mean.energy
    sides, width = self.plan.sides, self._width
    if self.options.curves == "entropy":
      gains = error_model.model_gains(variance, sides, width)
      return gains, variance * self.plan.sizes
    gains = error_model.calibrated_gains(
      mean.energy / self.plan.sizes,
      sides,
      width,
      mean.lost_share,
      ranks,
    )
    return gains, mean.energy

  @property
  def _width(self) -> int:
    """Largest number of columns of any matrix at any rung."""
    return int(self._tables.limits.max(initial=0))

  @functools.cached_property
  def _tables(self) -> "_RungTables":
    return _rung_tables(self.plan)


class _RungTables(NamedTuple):
  """Bounds of the ranks at every rung, or at one rung; integers."""

  uniform: np.ndarray  # [rungs, K], ranks if all matrices have the rung's
  budgets: np.ndarray  # [rungs, 2], values of P and of Q
  floors: np.ndarray  # [rungs, K], least ranks
  limits: np.ndarray  # [rungs, K], largest ranks

  def at(self, rung: jax.Array) -> "_RungTables":
    """Returns the bounds at one rung, without the first axis."""
    return jax.tree.map(lambda table: jnp.asarray(table)[rung], self)


def _bounds(
  ranks: jax.Array, before: _RungTables, now: _RungTables, sides: np.ndarray
) -> tuple[jax.Array, jax.Array]:
  """Limits new ranks to between half and twice the present ranks.

  A measurement says little about ranks far from the one at which it was taken,
  and the residual that it includes depends on the past ranks. Without these
  bounds, ranks swing from the floor to the limit and back. If the rung changes,
  the present ranks are scaled with it. A matrix that was sent dense gets the
  rung's rank, since nothing was measured.

  Args:
    ranks: int32 [K], the present ranks.
    before: The tables of the present rung.
    now: The tables of the next rung.
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
  # Ranks that do not scale with the rung, since their matrix is too small, may
  # leave too little of the budget for half the ranks of the others.
  fits = jnp.all(floors @ jnp.asarray(sides, jnp.int32) <= now.budgets)
  least = jnp.where(was_dense, now.uniform, now.floors)
  return jnp.where(fits, floors, jnp.minimum(least, limits)), limits


def _rung_tables(plan: Plan) -> _RungTables:
  """Tabulates the bounds of every rung; equal ranks set the budgets."""
  uniform = plan.uniform_ranks
  budgets = (uniform.astype(np.int64) @ plan.sides).astype(np.int32)
  return _RungTables(
    uniform,
    budgets,
    np.minimum(uniform, _FLOOR),
    plan.most_ranks,
  )
