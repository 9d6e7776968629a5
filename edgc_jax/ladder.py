"""Which ranks may be used: given by hand, or found from times on the link."""

import dataclasses
import warnings

from edgc_jax import validation
from edgc_jax.link import (
  CompressionModel,
  LinkModel,
  rank_ceiling,
  spread_ranks,
)
from edgc_jax.plan import Plan

_RANK_MAX = 32  # where neither a rank nor a link is given


@dataclasses.dataclass(frozen=True)
class Ladder:
  """Options that decide the ranks of `edgc`; see there for their meaning."""

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
        "round it, or set rank_multiple=1 for a finer ladder",
      )
    if not self._is_found:
      self._least(self._top())

  @property
  def _is_found(self) -> bool:
    return self.rank_max is None and self.link is not None

  def ranks(self, plan: Plan) -> tuple[int, ...]:
    """Dense (0) and the ranks, rising in equal steps.

    Args:
      plan: The leaves to compress; its own ladder does not matter.

    Returns:
      The ladder; only dense where no rank is worth having.

    Warns:
      RuntimeWarning: in that case.
    """
    if not self._is_found:
      top = self._top()
      return (0, *range(self._least(top), top + 1, self.rank_multiple))
    top = rank_ceiling(
      plan, self.link, self.compression, rank_multiple=self.rank_multiple
    )
    if top == 0:
      warnings.warn(
        f"On this link ({self.link}) a dense all-reduce is no slower than any"
        " rank that saves `min_ratio`, so all gradients travel dense. Use"
        " allreduce, or give rank_max to compress all the same.",
        RuntimeWarning,
        stacklevel=2,
      )
      return (0,)
    return (0, *spread_ranks(self._least(top), top, self.rank_multiple))

  def _top(self) -> int:
    """The largest rank, where it does not depend on a link."""
    usual = max(1, _RANK_MAX // self.rank_multiple) * self.rank_multiple
    return self.rank_max or usual

  def _least(self, top: int) -> int:
    """The smallest rank under a largest one."""
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
