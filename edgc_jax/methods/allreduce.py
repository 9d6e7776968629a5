"""Defines `allreduce`: sends whole gradients, the baseline."""

from typing import Any

import optax

from edgc_jax.budget.fixed_budget import FixedBudget
from edgc_jax.leaves.leaf import Leaf
from edgc_jax.leaves.views import ViewFn
from edgc_jax.methods.low_rank import with_factors
from edgc_jax.reducer.reducer import Plan, make_reducer
from edgc_jax.stages.stages import Stages
from edgc_jax.wire.agreement import CHECK_EVERY
from edgc_jax.wire.codes import code_of
from edgc_jax.wire.order import AxisName


def allreduce(
  axis_name: AxisName = "data",
  *,
  wire_dtype: Any = "float32",
  matrix_view: ViewFn | None = None,
  stages: Stages | None = None,
  check_every: int = CHECK_EVERY,
) -> optax.GradientTransformationExtraArgs:
  """Averages gradients over replicas without compression: the baseline.

  Wire: 4 bytes a value, in one all-reduce of float32. With
  `wire_dtype="bfloat16"`, the baseline to beat, matrices take 2 bytes a value,
  in an all-to-all and an all-gather.

  Args:
    axis_name: As for `edgc`.
    wire_dtype: "float32"; or "bfloat16", sent as 16-bit integers, summed in
      float32 on every platform, and rounded in both directions without error
      feedback. Vectors are always sent as float32.
    matrix_view: As for `edgc`; leaves without a view are vectors.
    stages: Pipeline stages; None if every device holds the whole model.
    check_every: As for `edgc`.

  Returns:
    A gradient transformation, from local gradients to their mean.

  Raises:
    ValueError: if an argument is out of range.

  >>> tx = optax.chain(allreduce(), optax.sgd(0.1))
  """
  code = code_of(wire_dtype, has_feedback=False)

  def plan_for(leaves: tuple[Leaf, ...]) -> Plan:
    return Plan(with_factors(leaves, (), 0.0, code), FixedBudget())

  return make_reducer(
    axis_name,
    plan_for,
    code=code,
    matrix_view=matrix_view,
    stages=stages,
    check_every=check_every,
  )
