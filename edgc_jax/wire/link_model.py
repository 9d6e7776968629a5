"""Models the time of an exchange.

One all-reduce of B bytes takes latency + B / bandwidth. A compressed exchange
sends fewer bytes, but in two all-reduces instead of one, low rank in few bits
in three, and takes time to compute.
"""

import dataclasses
import math

import numpy as np

from edgc_jax import validation

_REMEDY = "give seconds, or measure them"


@dataclasses.dataclass(frozen=True)
class LinkModel:
  """Linear model of the time of an all-reduce over the replicas.

    seconds = latency + bytes / bandwidth

  Attributes:
    latency: Seconds per all-reduce of any size; 0 for an ideal link.
    bandwidth: Payload bytes per second of an all-reduce, as `wire_bytes` counts
      them. It includes the factor 2 (N - 1) / N by which a ring of N replicas
      moves more bytes than the payload.
    r_squared: Coefficient of determination of the fit; None if the model was
      not fitted. Ignored in comparisons.

  Raises:
    TypeError: if an attribute is not a Python number.
    ValueError: if an attribute is out of range.

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

  @classmethod
  def of_uplink(
    cls,
    megabits: float,
    round_trip: float,
    replicas: int,
    shards: int = 1,
  ) -> "LinkModel":
    """Models a ring all-reduce over uplinks that are not at hand to measure.

      latency = (N - 1) round_trip,    bandwidth = N / (2 (N - 1)) uplink

    in a ring of N replicas, which takes 2 (N - 1) steps one way. CPU hosts
    announce each message, and need twice the latency (results/network.md).

    Args:
      megabits: Of a replica's uplink per second, 10^6 bits.
      round_trip: Seconds of a round trip between two replicas.
      replicas: Number of replicas, N, at least 2.
      shards: Devices of a replica, which share its uplink.

    Returns:
      The link of one device.

    Raises:
      TypeError: if an argument is not a number.
      ValueError: if an argument is out of range.

    >>> LinkModel.of_uplink(megabits=100, round_trip=0.03, replicas=2)
    LinkModel(latency=0.03, bandwidth=12500000.0, r_squared=None)
    """
    validation.require_number("megabits", megabits)
    validation.require(
      math.isfinite(megabits) and megabits > 0,
      "megabits",
      megabits,
      "positive and finite",
      "give 10^6 bits per second, or measure the link with measure_link",
    )
    validation.require_finite("round_trip", round_trip, _REMEDY)
    validation.require_int("replicas", replicas, 2)
    validation.require_int("shards", shards, 1)
    payload = 1e6 / 8 * megabits / ring_bytes(1.0, replicas)
    return cls((replicas - 1) * round_trip, payload / shards)

  def seconds(self, num_bytes: float, num_collectives: float = 1) -> float:
    """Returns num_collectives * latency + num_bytes / bandwidth.

    Args:
      num_bytes: Payload of all all-reduces together.
      num_collectives: Number of all-reduces, one after the other.
    """
    return num_collectives * self.latency + num_bytes / self.bandwidth


@dataclasses.dataclass(frozen=True)
class CompressionModel:
  """Linear model of the time to compute a compressed exchange.

    seconds = base + per_rank rank,    0 for a dense exchange

  Attributes:
    base: Seconds at any rank.
    per_rank: Seconds per column of the factors.

  Raises:
    TypeError: if an attribute is not a Python number.
    ValueError: if an attribute is negative or not finite.

  >>> CompressionModel(base=0.5, per_rank=0.25).seconds(rank=8)
  2.5
  """

  base: float
  per_rank: float

  def __post_init__(self) -> None:
    validation.require_finite("base", self.base, _REMEDY)
    validation.require_finite("per_rank", self.per_rank, _REMEDY)

  def seconds(self, rank: int) -> float:
    """Returns base + per_rank * rank, or 0 at rank 0 (dense)."""
    return self.base + self.per_rank * rank if rank else 0.0


def fit_line(
  x: np.ndarray, y: np.ndarray, scale: np.ndarray | float = 1.0
) -> tuple[float, float]:
  """Fits y = intercept + slope x by least squares, with intercept >= 0.

  Args:
    x: float64 [n].
    y: float64 [n].
    scale: Standard deviation of y, one for all points or [n].

  Returns:
    The intercept and the slope.
  """
  ones, x, y = np.ones_like(x) / scale, x / scale, y / scale
  (intercept, slope), *_ = np.linalg.lstsq(np.stack([ones, x], axis=1), y)
  if intercept < 0:
    intercept, slope = 0.0, (x @ y) / (x @ x)
  return float(intercept), float(slope)


def ring_bytes(payload: float, replicas: int) -> float:
  """Returns the bytes per uplink of a ring all-reduce over N replicas.

    2 (N - 1) / N payload

  >>> ring_bytes(1000, 4)
  1500.0
  """
  return payload * 2 * (replicas - 1) / replicas
