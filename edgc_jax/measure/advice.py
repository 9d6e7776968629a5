"""Which way to send gradients, given a link and the time of a step.

  seconds = step + exchange,   exchange = k latency + bytes / bandwidth + c

with k all-reduces one after the other and c seconds to compute what travels
(`link`). Where the link is fast next to the step, dense is as quick as anything
and loses nothing; compression pays below a bandwidth that is told.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from edgc_jax import validation
from edgc_jax.comm import cpu_backend
from edgc_jax.comm.codes import code_of
from edgc_jax.plan.leaves import ViewFn, trailing_matrix
from edgc_jax.plan.link_model import CompressionModel, LinkModel
from edgc_jax.plan.plan import Plan, make_plan

RANKS = (32, 16, 8)
TOLERANCE = 0.1


@dataclasses.dataclass(frozen=True)
class Method:
  """A way of averaging gradients, and what it would cost.

  Attributes:
    name: For people.
    reducer: The function of this package.
    options: Arguments for it, beside `min_ratio` and `matrix_view`.
    wire_bytes: Payload of a step's exchange, per replica.
    seconds: Predicted for a step, with the exchange.
    break_even: Payload bytes per second of an all-reduce above which dense
      float32 is predicted to be faster; inf where it never is, 0 for dense
      itself and what is never faster.
  """

  name: str
  reducer: str
  options: Mapping[str, Any]
  wire_bytes: int
  seconds: float
  break_even: float


@dataclasses.dataclass(frozen=True)
class Advice:
  """All methods, those that lose least first, and the one to take."""

  methods: tuple[Method, ...]
  choice: Method


def advise(
  params: Any,
  link: LinkModel,
  step_seconds: float,
  replicas: int,
  *,
  compression: CompressionModel,
  coding_seconds: float,
  ranks: Sequence[int] = RANKS,
  tolerance: float = TOLERANCE,
  wire_dtype: str = "float32",
  min_ratio: float = 2.0,
  matrix_view: ViewFn = trailing_matrix,
) -> Advice:
  """Chooses between dense float32, dense bfloat16 and ranks of `edgc`.

  The choice is the way that loses least of those that are at most `tolerance`
  slower than the fastest: whoever has a fast link is told to send dense.
  Nothing is taken to travel while something else is computed. Between CPU
  hosts, if this runs there, what is coded may travel in many messages, whose
  latencies are added (`cpu_hosts.more_trips`).

  Args:
    params: Parameters or their `jax.ShapeDtypeStruct`s.
    link: Time of an all-reduce over the replicas, as from `measure_link`.
    step_seconds: Of a training step in which nothing travels: of one without
      any exchange, plus `measure_coding(params, "float32")`.
    replicas: How many there are.
    compression: Time to compute an exchange of factors, as from
      `measure_compression`.
    coding_seconds: To round a dense gradient for the wire and back, as from
      `measure_coding`.
    ranks: Those to be considered, within those that `compression` was
      measured at; such that save less than `min_ratio` on every matrix are
      left out.
    tolerance: Share of the fastest step that fidelity is worth, at least 0.
    wire_dtype: Of the factors, as for `edgc`; the time to code them, which
      are small, is left out.
    min_ratio: As for `edgc`.
    matrix_view: As for `edgc`.

  Returns:
    The advice.

  Raises:
    TypeError: if an argument is not a number.
    ValueError: if an argument is out of range.

  >>> import jax
  >>> weights = jax.ShapeDtypeStruct((768, 3072), "float32")
  >>> compression = CompressionModel(base=0.01, per_rank=0.0)
  >>> costs = {"compression": compression, "coding_seconds": 0.01}
  >>> slow, fast = LinkModel(1e-3, 1e7), LinkModel(1e-5, 1e10)
  >>> advise(weights, slow, 0.1, 2, **costs).choice.name
  'edgc, rank 16'
  >>> advise(weights, fast, 0.1, 2, **costs).choice.name
  'dense'
  """
  validation.require_finite("step_seconds", step_seconds, "measure it")
  validation.require_finite("coding_seconds", coding_seconds, "measure it")
  validation.require_finite("tolerance", tolerance, "0.1 is a tenth")
  validation.require_int("replicas", replicas, 1)
  for rank in ranks:
    validation.require_int("ranks", rank, 1)

  def plan_of(rank: int, wire_dtype: str = "float32") -> Plan:
    return make_plan(
      params, (rank,), min_ratio, matrix_view, code=code_of(wire_dtype)
    )

  def method(
    name: str,
    plan: Plan,
    computing: float,
    reducer: str,
    **options: Any,
  ) -> Method:
    (rank,) = plan.ladder
    sent, trips = plan.wire_bytes(rank, replicas), plan.all_reduces(rank)
    if plan.averages_in_parts:
      trips += cpu_backend.more_trips(sent, replicas)
    exchange = link.seconds(sent, trips) + computing
    # Where both take as long: bytes saved for latencies and computing added.
    saved = dense.wire_bytes(0) - sent
    added = (trips - dense.all_reduces(0)) * link.latency + computing
    even = 0.0 if saved <= 0 else saved / added if added > 0 else float("inf")
    return Method(name, reducer, options, sent, step_seconds + exchange, even)

  dense = plan_of(0)
  methods = [
    method("dense", dense, 0.0, "allreduce", wire_dtype="float32"),
    method(
      "dense, bf16", plan_of(0, "bfloat16"), coding_seconds,
      "allreduce", wire_dtype="bfloat16",
    ),
  ]  # fmt: skip
  for rank in sorted(set(ranks), reverse=True):
    plan = plan_of(rank, wire_dtype)
    if plan.compressible:
      computing = compression.seconds(rank)
      options = {"rank_max": rank, "wire_dtype": wire_dtype}
      name = f"edgc, rank {rank}"
      methods.append(method(name, plan, computing, "edgc", **options))
  chosen = first_fast([method.seconds for method in methods], tolerance)
  return Advice(tuple(methods), methods[chosen])


def first_fast(seconds: Sequence[float], tolerance: float = TOLERANCE) -> int:
  """The first that is at most `tolerance` slower than the fastest.

  >>> first_fast([1.5, 1.05, 1.0])
  1
  """
  enough = (1 + tolerance) * min(seconds)
  return next(i for i, value in enumerate(seconds) if value <= enough)
