"""Bytes of an exchange, for whoever wants to know them beforehand."""

from typing import Any

from edgc_jax import validation
from edgc_jax.comm.codes import code_of
from edgc_jax.matrices import (
  PlacementFn,
  ViewFn,
  own_placement,
  trailing_matrix,
)
from edgc_jax.plan import by_exchange, make_plan


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
  alternating: bool = False,
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
    alternating: As for `edgc`; the bytes are then the mean of two steps.
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
    alternating=alternating,
  )
  own, *rest = by_exchange(plan)
  return own.wire_bytes(rank, replicas) + sum(
    part.wire_bytes(lead_rank, replicas) for part in rest
  )


def ring_bytes(payload: float, replicas: int) -> float:
  """Bytes that every uplink moves where N replicas send a payload in a ring.

    2 (N - 1) / N payload

  >>> ring_bytes(1000, 4)
  1500.0
  """
  return payload * 2 * (replicas - 1) / replicas
