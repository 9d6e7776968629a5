"""Defines `quantize`: sends every entry in fewer bits."""

from typing import Any

import jax
import optax
from jax.sharding import Mesh

from edgc_jax import validation
from edgc_jax.leaves.views import ViewFn
from edgc_jax.methods.entrywise import MIN_SIZE, Round, make_entrywise
from edgc_jax.stages.stages import Stages
from edgc_jax.wire.agreement import CHECK_EVERY
from edgc_jax.wire.codes import Blockwise
from edgc_jax.wire.order import AxisName
from edgc_jax.wire.wire import Send

_BITS = (8, 4)


def quantize(
  bits: int = 8,
  axis_name: AxisName = "data",
  *,
  block: int = 256,
  error_feedback: bool = False,
  min_size: int = MIN_SIZE,
  seed: int = 714,
  matrix_view: ViewFn | None = None,
  stages: Stages | None = None,
  mesh: Mesh | None = None,
  param_specs: Any = None,
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
    min_size: Leaves of fewer entries are sent dense.
    seed: Seed of the rounding.
    matrix_view, stages, mesh, param_specs, check_every: As for `edgc`.

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
    bits in _BITS, "bits", bits, f"one of {_BITS}", "8 costs least quality"
  )
  validation.require_int("block", block, 2)
  validation.require(block % 2 == 0, "block", block, "even", "use 256")
  validation.require_flag("error_feedback", error_feedback)
  return make_entrywise(
    _every_entry,
    axis_name,
    error_feedback=error_feedback,
    min_size=min_size,
    seed=seed,
    code=Blockwise(bits, block, is_random=not error_feedback),
    matrix_view=matrix_view,
    stages=stages,
    mesh=mesh,
    param_specs=param_specs,
    check_every=check_every,
  )


def _every_entry(m: jax.Array, key: jax.Array) -> Round:
  del key
  reply = yield Send(m)
  return reply.mean, reply.sent
