"""What an exchange takes in seconds, and which ranks are worth having.

One all-reduce of B bytes takes latency + B / bandwidth. A compressed exchange
sends fewer bytes, but in two all-reduces instead of one, and has to be
computed: below some rank it is faster than dense, and above it is not.
"""

import dataclasses
import math

import numpy as np

from edgc_jax import validation
from edgc_jax.plan.plan import Plan

_REMEDY = "give seconds, or measure them"


@dataclasses.dataclass(frozen=True)
class LinkModel:
  """Time of an all-reduce over the replicas: a constant and a slope.

  Attributes:
    latency: Seconds per all-reduce, whatever it sends; 0 is an ideal link.
    bandwidth: Bytes of payload per second of an all-reduce. The payload is
      what `wire_bytes` counts; the 2 (N - 1) / N times as many bytes that a
      ring of N replicas moves are inside this number.
    r_squared: Quality of the fit it came from, None if given by hand. Not
      part of a comparison.

  >>> LinkModel(latency=0.25, bandwidth=1000.0).seconds(2000, num_collectives=2)
  2.5
  """

  latency: float
  bandwidth: float
  r_squared: float | None = dataclasses.field(default=None, compare=False)

  def __post_init__(self) -> None:
    validation.require_finite("latency", self.latency, _REMEDY)
    validation.require_number("bandwidth", self.bandwidth)
    validation.require(
      math.isfinite(self.bandwidth) and self.bandwidth > 0,
      "bandwidth",
      self.bandwidth,
      "positive and finite",
      "give bytes of payload per second of an all-reduce, or measure them",
    )

  def seconds(self, num_bytes: float, num_collectives: float = 1) -> float:
    """Seconds that all-reduces of `num_bytes` in all take, one after another.

    Args:
      num_bytes: Payload of all of them together.
      num_collectives: How many there are.

    Returns:
      num_collectives * latency + num_bytes / bandwidth.
    """
    return num_collectives * self.latency + num_bytes / self.bandwidth


@dataclasses.dataclass(frozen=True)
class CompressionModel:
  """Time of computing an exchange of factors, beyond that of a dense one.

  Attributes:
    base: Seconds at any rank.
    per_rank: Seconds per column of the factors.

  >>> CompressionModel(base=0.5, per_rank=0.25).seconds(rank=8)
  2.5
  """

  base: float
  per_rank: float

  def __post_init__(self) -> None:
    validation.require_finite("base", self.base, _REMEDY)
    validation.require_finite("per_rank", self.per_rank, _REMEDY)

  def seconds(self, rank: int) -> float:
    """Seconds at a rank: base + per_rank * rank, and none at 0 (dense)."""
    return self.base + self.per_rank * rank if rank else 0.0


def fit_line(
  x: np.ndarray, y: np.ndarray, scale: np.ndarray | float = 1.0
) -> tuple[float, float]:
  """Intercept (at least 0) and slope; residuals in units of `scale`."""
  ones, x, y = np.ones_like(x) / scale, x / scale, y / scale
  (intercept, slope), *_ = np.linalg.lstsq(np.stack([ones, x], axis=1), y)
  if intercept < 0:
    intercept, slope = 0.0, (x @ y) / (x @ x)
  return float(intercept), float(slope)


def exchange_seconds(
  plan: Plan,
  link: LinkModel,
  compression: CompressionModel = CompressionModel(0.0, 0.0),
) -> np.ndarray:
  """Modelled seconds of one step's exchange at every rung.

    dense    latency + bytes / bandwidth
    rank r   k latency + bytes(r) / bandwidth + base + per_rank r

  k is 2, since Q needs the mean of P, and all Q go with what is dense; 1 where
  factors alternate, and one more where they travel coded. A rank at which no
  leaf is sent as factors counts as dense.

  That can fall from a rung to the next: where a leaf goes dense that sent more
  as factors (`min_ratio` below one), or where the last leaf does and nothing
  is left to compute. A running maximum over the compressed rungs levels such
  dips, so that whatever rank is in time, all lower ones are.

  Args:
    plan: Leaves, and a ladder whose ranks rise (0 for dense).
    link: Time of an all-reduce.
    compression: Time of the computation.

  Returns:
    float64 [len(plan.ladder)].
  """
  seconds = np.array(
    [exchange_seconds_at(plan, r, link, compression) for r in plan.ladder]
  )
  is_compressed = np.array(plan.ladder) > 0
  seconds[is_compressed] = np.maximum.accumulate(seconds[is_compressed])
  return seconds


def exchange_seconds_at(
  plan: Plan, rank: int, link: LinkModel, compression: CompressionModel
) -> float:
  """Modelled seconds of an exchange at any rank, in the ladder or not."""
  seconds = link.seconds(plan.wire_bytes(rank), plan.all_reduces(rank))
  if not plan.sends_factors(rank):
    return seconds
  return seconds + compression.seconds(rank)
