"""What an exchange takes in seconds, and which ranks are worth having.

One all-reduce of B bytes takes latency + B / bandwidth. A compressed exchange
sends fewer bytes, but in two all-reduces instead of one, and has to be
computed: below some rank it is faster than dense, and above it is not.
"""

import dataclasses
import math
from typing import Any

import numpy as np

from edgc_jax import validation
from edgc_jax.comm.codes import code_of
from edgc_jax.plan.leaves import (
  PlacementFn,
  ViewFn,
  own_placement,
  trailing_matrix,
)
from edgc_jax.plan.plan import Plan, by_exchange, make_plan

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


def require_models(
  link: LinkModel | None, compression: CompressionModel | None
) -> None:
  """Raises unless both are what they are called, or None."""
  for name, value, kind in (
    ("link", link, LinkModel),
    ("compression", compression, CompressionModel),
  ):
    if not isinstance(value, kind | None):
      raise TypeError(
        f"`{name}` must be an edgc_jax.{kind.__name__}, got {value!r}; make"
        " one, or measure it."
      )


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

  k is 2, since Q needs the mean of P, and dense leaves are sent with Q; and one
  more if factors are encoded. A rank at which no leaf is sent as factors counts
  as dense.

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


def ring_bytes(payload: float, replicas: int) -> float:
  """Bytes that every uplink moves where N replicas send a payload in a ring.

    2 (N - 1) / N payload

  >>> ring_bytes(1000, 4)
  1500.0
  """
  return payload * 2 * (replicas - 1) / replicas


def wire_bytes(
  params: Any,
  rank: int,
  *,
  min_ratio: float = 2.0,
  matrix_view: ViewFn = trailing_matrix,
  placement: PlacementFn = own_placement,
  lead_rank: int | None = None,
  rank_min: int | None = None,
  wire_dtype: Any = "float32",
  replicas: int = 1,
) -> int:
  """Bytes one step's exchange sends per replica at a rank (0 is dense).

  Of `edgc`, `powersgd` and `allreduce`; what others send is in their `metrics`.

  Args:
    params: Parameters, gradients, or their `jax.ShapeDtypeStruct`s; on
      pipeline stages those of one stage.
    rank: Columns of the factors, 0 for dense.
    min_ratio: As for `edgc`.
    matrix_view: As for `edgc`.
    placement: As for `edgc`.
    lead_rank: On pipeline stages the rank of stage 0, at which all stages
      send what is not their own; None if it is the same.
    rank_min: The smallest rank of `edgc`, None if there is `rank` only: coded
      is what travels as factors at some rank, and at rank 0 alone everything.
    wire_dtype: As for `edgc`.
    replicas: What is coded is cut into so many equal parts, padded.

  Returns:
    The bytes, without those of entropy samples and of agreeing.

  Raises:
    TypeError: if a rank or `replicas` is not an integer.
    ValueError: if one of them is too small, or `wire_dtype` is none of those
      that there are.

  >>> import jax
  >>> weights = jax.ShapeDtypeStruct((768, 3072), "float32")
  >>> wire_bytes(weights, 0), wire_bytes(weights, 32)
  (9437184, 491588)
  """
  lead_rank = rank if lead_rank is None else lead_rank
  rank_min = rank if rank_min is None else rank_min
  for name, value, least in (
    ("rank", rank, 0), ("lead_rank", lead_rank, 0), ("rank_min", rank_min, 0),
    ("replicas", replicas, 1),
  ):  # fmt: skip
    validation.require_int(name, value, least)
  ladder = (rank, lead_rank, rank_min)
  plan = make_plan(
    params,
    ladder,
    min_ratio,
    matrix_view,
    placement,
    code=code_of(wire_dtype),
  )
  own, *rest = by_exchange(plan)
  return own.wire_bytes(rank, replicas) + sum(
    part.wire_bytes(lead_rank, replicas) for part in rest
  )
