"""The rank ladder: the ranks `edgc` may use, given or found from a link model.

A rank above the ceiling is no faster than a dense exchange, or saves too few
bytes. Every rank of the ladder has compiled collectives, so a ladder that is
found has few; a given one has every multiple.
"""

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from edgc_jax import validation
from edgc_jax.wire.link_model import CompressionModel, LinkModel

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
        "round it, or pass rank_multiple=1 for a finer ladder",
      )
    if self.is_given:
      self._lowest(self._top)  # raises if rank_min is above rank_max

  @property
  def is_given(self) -> bool:
    """Whether the ranks do not depend on a link."""
    return self.rank_max is not None or self.link is None

  @property
  def _top(self) -> int:
    default = max(1, _RANK_MAX // self.rank_multiple) * self.rank_multiple
    return self.rank_max or default

  @property
  def least(self) -> int:
    """The smallest rank of the ladder, or of the search for it on a link."""
    return self._lowest(self._top) if self.is_given else self.rank_multiple

  def ranks(
    self,
    cap: int,
    bytes_at: Callable[[list[int]], np.ndarray],
    min_ratio: float,
    num_reduces: int,
  ) -> tuple[int, ...]:
    """Finds the ranks of the ladder, in equal steps, without dense.

    Args:
      cap: The largest cap of a matrix; 0 if none is compressed. Higher ranks
        would only be other names for it, and are left out, except the least.
        Of a cap that is no multiple, the last columns are not used.
      bytes_at: Returns the bytes of an exchange at several ranks.
      min_ratio: Least ratio of dense bytes to bytes.
      num_reduces: All-reduces in sequence at a rank; dense has one less.

    Returns:
      The ranks; none if dense is no slower than any (`rank_ceiling`).

    Warns:
      RuntimeWarning: if there are none.
    """
    if self.link is None or self.is_given:
      lowest = self._lowest(self._top)
      highest = max(lowest, min(self._top, cap))
      return tuple(range(lowest, highest + 1, self.rank_multiple))
    top = rank_ceiling(
      self.link,
      self.compression,
      range(self.rank_multiple, cap + 1, self.rank_multiple),
      bytes_at,
      min_ratio,
      num_reduces,
    )
    if top == 0 and cap == 0:
      validation.warn(
        f"No leaf saves `min_ratio` ({min_ratio:g}) at rank"
        f" {self.rank_multiple} or above, so all gradients are sent dense."
        " edgc_jax.describe(tx, params) shows the matrices."
      )
    elif top == 0:
      validation.warn(
        f"On this link ({self.link}) a dense exchange in the code of"
        " `wire_dtype` is no slower than any rank that saves `min_ratio`, so"
        " all gradients are sent dense. Use allreduce or quantize, or give"
        " rank_max to compress anyway."
      )
    if top == 0:
      return ()
    return equal_steps(self._lowest(top), top, self.rank_multiple)

  def _lowest(self, top: int) -> int:
    """Returns the smallest rank: `rank_min`, or about a quarter of `top`."""
    if self.rank_min is None:
      return self.rank_multiple * max(1, top // (4 * self.rank_multiple))
    largest = "rank_max" if self.is_given else "the largest rank that is no"
    largest += "" if self.is_given else " slower than dense on this link"
    validation.require(
      self.rank_min <= top,
      "rank_min",
      self.rank_min,
      f"at most {largest} ({top})",
      "lower it, or leave it None for a quarter of the largest rank",
    )
    return self.rank_min


def rank_ceiling(
  link: LinkModel,
  compression: CompressionModel,
  candidates: range,
  bytes_at: Callable[[list[int]], np.ndarray],
  min_ratio: float,
  num_reduces: int,
) -> int:
  """Finds the largest rank that is no slower than dense and saves enough bytes.

  The largest candidate r with

    modelled seconds(r) <= modelled seconds(dense)
    bytes(dense) / bytes(r) >= min_ratio  (of the whole gradient)

  Args:
    link: Model of an all-reduce.
    compression: Model of the computation.
    candidates: The ranks to consider, rising.
    bytes_at: Returns the bytes of an exchange at several ranks; 0 is dense.
    min_ratio: Least ratio of dense bytes to bytes.
    num_reduces: All-reduces in sequence at a rank; dense has one less.

  Returns:
    The rank; 0 if no rank meets the conditions.

  References:
    EDGC, arXiv:2511.10333, takes the largest rank as given; here it follows
    from the modelled times.

  >>> link, free = LinkModel(1e-3, 1e9), CompressionModel(0.0, 0.0)
  >>> bytes_at = lambda ranks: np.array([4 * r * 3840 or 4 * 768 * 3072
  ...                                    for r in ranks])
  >>> rank_ceiling(link, free, range(4, 769, 4), bytes_at, 2.0, 2)
  304
  """
  if not len(candidates):
    return 0
  ranks = [0, *candidates]
  sizes = np.asarray(bytes_at(ranks), float)
  seconds = exchange_seconds(ranks, sizes, link, compression, num_reduces)
  fits = (seconds <= seconds[0]) & (sizes[0] / sizes >= min_ratio)
  return max((rank for rank, ok in zip(ranks, fits, strict=True) if ok),
             default=0)  # fmt: skip


def exchange_seconds(
  ranks: Sequence[int],
  sizes: np.ndarray,
  link: LinkModel,
  compression: CompressionModel,
  num_reduces: int,
) -> np.ndarray:
  """Models the seconds of one step's exchange at each rank.

    dense    (k - 1) latency + bytes / bandwidth
    rank r   k latency + bytes(r) / bandwidth + base + per_rank r

  Args:
    ranks: The ranks; 0 is dense.
    sizes: Bytes of an exchange at each.
    link: Model of an all-reduce.
    compression: Model of the computation.
    num_reduces: k, all-reduces in sequence: 2, since Q needs the mean of P;
      encoded factors add one.

  Returns:
    float64 [ranks], seconds.
  """
  return np.array([
    link.seconds(size, num_reduces - (rank == 0)) + compression.seconds(rank)
    for rank, size in zip(ranks, sizes, strict=True)
  ])  # fmt: skip


def equal_steps(
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

  >>> equal_steps(8, 32)
  (8, 12, 16, 20, 24, 28, 32)
  >>> equal_steps(8, 100, most=5)
  (20, 40, 60, 80, 100)
  """
  # floor(span / step) + 1 <= most, so step > span / most.
  span = rank_max - rank_min
  step = rank_multiple * (span // (most * rank_multiple) + 1)
  return tuple(range(rank_min + span % step, rank_max + 1, step))
