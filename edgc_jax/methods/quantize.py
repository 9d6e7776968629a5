"""Defines `quantize`: sends every entry in fewer bits."""

import jax
import optax

from edgc_jax import validation
from edgc_jax.leaves.views import ViewFn
from edgc_jax.methods.entrywise import Average, Round, entrywise
from edgc_jax.reducer.of_method import MIN_SIZE, reducer
from edgc_jax.stages.stages import Stages
from edgc_jax.wire.agreement import CHECK_EVERY
from edgc_jax.wire.codes import Blockwise, Code, Levels
from edgc_jax.wire.order import AxisName
from edgc_jax.wire.wire import Send

_BITS = (8, 4, 2, 1)
_LARGEST_ROTATION = 4096  # entries of a block; a rotation is a square matrix


def quantize(
  bits: int = 8,
  axis_name: AxisName = "data",
  *,
  block: int = 256,
  error_feedback: bool = False,
  rotate: bool | None = None,
  residual_decay: float = 1.0,
  min_size: int = MIN_SIZE,
  seed: int = 714,
  matrix_view: ViewFn | None = None,
  stages: Stages | None = None,
  check_every: int = CHECK_EVERY,
) -> optax.GradientTransformationExtraArgs:
  """Averages gradients in 8, 4, 2 or 1 bits an entry, with a scale per block.

  An entry x of a block with largest magnitude s becomes, L = 2^(bits-1) - 1,

    q = floor(L x / s + u),   u uniform in [0, 1),   E q s / L = x

  Each replica receives one part of all gradients, sums it in float32, and
  quantises the mean again, which all gather. Both roundings are unbiased, and
  so is the update. With error feedback u = 1/2: to nearest, with less noise.

  With error feedback, 4 bits are the nearest of 15 levels c for Gaussian
  numbers; 2 and 1 bits, and 4 if asked, the nearest of 2^bits of them after a
  rotation R of every block, which makes its entries y = R x nearly Gaussian:

    x' = s c(x / s)   or   x' = R^T s c(y / s),   s of least error

  Rows (along the last axis) and, without a rotation, entries that are zero on
  all replicas stay zero. Leaves that are sent dense are sent in 4 bits, too, if
  the matrices have 4 or fewer and feedback, and their errors are fed back.

  Wire: (bits / 8 + 2 / block) bytes an entry, of levels (bits / 8 + 1 / block),
  with a rotation a bit for each row; and 72 bytes for each matrix, of which
  the error is read, and 8 for all with feedback.
  Memory: several float32 copies of the gradient during the exchange.

  Args:
    bits: 8, 4, 2 or 1.
    axis_name: As for `edgc`.
    block: Entries that share a scale; even, with a rotation a power of two from
      8 to 4096.
    error_feedback: Whether rounding errors are added to the next gradient.
      Unbiased rounding does not need it.
    rotate: Whether blocks are rotated, of 4 bits or fewer; None for 2 and 1
      bits, which have too few integers.
    residual_decay: The residual of matrices is multiplied by it before it is
      added; below 1 it forgets.
    min_size: Leaves of fewer entries are sent dense, and so are those without
      a matrix, such as vectors.
    seed: Seed of the rounding.
    matrix_view, stages, check_every: As for `edgc`.

  Returns:
    A gradient transformation, from local gradients to their mean.

  Raises:
    TypeError: if an argument that decides shapes is not a Python number.
    ValueError: if an argument is out of range.

  References:
    QSGD, Alistarh et al. 2017, arXiv:1610.02132. Departures: blocks are scaled
    by the largest magnitude instead of the norm, without entropy coding.
    Rotated levels: EDEN, Vargaftik et al. 2022, arXiv:2108.08842, with the
    departures that `wire/codes.py` names.

  >>> tx = optax.chain(quantize(bits=4), optax.adam(1e-3))
  """
  validation.require_int("bits", bits, 0)
  validation.require(
    bits in _BITS, "bits", bits, f"one of {_BITS}", "8 costs least quality"
  )
  validation.require_int("block", block, 2)
  validation.require(block % 2 == 0, "block", block, "even", "use 256")
  validation.require_flag("error_feedback", error_feedback)
  is_rotated = bits < 4 if rotate is None else rotate
  validation.require_flag("rotate", is_rotated)
  entries_code = _code_of(bits, block, is_rotated, error_feedback)
  method = entrywise(
    _in_code(entries_code),
    error_feedback=error_feedback,
    residual_decay=residual_decay,
    code=entries_code,
  )
  return reducer(
    method,
    axis_name,
    wire_dtype="int4" if error_feedback and bits <= 4 else "float32",
    min_size=min_size,
    seed=seed,
    matrix_view=matrix_view,
    stages=stages,
    check_every=check_every,
  )


def _code_of(
  bits: int, block: int, is_rotated: bool, error_feedback: bool
) -> Code:
  """Returns the code; raises if its options do not go together."""
  if not is_rotated:
    validation.require(
      bits >= 4, "rotate", False, f"True with bits={bits}", "leave it out"
    )
    if error_feedback and bits == 4:
      return Levels(block)
    return Blockwise(bits, block, is_random=not error_feedback)
  validation.require(
    bits <= 4, "rotate", True, f"False with bits={bits}", "leave it out"
  )
  validation.require(
    error_feedback,
    "error_feedback",
    error_feedback,
    f"True with bits={bits} and a rotation, which rounds with a bias",
    "pass error_feedback=True, or use 8 or 4 bits without a rotation",
  )
  validation.require(
    8 <= block <= _LARGEST_ROTATION and block & (block - 1) == 0,
    "block",
    block,
    f"a power of two from 8 to {_LARGEST_ROTATION} with a rotation",
    "use 256",
  )
  return Levels(block, bits, is_rotated=True)


def _in_code(code: Code) -> Average:
  """Returns the function that sends every entry in a code."""

  def every_entry(m: jax.Array, key: jax.Array) -> Round:
    del key
    reply = yield Send(m, code=code)
    return reply.mean, reply.sent

  return every_entry
