"""The rank ladder: the ranks `edgc` may use, given or found from a link model.

A rank above the ceiling is no faster than a dense exchange, or saves too few
bytes. Every rank of the ladder has compiled collectives, so their number is
limited.
"""

import dataclasses
import functools
import warnings

from edgc_jax import validation
from edgc_jax.plan.link_model import (
  CompressionModel,
  LinkModel,
  exchange_seconds_at,
)
from edgc_jax.plan.plan import Plan

_RANK_MAX = 32  # if neither a rank nor a link is given


@dataclasses.dataclass(frozen=True)
class Ladder:
  """Options of the rank ladder; `edgc` documents them.

  Raises:
    TypeError: if a rank or the multiple is not a Python integer.
    ValueError: if one is out of range, or `rank_min` is above the largest rank.
  """

  rank_max: int | None
  rank_min: int | None
  rank_multiple: int
  link: LinkModel | None
  compression: CompressionModel

  def __post_init__(self) -> None:
    validation.require_int("rank_multiple", self.rank_multiple, 1)
    for name, value in (
      ("rank_max", self.rank_max),
      ("rank_min", self.rank_min),
    ):
      if value is None:
        continue
      validation.require_int(name, value, 1)
      validation.require(
        value % self.rank_multiple == 0,
        name,
        value,
        f"a multiple of rank_multiple ({self.rank_multiple})",
        "round it, or pass rule=RankRule(rank_multiple=1) for a finer ladder",
      )
    self.given  # noqa: B018 - raises if rank_min is above rank_max

  @functools.cached_property
  def given(self) -> tuple[int, ...]:
    """Dense (0) and the ranks, in equal steps; empty if a link decides them.

    Raises:
      ValueError: if `rank_min` is above the largest rank.
    """
    if self.rank_max is None and self.link is not None:
      return ()
    default = max(1, _RANK_MAX // self.rank_multiple) * self.rank_multiple
    top = self.rank_max or default
    return (0, *range(self._lowest(top), top + 1, self.rank_multiple))

  def ranks_on_link(self, plan: Plan) -> tuple[int, ...]:
    """Finds the ladder for the link: dense (0), and ranks up to the ceiling.

    Args:
      plan: The leaves to compress; its ladder is ignored.

    Returns:
      The ladder; only dense if the ceiling is 0 (`rank_ceiling`).

    Warns:
      RuntimeWarning: if the ceiling is 0.
    """
    top = rank_ceiling(
      plan, self.link, self.compression, rank_multiple=self.rank_multiple
    )
    if top == 0:
      warnings.warn(
        f"On this link ({self.link}) a dense all-reduce is no slower than any"
        " rank that saves `min_ratio`, so all gradients are sent dense. Use"
        " allreduce, or give rank_max to compress anyway.",
        RuntimeWarning,
        stacklevel=2,
      )
      return (0,)
    return (0, *spread_ranks(self._lowest(top), top, self.rank_multiple))

  def _lowest(self, top: int) -> int:
    """Returns the smallest rank: `rank_min`, or about a quarter of `top`."""
    if self.rank_min is None:
      return self.rank_multiple * max(1, top // (4 * self.rank_multiple))
    validation.require(
      self.rank_min <= top,
      "rank_min",
      self.rank_min,
      f"at most rank_max ({top})",
      "lower it, or leave it None for a quarter of rank_max",
    )
    return self.rank_min


def rank_ceiling(
  plan: Plan,
  link: LinkModel,
  compression: CompressionModel,
  *,
  rank_multiple: int = 4,
) -> int:
  """Finds the largest rank that is no slower than dense and saves enough bytes.

  The largest multiple r of `rank_multiple` at which

    modelled seconds(r) <= modelled seconds(dense)
    wire_bytes(dense) / wire_bytes(r) >= min_ratio  (of the whole gradient)

  and some leaf is still sent as factors. Tries all multiples: leaves become
  dense one by one, so that a condition that fails at one rank may hold at a
  higher one.

  Args:
    plan: The leaves, and the least ratio; its ladder is ignored.
    link: Model of an all-reduce.
    compression: Model of the computation.
    rank_multiple: Ranks are multiples of this.

  Returns:
    The rank; 0 if no rank meets the conditions.

  Raises:
    TypeError: if `rank_multiple` is not a Python integer.
    ValueError: if `rank_multiple` is below 1.

  References:
    EDGC, arXiv:2511.10333, takes the largest rank as given; here it follows
    from the modelled times.

  >>> import numpy as np
  >>> from edgc_jax.plan.plan import make_plan
  >>> plan = make_plan(np.zeros((768, 3072), "float32"), (0,))
  >>> link, free = LinkModel(1e-3, 1e9), CompressionModel(0.0, 0.0)
  >>> rank_ceiling(plan, link, free)
  304
  >>> rank_ceiling(plan, LinkModel(1e-2, 1e9), free)
  0
  """
  validation.require_int("rank_multiple", rank_multiple, 1)
  views = [leaf.view for leaf in plan.leaves if leaf.view is not None]
  largest = max((min(view.rows, view.cols) for view in views), default=0)
  dense = exchange_seconds_at(plan, 0, link, compression)
  candidates = (
    rank
    for rank in range(rank_multiple, largest + 1, rank_multiple)
    if plan.sends_factors(rank)
    and exchange_seconds_at(plan, rank, link, compression) <= dense
    and plan.wire_bytes(0) / plan.wire_bytes(rank) >= plan.min_ratio
  )
  return max(candidates, default=0)


def spread_ranks(
  rank_min: int, rank_max: int, rank_multiple: int = 4, most: int = 16
) -> tuple[int, ...]:
  """Spreads ranks in equal steps from about `rank_min` to `rank_max`.

  Every rank has compiled collectives, so a wide range needs wider steps. The
  step is the least multiple of `rank_multiple` that gives at most `most` ranks.
  The ranks are counted down from `rank_max`: the first is less than one step
  above `rank_min`, and equal to it if the step divides the range.

  Args:
    rank_min: Lower bound of the ranks.
    rank_max: The last rank.
    rank_multiple: The step is a multiple of this.
    most: Largest number of ranks.

  Returns:
    The ranks, rising.

  Raises:
    TypeError: if an argument is not a Python integer.
    ValueError: if an argument is below 1, or rank_min above rank_max.

  >>> spread_ranks(8, 32)
  (8, 12, 16, 20, 24, 28, 32)
  >>> spread_ranks(8, 100, most=5)
  (20, 40, 60, 80, 100)
  """
  for name, value in (
    ("rank_min", rank_min),
    ("rank_max", rank_max),
    ("rank_multiple", rank_multiple),
    ("most", most),
  ):
    validation.require_int(name, value, 1)
  validation.require(
    rank_min <= rank_max,
    "rank_min",
    rank_min,
    f"at most rank_max ({rank_max})",
    "lower it",
  )
  # floor(span / step) + 1 <= most, so step > span / most.
  span = rank_max - rank_min
  step = rank_multiple * (span // (most * rank_multiple) + 1)
  return tuple(range(rank_min + span % step, rank_max + 1, step))


def require_ratio(min_ratio: float) -> None:
  """Raises unless `min_ratio` is a Python number, at least 0."""
  validation.require_number("min_ratio", min_ratio)
  validation.require(
    min_ratio >= 0, "min_ratio", min_ratio, "at least 0", "use 2 or more"
  )
