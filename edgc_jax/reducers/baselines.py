"""Gradient transformations that compress entry by entry.

topk, randomk, quantize and signsgd take *local* gradients and return their
mean over the replicas, as `powersgd` and `edgc` do, and come first in an optax
chain. Leaves of fewer than `min_size` entries, and those that are no matrices
(`matrix_view`), travel dense.
"""

import functools
from typing import Any

import optax

from edgc_jax import validation
from edgc_jax.adaptation.policy import FixedPolicy
from edgc_jax.comm.agreement import CHECK_EVERY
from edgc_jax.comm.codes import Blockwise, Signs
from edgc_jax.compression import entrywise
from edgc_jax.compression.entrywise import (
  Coded,
  Compressor,
  EntrywisePlan,
  RandomK,
  TopK,
)
from edgc_jax.pipeline.stages import Stages
from edgc_jax.plan.leaves import (
  ViewFn,
  own_placement,
  trailing_matrix,
)
from edgc_jax.plan.plan import make_plan
from edgc_jax.reducers.base import make_reducer

_BITS = (8, 4)


def topk(
  density: float,
  axis_name: str = "data",
  *,
  stages: Stages | None = None,
  sample_rate: float | None = None,
  min_size: int = 1024,
  matrix_view: ViewFn | None = None,
  check_every: int = CHECK_EVERY,
) -> optax.GradientTransformationExtraArgs:
  """Averages the largest entries of every tensor, with error feedback.

    k = max(1, round(density n)),    sent_i = the k largest |M_i| of n entries,
    update = mean_i sent_i,          residual_i = M_i - sent_i

  Wire, N replicas: 4 N k bytes for each tensor, as values and int32 indices
  are gathered (half of 8 N k, as an all-gather is half an all-reduce). That
  grows with N: at N density = 1 it is as much as dense.

  Args:
    density: Share of the entries sent, in (0, 1].
    axis_name: Axis averaged over; must be bound where `update` runs.
    stages: Pipeline stages; None if every device holds the whole model.
    sample_rate: Share of the entries of which a threshold is found, instead
      of the exact k-th largest; quicker on large tensors. None is exact.
    min_size: Leaves of fewer entries travel dense.
    matrix_view: From a leaf's path and shape to (count, rows, cols), or None
      for dense; by default `edgc_jax.trailing_matrix`.
    check_every: As for `edgc`.

  Returns:
    A gradient transformation, from local gradients to their mean.

  Raises:
    TypeError: if an argument that decides shapes is not a Python number.
    ValueError: if an argument is out of range.

  References:
    Stich et al. 2018, arXiv:1809.07599; the sampled threshold: Lin et al.
    2018, arXiv:1712.01887, without their momentum correction, since momentum
    is the optimiser's here.

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
    min_size=min_size,
    matrix_view=matrix_view,
    check_every=check_every,
  )


def randomk(
  density: float,
  axis_name: str = "data",
  *,
  error_feedback: bool = True,
  stages: Stages | None = None,
  min_size: int = 1024,
  matrix_view: ViewFn | None = None,
  seed: int = 714,
  check_every: int = CHECK_EVERY,
) -> optax.GradientTransformationExtraArgs:
  """Averages random entries of every tensor, the same on all replicas.

  k = max(1, round(density n)) of n entries, one out of each of k runs of equal
  length (up to one entry), drawn anew in each step:

    with error feedback     update = mean_i M_i there, 0 elsewhere
    without                 update = (length of the run) times that, unbiased

  Wire: 4 k bytes for each tensor, one all-reduce.

  Args:
    density: Share of the entries sent, in (0, 1].
    axis_name: Axis averaged over; must be bound where `update` runs.
    error_feedback: Whether what was not sent is added to the next gradient.
      Without it `relative_error` tells at most 1, and may be more.
    stages: Pipeline stages; None if every device holds the whole model.
    min_size: Leaves of fewer entries travel dense.
    matrix_view: As for `topk`.
    seed: Seed of the entries.
    check_every: As for `edgc`.

  Returns:
    A gradient transformation, from local gradients to their mean.

  Raises:
    TypeError: if an argument that decides shapes is not a Python number.
    ValueError: if an argument is out of range.

  References:
    Stich et al. 2018, arXiv:1809.07599; they draw entries of the whole tensor.

  >>> tx = optax.chain(randomk(density=0.1), optax.adam(1e-3))
  """
  validation.require_share("density", density)
  validation.require_flag("error_feedback", error_feedback)
  return _make(
    RandomK(density, is_scaled=not error_feedback),
    axis_name,
    error_feedback=error_feedback,
    stages=stages,
    min_size=min_size,
    matrix_view=matrix_view,
    seed=seed,
    check_every=check_every,
  )


def quantize(
  bits: int = 8,
  axis_name: str = "data",
  *,
  block: int = 256,
  error_feedback: bool = False,
  stages: Stages | None = None,
  min_size: int = 1024,
  matrix_view: ViewFn | None = None,
  seed: int = 714,
  check_every: int = CHECK_EVERY,
) -> optax.GradientTransformationExtraArgs:
  """Averages integers of 8 or 4 bits, with a scale for every block.

  An entry x of a block with largest magnitude s becomes, L = 2^(bits-1) - 1,

    q = floor(L x / s + u),   u uniform in [0, 1),   E q s / L = x

  Parts are exchanged, summed in float32, coded again, and gathered; both
  codings are unbiased, and so is the update.

  Wire: (bits / 8 + 4 / block) bytes an entry. Memory: several float32 copies
  of the gradient while it travels.

  Args:
    bits: 8 or 4.
    axis_name: Axis averaged over; must be bound where `update` runs.
    block: Entries that share a scale; even.
    error_feedback: Whether what rounding changed goes on with the next
      gradient. Unbiased rounding needs none.
    stages: Pipeline stages; None if every device holds the whole model.
    min_size: Leaves of fewer entries travel dense.
    matrix_view: As for `topk`.
    seed: Seed of the rounding.
    check_every: As for `edgc`.

  Returns:
    A gradient transformation, from local gradients to their mean.

  Raises:
    TypeError: if an argument that decides shapes is not a Python number.
    ValueError: if an argument is out of range.

  References:
    QSGD, Alistarh et al. 2017, arXiv:1610.02132, with the largest magnitude
    for the norm, and without its entropy coding.

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
    Coded(Blockwise(bits, block)),
    axis_name,
    error_feedback=error_feedback,
    stages=stages,
    min_size=min_size,
    matrix_view=matrix_view,
    seed=seed,
    check_every=check_every,
  )


def signsgd(
  axis_name: str = "data",
  *,
  block: int = 256,
  stages: Stages | None = None,
  min_size: int = 1024,
  matrix_view: ViewFn | None = None,
  check_every: int = CHECK_EVERY,
) -> optax.GradientTransformationExtraArgs:
  """Averages signs with a scale for every block, with error feedback.

    sent = mean |x| over the block times sign(x)

  coded so twice, on the way to where a part is summed and from there to all;
  what either loses is in the residuals.

  Wire: (1 / 8 + 4 / block) bytes an entry.

  Args:
    axis_name: Axis averaged over; must be bound where `update` runs.
    block: Entries that share a scale; a multiple of 8.
    stages: Pipeline stages; None if every device holds the whole model.
    min_size: Leaves of fewer entries travel dense.
    matrix_view: As for `topk`.
    check_every: As for `edgc`.

  Returns:
    A gradient transformation, from local gradients to their mean.

  Raises:
    TypeError: if an argument that decides shapes is not a Python number.
    ValueError: if an argument is out of range.

  References:
    EF-SignSGD, Karimireddy et al. 2019, arXiv:1901.09847, which has one scale
    a tensor; the two codings are those of 1-bit Adam, arXiv:2102.02888.

  >>> tx = optax.chain(signsgd(), optax.sgd(1e-2))
  """
  validation.require_int("block", block, 8)
  validation.require(
    block % 8 == 0, "block", block, "a multiple of 8", "use 256"
  )
  return _make(
    Coded(Signs(block)),
    axis_name,
    error_feedback=True,
    stages=stages,
    min_size=min_size,
    matrix_view=matrix_view,
    check_every=check_every,
  )


def _make(
  compressor: Compressor,
  axis_name: str,
  *,
  error_feedback: bool,
  stages: Stages | None,
  min_size: int,
  matrix_view: ViewFn | None,
  check_every: int,
  seed: int = 0,
) -> optax.GradientTransformationExtraArgs:
  """A reducer of entries."""
  validation.require_int("min_size", min_size, 1)
  kind: Any = functools.partial(
    EntrywisePlan,
    compressor=compressor,
    min_size=min_size,
    error_feedback=error_feedback,
  )
  view = matrix_view or trailing_matrix
  placement = stages.placement if stages else own_placement
  return make_reducer(
    axis_name,
    lambda tree: make_plan(tree, (0,), 0.0, view, placement, kind=kind),
    lambda plan: FixedPolicy({0: 0}),
    seed,
    stages.axis_name if stages else None,
    entrywise.exchange,
    check_every,
  )
