"""Defines `powersgd` and `allreduce`, reducers with a given rank.

A reducer takes *local* gradients and returns their mean over the replicas, so
it comes first in an optax chain: clipping and Adam then see the mean. Call
`update` where the axis is bound, inside `jax.pmap` or `jax.shard_map`.
"""

import functools
from collections.abc import Mapping
from typing import Any

import optax

from edgc_jax import validation
from edgc_jax.adaptation.policy import FixedPolicy
from edgc_jax.comm.agreement import CHECK_EVERY
from edgc_jax.comm.codes import code_of
from edgc_jax.comm.dataflow import AxisName, FastAxis
from edgc_jax.pipeline.stages import Stages
from edgc_jax.plan.ladder import require_ratio
from edgc_jax.plan.leaves import ViewFn
from edgc_jax.plan.plan import Plan, make_plan
from edgc_jax.reducers.base import make_reducer


def allreduce(
  axis_name: AxisName = "data",
  *,
  wire_dtype: Any = "float32",
  matrix_view: ViewFn | None = None,
  stages: Stages | None = None,
  fast_axis: AxisName | FastAxis | None = None,
  check_every: int = CHECK_EVERY,
) -> optax.GradientTransformationExtraArgs:
  """Averages gradients over replicas without compression: the baseline.

  Wire: 4 bytes a value, in one all-reduce of float32. With
  `wire_dtype="bfloat16"`, the baseline to beat, matrices take 2 bytes a value,
  in an all-to-all and an all-gather.

  Args:
    axis_name: As for `edgc`.
    wire_dtype: "float32"; "bfloat16", sent as 16-bit integers, summed in
      float32 on every platform, and rounded in both directions without error
      feedback; or "native_bfloat16", summed by the platform's own all-reduce
      (XLA's CPU backend widens it and saves nothing). Vectors are always sent
      as float32.
    matrix_view: As for `edgc`; leaves without a view are vectors.
    stages: Pipeline stages; None if every device holds the whole model.
    fast_axis: As for `edgc`.
    check_every: As for `edgc`.

  Returns:
    A gradient transformation, from local gradients to their mean.

  Raises:
    ValueError: if an argument is out of range.

  >>> tx = optax.chain(allreduce(), optax.sgd(0.1))
  """
  code = code_of(wire_dtype, has_feedback=False)
  return make_reducer(
    axis_name,
    functools.partial(make_plan, ladder=(0,), code=code),
    lambda plan, shards: FixedPolicy({0: 0}),
    matrix_view=matrix_view,
    stages=stages,
    fast_axis=fast_axis,
    check_every=check_every,
  )


def powersgd(
  rank: int | Mapping[int, int],
  axis_name: AxisName = "data",
  *,
  warmup_steps: int = 0,
  min_ratio: float = 2.0,
  wire_dtype: Any = "float32",
  matrix_view: ViewFn | None = None,
  stages: Stages | None = None,
  fast_axis: AxisName | FastAxis | None = None,
  seed: int = 714,
  check_every: int = CHECK_EVERY,
) -> optax.GradientTransformationExtraArgs:
  """Averages gradients over replicas through factors of a given rank.

  For every matrix M [m, n] = gradient + residual:

    P = orth(mean_i M_i Q),   Q_i = M_i^T P,   Q' = mean_i Q_i,
    update = P Q'^T,          residual_i' = M_i - P Q_i^T

  Wire: r (m + n) + 17 values instead of m n, in two all-reduces. Vectors, and
  matrices that save less than `min_ratio`, are sent dense with the second. A
  value has 4 bytes, 2 in bfloat16, 1 + 2 / 128 in int8 or 1 / 2 + 1 / 64 in
  int4.

  Args:
    rank: Columns of the factors, at most the smaller side of a matrix; or a
      schedule {first step: rank} that starts at step 0, with 0 for dense.
    axis_name: As for `edgc`.
    warmup_steps: Number of first steps that send dense gradients.
    min_ratio: Least m n / (r (m + n)) at which a matrix is compressed.
    wire_dtype: "float32"; "bfloat16", sent as integers and summed in float32,
      with residuals that keep the rounding errors; "int8" and "int4", sent with
      a scale for each block of 128 or 64 values; or "native_bfloat16", summed
      by the platform's own all-reduce (XLA's CPU backend widens it and saves
      nothing), which loses the rounding errors of the sum. Vectors, and
      matrices that are never compressed, are encoded as integers, with
      residuals, but with bfloat16 sent as float32. See `comm.codes`.
    matrix_view: Maps a leaf's path and shape to (count, rows, cols), or to None
      for dense; by default `edgc_jax.layer_matrix`.
    stages: Pipeline stages; None if every device holds the whole model.
    fast_axis: As for `edgc`.
    seed: Seed of the first factors.
    check_every: As for `edgc`.

  Returns:
    A gradient transformation, from local gradients to their mean.

  Raises:
    TypeError: if an argument that decides shapes is not a Python number.
    ValueError: if an argument is out of range.

  References:
    Vogels et al. 2019, Algorithms 1 and 2, arXiv:1905.13727; the departures
    are listed in `compression.low_rank`.

  >>> tx = optax.chain(powersgd(rank=4), optax.adam(1e-3))
  """
  schedule = _schedule(rank, warmup_steps)
  require_ratio(min_ratio)
  code = code_of(wire_dtype)
  ranks = sorted(set(schedule.values()))
  ladder = tuple(ranks) if len(ranks) == 1 else (0, *filter(None, ranks))
  # Dense is the first rung also of a schedule without it.
  first_rung = int(len(ranks) > 1 and 0 not in ranks)

  def policy_for(plan: Plan, shards: tuple[str, ...]) -> FixedPolicy:
    del shards
    # A rank that is not in the ladder compresses nothing: it is dense.
    rungs = {rank: rung for rung, rank in enumerate(plan.ladder)}
    return FixedPolicy({step: rungs.get(r, 0) for step, r in schedule.items()})

  return make_reducer(
    axis_name,
    functools.partial(
      make_plan,
      ladder=ladder,
      min_ratio=min_ratio,
      code=code,
      first_rung=first_rung,
    ),
    policy_for,
    seed=seed,
    matrix_view=matrix_view,
    stages=stages,
    fast_axis=fast_axis,
    check_every=check_every,
  )


def _schedule(
  rank: int | Mapping[int, int], warmup_steps: int
) -> dict[int, int]:
  """Returns {first step: rank}, with 0 for the steps of a dense warm-up.

  Raises:
    TypeError: if a step or a rank is not a Python integer.
    ValueError: if one is out of range, or the schedule has no rank at step 0.
  """
  if not isinstance(rank, Mapping):
    validation.require_int("rank", rank, 1)
    rank = {0: rank}
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
  validation.require_int("warmup_steps", warmup_steps, 0)
  if not warmup_steps:
    return dict(rank)
  then = rank[max(step for step in rank if step <= warmup_steps)]
  later = {step: r for step, r in rank.items() if step > warmup_steps}
  return {0: 0, warmup_steps: then, **later}
