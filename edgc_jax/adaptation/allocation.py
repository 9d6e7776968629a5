"""Ranks of many matrices under one budget: bytes go where they remove most.

A column more of matrix i removes some of its squared error and sends
m_i + n_i values. With the gain of every column known and falling from column
to column, taking columns by gain per value until the budget is spent leaves
the least total error, up to a column: reverse water-filling. How the errors of
a loud and a quiet matrix compare is for the caller to say (`scale_weights`).

Where the gains come from:

  energy      measured: squared column norms of Q, and the energy not sent
  entropy     sigma_i^2 m_i n_i T(r / m_i), the model of `spectrum`
  calibrated  the same, with the spectrum of each matrix made as narrow as its
              measured error says

Pure functions of arrays over the K matrices of a model.
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
# How many times the rank of its rung a matrix may have.
_SPREAD = 3
# P and Q travel in buffers of their own; how scarce either is decides what a
# column costs, and is found by trying these shares.
_PRICES = np.linspace(0.0, 1.0, 9, dtype=np.float32)
# Least columns of a matrix, so that none goes blind to its own gradient.
_FLOOR = 2
_TINY = float(np.finfo(np.float32).tiny)


@dataclasses.dataclass(frozen=True)
class Allocation:
  """How the matrices of a stage share the bytes that its rank allows.

  Attributes:
    granularity: "matrix": the rank of the rule says how many bytes a stage
      sends, and its matrices share them so that together they lose least. Each
      gets 2 columns at least, at most three times the rank but no more than
      the larger of 64 and twice the rank, and between half and twice its rank
      of the window before. Or "stage": all have the rank of the rule. Leaves
      split over stages keep one rank.
    curves: What predicts how much a column removes: "calibrated", the model of
      `error_model` stretched to each matrix's measured error; "energy", each
      column's measured energy; or "entropy", the model as it stands.
    scale_exponent: How the errors of matrices compare: each is divided by this
      power of the root mean square of its entries. 0 makes the sum of absolute
      errors least, 2 the sum of relative ones.

  Raises:
    TypeError: if `scale_exponent` is not a number.
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
    """How many times the rank of its rung a matrix may have."""
    return _SPREAD if self.granularity == "matrix" else 1


def allocate(
  gains: jax.Array,
  sides: np.ndarray,
  budgets: jax.Array,
  floors: jax.Array,
  limits: jax.Array,
) -> jax.Array:
  """Chooses ranks that remove the most error within the budgets.

    max  sum_i sum_(c < r_i) gains[i, c]
    over floors_i <= r_i <= limits_i
    with sum_i r_i sides[i, j] <= budgets[j]    for P (j = 0) and Q (j = 1)

  Columns are taken in the order of gain per price, where they fit, with the
  price p sides[i, 0] / budgets[0] + (1 - p) sides[i, 1] / budgets[1]; of some
  p between 0 and 1 the one that removes most is kept. Equal matrices differ
  by one column at most, and a matrix without any gain stays at its floor.

  Args:
    gains: float32 [K, width], squared error removed by each column. What
      rises along the columns is levelled: a column is not had without those
      before it.
    sides: int [K, 2], heights of P and Q, static.
    budgets: int32 [2], values in the buffers of P and Q.
    floors: int32 [K], least ranks; they must fit into the budgets.
    limits: int32 [K], largest ranks, at most `width`; 0 leaves one out.

  Returns:
    int32 [K].
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

  def spend(price: jax.Array) -> tuple[jax.Array, jax.Array]:
    cost = price * share[:, 0] + (1.0 - price) * share[:, 1]
    score = jnp.where(is_open, gains / cost[:, None], -1.0)
    # Column by column: of equal gains every matrix gets one before any two.
    order = jnp.argsort(-score.T.reshape(-1), stable=True)

    def take(carry: tuple, entry: jax.Array) -> tuple[tuple, None]:
      left, ranks, removed = carry
      column, matrix = entry // num, entry % num
      # What does not fit never fits later, so no column is passed over.
      fits = is_open[matrix, column] & jnp.all(sides[matrix] <= left)
      left = left - jnp.where(fits, sides[matrix], 0)
      ranks = ranks.at[matrix].add(fits.astype(jnp.int32))
      removed += jnp.where(fits, gains[matrix, column], 0.0)
      return (left, ranks, removed), None

    start = (left, floors, jnp.zeros_like(largest))
    (_, ranks, removed), _ = jax.lax.scan(take, start, order)
    return ranks, removed

  ranks, removed = jax.vmap(spend)(jnp.asarray(_PRICES))
  return ranks[jnp.argmax(removed)]


def scale_weights(variance: jax.Array, exponent: float) -> jax.Array:
  """What a unit of squared error counts in each matrix.

    w_i = sigma_i^(-exponent),   in units of the largest

  0 counts absolute errors; 2 counts errors relative to the matrix's mean
  square entry, which is what is left of them after an optimiser that divides
  by it. No weight is more than 1e12^(exponent / 2).

  Args:
    variance: float32 [K], sigma_i^2; 0 where nothing was measured.
    exponent: The exponent of sigma.

  Returns:
    float32 [K], at least 1; 1 where nothing was measured.
  """
  largest = jnp.max(variance, initial=0.0)
  # A matrix without a gradient so far must not outweigh all others.
  relative = jnp.where(variance > 0, variance / largest, 1.0)
  return jnp.maximum(relative, 1e-12) ** (-0.5 * exponent)


class AllocatorState(NamedTuple):
  """Ranks and window sums; equal over the data axis, one a stage on stages."""

  ranks: jax.Array  # int32 [K], columns in use, 0 where sent dense
  predicted_error: jax.Array  # float32 [], share of energy expected to be lost
  predicted_errors: jax.Array  # float32 [K], the same of each matrix
  sums: Measurement  # over the compressed steps of this window
  num_steps: jax.Array  # float32 []


@dataclasses.dataclass(frozen=True)
class Allocator:
  """Shares the bytes of a rung among the matrices of a plan."""

  plan: Plan
  options: Allocation

  def init(self, rung: int) -> AllocatorState:
    """Before the first step every matrix has the rank of the rung."""
    # A new array for every field: one that served twice cannot be donated.
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
    """Adds what a step measured; dense and non-finite steps add nothing.

    Nor does a step of finite gradients whose squares are not.
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
    weights = scale_weights(variance, self.options.scale_exponent)
    floors, limits = _near(state.ranks, before, tables, self.plan.sides)
    chosen = allocate(
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
    self, state: AllocatorState, mean: Measurement, variance: jax.Array
  ) -> tuple[jax.Array, jax.Array]:
    """What each column removes [K, width], and all there is [K]."""
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
  budgets = (uniform.astype(np.int64) @ plan.sides).astype(np.int32)
  return _Allowed(
    uniform,
    budgets,
    np.minimum(uniform, _FLOOR),
    plan.most_ranks,
  )
