"""Recommends a reducer, given a link and the time of a training step.

  seconds = step + exchange,   exchange = k latency + bytes / bandwidth + c

with k all-reduces in sequence, and c seconds to compute the exchange
(`wire.link_model`). If the link is fast compared with the step, dense takes no
longer than any other method, and loses nothing. `break_even` is the bandwidth
below which compression is faster.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from edgc_jax import validation
from edgc_jax.leaves.leaf import arrays_of, leaves_in
from edgc_jax.leaves.views import ViewFn, layer_matrix
from edgc_jax.methods.low_rank import with_factors
from edgc_jax.reducer.rounds import count_bytes
from edgc_jax.wire.codes import code_of
from edgc_jax.wire.link_model import CompressionModel, LinkModel

RANKS = (32, 16, 8)  # of `edgc`, compared by default
TOLERANCE = 0.1  # of the fastest step, accepted for a smaller error


@dataclasses.dataclass(frozen=True)
class Candidate:
  """A method of averaging gradients, with its predicted bytes and time.

  Attributes:
    name: A name to print.
    reducer: Name of the function of this package.
    options: Its arguments, in addition to `min_ratio` and `matrix_view`.
    wire_bytes: Payload of one exchange per replica.
    seconds: Predicted time of a step with the exchange.
    break_even: Bandwidth, in bytes of payload per second of an all-reduce,
      above which dense float32 is predicted to be faster; inf if dense never
      is, 0 for dense itself and for methods that are never faster.
  """

  name: str
  reducer: str
  options: Mapping[str, Any]
  wire_bytes: int
  seconds: float
  break_even: float


@dataclasses.dataclass(frozen=True)
class Advice:
  """All methods, sorted by their error, smallest first, and the best one."""

  methods: tuple[Candidate, ...]
  choice: Candidate


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
  matrix_view: ViewFn = layer_matrix,
) -> Advice:
  """Chooses between dense float32, dense bfloat16 and ranks of `edgc`.

  Of all methods that are at most `tolerance` slower than the fastest, it takes
  the one with the smallest error, so on a fast link it chooses dense. It
  assumes that communication and computation do not overlap.

  Args:
    params: Parameters or their `jax.ShapeDtypeStruct`s.
    link: Time of an all-reduce over the replicas, as from `measure_link`.
    step_seconds: Seconds of a training step that sends nothing: a step without
      any exchange, plus `measure_coding(params, "float32")`.
    replicas: Number of replicas.
    compression: Time to compute an exchange of factors, as from
      `measure_compression`.
    coding_seconds: Seconds to encode and decode a dense bfloat16 gradient, as
      from `measure_coding`.
    ranks: Ranks of `edgc` to consider, in the range that `compression` was
      measured in. Ranks that save less than `min_ratio` on every matrix are
      left out.
    tolerance: Extra time accepted for a smaller error, as a share of the
      fastest step; at least 0.
    wire_dtype: Encoding of the factors, as for `edgc`. The time to encode them
      is not counted, as factors are small.
    min_ratio: As for `edgc`.
    matrix_view: As for `edgc`.

  Returns:
    All methods, and the chosen one.

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

  tree = arrays_of(params)
  plain = leaves_in(tree, matrix_view)
  dense_bytes = 4 * sum(leaf.size for leaf in plain)

  def method(
    name: str,
    rank: int,
    wire_dtype: str,
    computing: float,
    reducer: str,
    **options: Any,
  ) -> Candidate | None:
    code = code_of(wire_dtype)
    leaves = with_factors(plain, [rank] if rank else [], min_ratio, code)
    if rank and not any(leaf.cap for leaf in leaves):
      return None
    (sent,) = count_bytes(leaves, [rank], code, replicas).tolist()
    trips = (2 if rank else 1) + (code is not None)
    exchange = link.seconds(sent, trips) + computing
    # Both take equally long if saved bytes / bandwidth = added seconds.
    saved, added = dense_bytes - sent, (trips - 1) * link.latency + computing
    even = 0.0 if saved <= 0 else saved / added if added > 0 else float("inf")
    options = {**options, "wire_dtype": wire_dtype}
    return Candidate(
      name, reducer, options, sent, step_seconds + exchange, even
    )

  found = [
    method("dense", 0, "float32", 0.0, "allreduce"),
    method("dense, bf16", 0, "bfloat16", coding_seconds, "allreduce"),
  ]
  for rank in sorted(set(ranks), reverse=True):
    computing = compression.seconds(rank)
    name = f"edgc, rank {rank}"
    found.append(
      method(name, rank, wire_dtype, computing, "edgc", rank_max=rank)
    )
  methods = [one for one in found if one is not None]
  chosen = first_fast([method.seconds for method in methods], tolerance)
  return Advice(tuple(methods), methods[chosen])


def first_fast(seconds: Sequence[float], tolerance: float = TOLERANCE) -> int:
  """Returns the first index at most `tolerance` slower than the fastest.

  >>> first_fast([1.5, 1.05, 1.0])
  1
  """
  enough = (1 + tolerance) * min(seconds)
  return next(i for i, value in enumerate(seconds) if value <= enough)
