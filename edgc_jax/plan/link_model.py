"""Models the time of an exchange, and counts its bytes.

One all-reduce of B bytes takes latency + B / bandwidth. A compressed exchange
sends fewer bytes, but in two all-reduces instead of one, and takes time to
compute. It is faster than a dense exchange up to some rank (`plan.ladder`).
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
  arrays_of,
  layer_matrix,
  own_placement,
)
from edgc_jax.plan.plan import Plan, by_exchange, make_plan

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


def exchange_seconds(
  plan: Plan,
  link: LinkModel,
  compression: CompressionModel = CompressionModel(0.0, 0.0),
) -> np.ndarray:
  """Models the seconds of one step's exchange at every rung.

    dense    latency + bytes / bandwidth
    rank r   k latency + bytes(r) / bandwidth + base + per_rank r

  k is 2, since Q needs the mean of P, and dense leaves are sent with Q; encoded
  factors add one. A rank at which no leaf is sent as factors counts as dense.

  The time of a higher rung can be shorter: if a leaf becomes dense whose
  factors were larger (`min_ratio` below one), or if the last leaf does and
  nothing remains to compute. A running maximum over the compressed rungs
  removes such dips, so that if a rank is fast enough, all lower ranks are.

  Args:
    plan: The leaves, and a ladder of rising ranks (0 for dense).
    link: Model of an all-reduce.
    compression: Model of the computation.

  Returns:
    float64 [rungs], seconds.
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
  """Models the seconds of an exchange at any rank, in the ladder or not."""
  seconds = link.seconds(plan.wire_bytes(rank), plan.all_reduces(rank))
  if not plan.sends_factors(rank):
    return seconds
  return seconds + compression.seconds(rank)


def ring_bytes(payload: float, replicas: int) -> float:
  """Returns the bytes per uplink of a ring all-reduce over N replicas.

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
  matrix_view: ViewFn = layer_matrix,
  placement: PlacementFn = own_placement,
  lead_rank: int | None = None,
  rank_min: int | None = None,
  wire_dtype: Any = "float32",
  replicas: int = 1,
) -> int:
  """Predicts the payload bytes that a replica sends in one step's exchange.

  Valid for `edgc`, `powersgd` and `allreduce`; the `metrics` of the other
  reducers report theirs.

  Args:
    params: Parameters, gradients, or their `jax.ShapeDtypeStruct`s; on
      pipeline stages, the tree of one stage.
    rank: Columns of the factors; 0 for dense.
    min_ratio: As for `edgc`.
    matrix_view: As for `edgc`.
    placement: As for `Stages`.
    lead_rank: On pipeline stages, the rank of stage 0, at which all stages send
      their "split" and "shared" leaves; None if it is `rank`.
    rank_min: The smallest rank of `edgc`; None if `rank` is the only one.
      Leaves sent as factors at some rank are encoded, also while they are
      dense; if 0 is the only rank, all leaves with a view are.
    wire_dtype: As for `edgc`.
    replicas: Number of replicas; encoded values are padded to as many equal
      parts.

  Returns:
    The bytes, without entropy samples, checks of the replicas, and ranks that
    are broadcast at the end of a window.

  Raises:
    TypeError: if a rank or `replicas` is not a Python integer.
    ValueError: if a rank or `replicas` is too small, or `wire_dtype` is
      unknown.

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
    arrays_of(params),
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
