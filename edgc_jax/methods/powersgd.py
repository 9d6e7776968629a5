"""Defines `powersgd`: sends factors of a given rank."""

from collections.abc import Mapping
from typing import Any

import optax

from edgc_jax import validation
from edgc_jax.budget.allocation import (
  UNIFORM,
  ErrorAllocation,
  allocation_of,
  most_columns,
)
from edgc_jax.budget.fixed_budget import FixedBudget
from edgc_jax.leaves.leaf import Leaf
from edgc_jax.leaves.views import ViewFn
from edgc_jax.methods.low_rank import (
  allocator_for,
  with_factors,
)
from edgc_jax.reducer.reducer import Plan, make_reducer
from edgc_jax.stages.stages import Stages
from edgc_jax.wire.agreement import CHECK_EVERY
from edgc_jax.wire.codes import code_of
from edgc_jax.wire.order import AxisName


def powersgd(
  rank: int | Mapping[int, int] = 32,
  axis_name: AxisName = "data",
  *,
  allocation: str | ErrorAllocation = UNIFORM,
  window: int = 100,
  min_ratio: float = 2.0,
  wire_dtype: Any = "int4",
  matrix_view: ViewFn | None = None,
  stages: Stages | None = None,
  seed: int = 714,
  check_every: int = CHECK_EVERY,
) -> optax.GradientTransformationExtraArgs:
  """Averages gradients over replicas through factors of a given rank.

  For every matrix M [m, n] = gradient + residual:

    P = orth(mean_i M_i Q),   Q_i = M_i^T P,   Q' = mean_i Q_i,
    update = P Q'^T,          residual_i' = M_i - P Q_i^T

  Wire: r (m + n) values instead of m n, and 17 of float32, in two rounds; 8
  bytes for all, the norms of residual and gradient.
  Vectors, and matrices that save less than `min_ratio`, are sent dense with the
  second. A value has 1 / 2 + 1 / 64 bytes in int4, 1 + 2 / 128 in int8, 2 in
  bfloat16 or 4 in float32. A round in float32 is an all-reduce; a round in
  another code is an all-to-all and an all-gather.

  Args:
    rank: Columns of the factors, at most the smaller side of a matrix; or a
      schedule {first step: rank} that starts at step 0, with 0 for dense: every
      entry, in the code of `wire_dtype`.
    axis_name: As for `edgc`.
    min_ratio: Least m n / (r (m + n)) of a matrix. It caps the columns of its
      factors; if even the smallest rank saves less, the matrix is dense.
    allocation: How matrices share the bytes of the rank: "uniform", all have
      the rank; or "error", so that together they lose least, with options in an
      `ErrorAllocation`.
    window: Steps between two allocations by error.
    wire_dtype: "int4" or "int8", sent with a scale for each block of 64 or 128
      values; "bfloat16", sent as integers; or "float32". All are summed in
      float32, and residuals keep the rounding errors. With integers, vectors
      and matrices that are never compressed are encoded, too, and so is every
      entry of a dense step; with bfloat16, vectors and matrices that are never
      compressed stay float32. See `wire.codes`. At equal bytes, a larger rank
      in 4 bits lost least in docs/results.md.
    matrix_view: Maps a leaf's path and shape to (count, rows, cols), or to None
      for dense; by default `edgc_jax.layer_matrix`.
    stages: Pipeline stages; None if every device holds the whole model.
    seed: As for `edgc`.
    check_every: As for `edgc`.

  Returns:
    A gradient transformation, from local gradients to their mean.

  Raises:
    TypeError: if an argument that decides shapes is not a Python number.
    ValueError: if an argument is out of range.

  References:
    Vogels et al. 2019, Algorithms 1 and 2, arXiv:1905.13727; the departures
    are listed in `methods.low_rank`.

  >>> tx = optax.chain(powersgd(rank=4), optax.adam(1e-3))
  """
  schedule = _schedule(rank)
  ranks = sorted({rank for rank in schedule.values() if rank})
  validation.require_finite("min_ratio", min_ratio, "use 2 or more")
  validation.require_int("window", window, 1)
  code, options = code_of(wire_dtype), allocation_of(allocation)

  def plan_for(leaves: tuple[Leaf, ...]) -> Plan:
    most = most_columns if options else None
    leaves = with_factors(leaves, ranks, min_ratio, code, most)
    budget = FixedBudget(schedule)
    allocator = allocator_for(leaves, budget.ladder, options)
    if allocator:
      budget = FixedBudget(schedule, window)
    return Plan(leaves, budget, allocator)

  return make_reducer(
    axis_name,
    plan_for,
    code=code,
    min_ratio=min_ratio,
    seed=seed,
    matrix_view=matrix_view,
    stages=stages,
    check_every=check_every,
  )


def _schedule(rank: int | Mapping[int, int]) -> dict[int, int]:
  """Returns {first step: rank}.

  Raises:
    TypeError: if a step or a rank is not a Python integer.
    ValueError: if one is out of range, or the schedule has no rank at step 0.
  """
  if not isinstance(rank, Mapping):
    validation.require_int("rank", rank, 1)
    return {0: rank}
  for step, value in rank.items():
    validation.require_int("step of `rank`", step, 0)
    validation.require_int("rank", value, 0)
  validation.require(
    0 in rank and any(rank.values()),
    "rank",
    dict(rank),
    "a rank from step 0 on, and not 0 at all steps",
    "add an entry {0: rank}, or use allreduce for dense",
  )
  return dict(rank)
