"""Defines reducers that compress entry by entry: the baselines of `edgc`.

`topk`, `randomk`, `quantize` and `signsgd` take *local* gradients and return
their mean over the replicas, as `powersgd` and `edgc` do, and come first in an
optax chain. Leaves of fewer than `min_size` entries, and leaves without
matrices (`matrix_view` returns None), are sent dense.
"""

import functools
from typing import Any

import optax

from edgc_jax import validation
from edgc_jax.adaptation.policy import FixedPolicy
from edgc_jax.comm.agreement import CHECK_EVERY
from edgc_jax.comm.codes import Blockwise, Signs
from edgc_jax.comm.dataflow import AxisName, FastAxis
from edgc_jax.compression import entrywise
from edgc_jax.compression.entrywise import (
  Compressor,
  Encoded,
  EntrywisePlan,
  RandomK,
  TopK,
)
from edgc_jax.pipeline.stages import Stages
from edgc_jax.plan.leaves import (
  ViewFn,
)
from edgc_jax.plan.plan import make_plan
from edgc_jax.reducers.base import make_reducer

_BITS = (8, 4)


def topk(
  density: float,
  axis_name: AxisName = "data",
  *,
  stages: Stages | None = None,
  fast_axis: AxisName | FastAxis | None = None,
  sample_rate: float | None = None,
  min_size: int = 1024,
  matrix_view: ViewFn | None = None,
  check_every: int = CHECK_EVERY,
) -> optax.GradientTransformationExtraArgs:
  """Averages the largest entries of every tensor, with error feedback.

    k = max(1, round(density n)),    sent_i = the k largest |M_i| of n entries,
    update = mean_i sent_i,          residual_i = M_i - sent_i

  Wire, N replicas: 4 N k bytes for each tensor, since values and int32 indices
  are gathered (half of 8 N k: an all-gather counts as half an all-reduce). It
  grows with N: at N density = 1 it equals dense.

  Args:
    density: Share of the entries that is sent, in (0, 1].
    axis_name: As for `edgc`.
    stages: Pipeline stages; None if every device holds the whole model.
    fast_axis: As for `edgc`.
    sample_rate: Share of the entries that is sampled to estimate a threshold;
      faster on large tensors than the exact k-th largest. None is exact.
    min_size: Leaves of fewer entries are sent dense.
    matrix_view: Maps a leaf's path and shape to (count, rows, cols), or to None
      for dense; by default `edgc_jax.layer_matrix`.
    check_every: As for `edgc`.

  Returns:
    A gradient transformation, from local gradients to their mean.

  Raises:
    TypeError: if an argument that decides shapes is not a Python number.
    ValueError: if an argument is out of range.

  References:
    Stich et al. 2018, arXiv:1809.07599. The sampled threshold is from Lin et
    al. 2018, arXiv:1712.01887; their momentum correction is left out, since
    momentum belongs to the optimiser here.

  >>> tx = optax.chain(topk(density=0.01), optax.adam(1e-3))
  """
  validation.require_share("density", density)
  if sample_rate is not None:
    validation.require_share("sample_rate", sample_rate)
  return _make(
    TopK(density, sample_rate),
    axis_name,
    error_feedback=True,
    stages=stages,
    fast_axis=fast_axis,
    min_size=min_size,
    matrix_view=matrix_view,
    check_every=check_every,
  )


def randomk(
  density: float,
  axis_name: AxisName = "data",
  *,
  error_feedback: bool = True,
  stages: Stages | None = None,
  fast_axis: AxisName | FastAxis | None = None,
  min_size: int = 1024,
  matrix_view: ViewFn | None = None,
  seed: int = 714,
  check_every: int = CHECK_EVERY,
) -> optax.GradientTransformationExtraArgs:
  """Averages random entries of every tensor, the same on all replicas.

  A tensor of n entries is cut into k = max(1, round(density n)) runs of equal
  length, up to one entry. At each step one entry of each run is drawn:

    with error feedback   update = mean_i M_i at these entries, 0 elsewhere
    without               update = mean_i M_i times the length of the run at
                          these entries, 0 elsewhere: unbiased

  Wire: 4 k bytes for each tensor, in one all-reduce.

  Args:
    density: Share of the entries that is sent, in (0, 1].
    axis_name: As for `edgc`.
    error_feedback: Whether entries that were not sent are added to the next
      gradient. Without it the true error may exceed 1, but `relative_error` is
      at most 1.
    stages: Pipeline stages; None if every device holds the whole model.
    fast_axis: As for `edgc`.
    min_size: Leaves of fewer entries are sent dense.
    matrix_view: As for `topk`.
    seed: Seed of the entries.
    check_every: As for `edgc`.

  Returns:
    A gradient transformation, from local gradients to their mean.

  Raises:
    TypeError: if an argument that decides shapes is not a Python number.
    ValueError: if an argument is out of range.

  References:
    Stich et al. 2018, arXiv:1809.07599. Departure: the paper draws entries
    from the whole tensor, not from runs.

  >>> tx = optax.chain(randomk(density=0.1), optax.adam(1e-3))
  """
  validation.require_share("density", density)
  validation.require_flag("error_feedback", error_feedback)
  return _make(
    RandomK(density, is_scaled=not error_feedback),
    axis_name,
    error_feedback=error_feedback,
    stages=stages,
    fast_axis=fast_axis,
    min_size=min_size,
    matrix_view=matrix_view,
    seed=seed,
    check_every=check_every,
  )


def quantize(
  bits: int = 8,
  axis_name: AxisName = "data",
  *,
  block: int = 256,
  error_feedback: bool = False,
  stages: Stages | None = None,
  fast_axis: AxisName | FastAxis | None = None,
  min_size: int = 1024,
  matrix_view: ViewFn | None = None,
  seed: int = 714,
  check_every: int = CHECK_EVERY,
) -> optax.GradientTransformationExtraArgs:
  """Averages gradients as integers of 8 or 4 bits, with a scale per block.

  An entry x of a block with largest magnitude s becomes, L = 2^(bits-1) - 1,

    q = floor(L x / s + u),   u uniform in [0, 1),   E q s / L = x

  Each replica receives one part of all gradients, sums it in float32, and
  quantises the mean again, which all gather. Both roundings are unbiased, and
  so is the update. With error feedback u = 1/2: to nearest, with less noise.

  Wire: (bits / 8 + 2 / block) bytes an entry. Memory: several float32 copies
  of the gradient during the exchange.

  Args:
    bits: 8 or 4.
    axis_name: As for `edgc`.
    block: Entries that share a scale; even.
    error_feedback: Whether rounding errors are added to the next gradient.
      Unbiased rounding does not need it.
    stages: Pipeline stages; None if every device holds the whole model.
    fast_axis: As for `edgc`.
    min_size: Leaves of fewer entries are sent dense.
    matrix_view: As for `topk`.
    seed: Seed of the rounding.
    check_every: As for `edgc`.

  Returns:
    A gradient transformation, from local gradients to their mean.

  Raises:
    TypeError: if an argument that decides shapes is not a Python number.
    ValueError: if an argument is out of range.

  References:
    QSGD, Alistarh et al. 2017, arXiv:1610.02132. Departures: blocks are scaled
    by the largest magnitude instead of the norm, without entropy coding.

  >>> tx = optax.chain(quantize(bits=4), optax.adam(1e-3))
  """
  validation.require_int("bits", bits, 0)
  validation.require(
    bits in _BITS, "bits", bits, f"one of {_BITS}", "signsgd has one bit"
  )
  validation.require_int("block", block, 2)
  validation.require(block % 2 == 0, "block", block, "even", "use 256")
  validation.require_flag("error_feedback", error_feedback)
  return _make(
    Encoded(Blockwise(bits, block, is_random=not error_feedback)),
    axis_name,
    error_feedback=error_feedback,
    stages=stages,
    fast_axis=fast_axis,
    min_size=min_size,
    matrix_view=matrix_view,
    seed=seed,
    check_every=check_every,
  )


def signsgd(
  axis_name: AxisName = "data",
  *,
  block: int = 256,
  stages: Stages | None = None,
  fast_axis: AxisName | FastAxis | None = None,
  min_size: int = 1024,
  matrix_view: ViewFn | None = None,
  check_every: int = CHECK_EVERY,
) -> optax.GradientTransformationExtraArgs:
  """Averages gradients as signs with a scale per block, with error feedback.

    sent = mean |x| over the block times sign(x)

  Values are encoded twice: on the way to the replica that sums a part, and on
  the way back to all. Residuals keep both errors.

  Wire: (1 / 8 + 4 / block) bytes an entry.

  Args:
    axis_name: As for `edgc`.
    block: Entries that share a scale; a multiple of 8.
    stages: Pipeline stages; None if every device holds the whole model.
    fast_axis: As for `edgc`.
    min_size: Leaves of fewer entries are sent dense.
    matrix_view: As for `topk`.
    check_every: As for `edgc`.

  Returns:
    A gradient transformation, from local gradients to their mean.

  Raises:
    TypeError: if an argument that decides shapes is not a Python number.
    ValueError: if an argument is out of range.

  References:
    EF-SignSGD, Karimireddy et al. 2019, arXiv:1901.09847. Departures: one scale
    per block instead of one per tensor; values are encoded twice, as in 1-bit
    Adam, arXiv:2102.02888.

  >>> tx = optax.chain(signsgd(), optax.sgd(1e-2))
  """
  validation.require_int("block", block, 8)
  validation.require(
    block % 8 == 0, "block", block, "a multiple of 8", "use 256"
  )
  return _make(
    Encoded(Signs(block)),
    axis_name,
    error_feedback=True,
    stages=stages,
    fast_axis=fast_axis,
    min_size=min_size,
    matrix_view=matrix_view,
    check_every=check_every,
  )


def _make(
  compressor: Compressor,
  axis_name: AxisName,
  *,
  error_feedback: bool,
  min_size: int,
  **options: Any,
) -> optax.GradientTransformationExtraArgs:
  """Builds a reducer from a compressor; arguments as for `topk`."""
  validation.require_int("min_size", min_size, 1)
  kind: Any = functools.partial(
    EntrywisePlan,
    compressor=compressor,
    min_size=min_size,
    error_feedback=error_feedback,
  )
  return make_reducer(
    axis_name,
    functools.partial(make_plan, ladder=(0,), min_ratio=0.0, kind=kind),
    lambda plan, shards: FixedPolicy({0: 0}),
    exchange=entrywise.exchange,
    **options,
  )
