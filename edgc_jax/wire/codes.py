"""Codes: float32 values in fewer bits on the wire.

A code encodes float32 values as integers (and scales), which every platform
sends unchanged, and decodes them. The caller keeps the error of a lossy code,
and adds it to the next values. That is stable only if a code contracts:

  |x - decode(encode(x))| <= (1 - d) |x|   for some d > 0 and every x

Codes decode arrays of NumPy in NumPy: one rounded operation on every entry
after the other, so that all machines decode the same bits to the same numbers.
"""

import dataclasses
import functools
import math
from typing import Any, ClassVar, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from edgc_jax.wire import sums

_SEED = 4  # of the signs of a rotation
_LEAST = float(np.finfo(np.float32).tiny)
_LARGEST_FACTOR = 256  # of a rotation that is one product
_CACHED = 256  # blocks that NumPy rotates at once


class Encoded(NamedTuple):
  """Encoded values [..., n], in blocks of a code's granule.

  Attributes:
    blocks: A tree of arrays [..., *], with the same number of entries for each
      block in the last axis, block after block.
    common: A tree of arrays [..., *] that all blocks need.
  """

  blocks: Any
  common: Any = ()


class Code(Protocol):
  """An encoding of values in blocks."""

  @property
  def granule(self) -> int:
    """Values in a block."""

  @property
  def needs_feedback(self) -> bool:
    """Whether its errors must be added to the next values."""

  @property
  def moves_zeros(self) -> bool:
    """Whether zeros beside other values decode to other numbers."""

  def encode(self, values: jax.Array, key: jax.Array) -> Encoded:
    """Encodes float32 [..., n], n a multiple of the granule."""

  def decode(self, sent: Encoded) -> jax.Array:
    """Decodes to float32 [..., n]; blocks of zeros alone to finite numbers."""

  def num_bytes(self, size: int, parts: int = 1) -> int:
    """Returns the bytes of `size` values, in `parts` of whole granules."""


@dataclasses.dataclass(frozen=True)
class Bfloat16:
  """The upper 16 bits of a float32, rounded to nearest, as integers.

  XLA's CPU backend widens collectives of bf16 to float32, which saves nothing,
  but sends integers of 16 bits unchanged.
  """

  granule: int = 1
  needs_feedback: ClassVar[bool] = False
  moves_zeros: ClassVar[bool] = False

  def encode(self, values: jax.Array, key: jax.Array) -> Encoded:
    del key
    return Encoded(
      jax.lax.bitcast_convert_type(values.astype(jnp.bfloat16), jnp.uint16)
    )

  def decode(self, sent: Encoded) -> jax.Array:
    return sent.blocks.view(jnp.bfloat16).astype(jnp.float32)

  def num_bytes(self, size: int, parts: int = 1) -> int:
    del parts
    return 2 * size


@dataclasses.dataclass(frozen=True)
class Blockwise:
  """Integers of 8 or 4 bits and a scale of 16 bits for every block.

  With L = 2^(bits - 1) - 1 and s the largest magnitude of a block, rounded up
  to a bfloat16, x is encoded as

    floor(L x / s + u)

  with u = 1/2, which rounds to nearest, or u uniform in [0, 1), which is
  unbiased, since E floor(y + u) = y. Rounding to nearest has half the noise,
  but needs error feedback.

  A block with a value that is not finite has a scale that is not finite, and
  decodes to values that are not finite. So do values above 3.38e38.
  """

  bits: int  # 8 or 4
  granule: int  # values in a block
  is_random: bool = False
  moves_zeros: ClassVar[bool] = False

  @property
  def needs_feedback(self) -> bool:
    return not self.is_random

  @property
  def _levels(self) -> int:
    return 2 ** (self.bits - 1) - 1

  def encode(self, values: jax.Array, key: jax.Array) -> Encoded:
    blocks = values.reshape(*values.shape[:-1], -1, self.granule)
    scale = _rounded_up(jnp.max(jnp.abs(blocks), axis=-1, keepdims=True))
    # Divides by the scale: 1 / scale overflows for the smallest numbers.
    safe = jnp.where(scale > 0, scale, 1.0)
    offset = jax.random.uniform(key, blocks.shape) if self.is_random else 0.5
    # floor(L x / s + u)
    rounded = jnp.floor(blocks / safe * self._levels + offset)
    integers = jnp.clip(rounded, -self._levels, self._levels).astype(jnp.int8)
    integers = packed(integers, self.bits).reshape(*values.shape[:-1], -1)
    scales = Bfloat16().encode(scale[..., 0], key)
    return Encoded((integers, scales))

  def decode(self, sent: Encoded) -> jax.Array:
    integers, scales = sent.blocks
    scales = Bfloat16().decode(scales)
    integers = unpacked(integers.reshape(*scales.shape, -1), self.bits)
    # Divides before it multiplies: a step of a tiny scale is below float32's.
    shares = integers.astype(jnp.float32) / self._levels
    return (shares * scales[..., None]).reshape(*scales.shape[:-1], -1)

  def num_bytes(self, size: int, parts: int = 1) -> int:
    del parts
    return size * self.bits // 8 + 2 * (size // self.granule)


def packed(integers: jax.Array, bits: int) -> jax.Array:
  """Packs integers of some bits, int8 or uint8 [..., n], into whole bytes."""
  if bits == 8:
    return integers
  count, size = 8 // bits, integers.shape[-1] * bits // 8
  parts = integers.reshape(*integers.shape[:-1], count, size)
  lifts = jnp.arange(0, 8, bits, dtype=integers.dtype)[:, None]
  # A reduction: where XLA's CPU backend fuses the parts, it reads one by one.
  return jax.lax.reduce_or((parts & (2**bits - 1)) << lifts, (parts.ndim - 2,))


def unpacked(data: jax.Array, bits: int) -> jax.Array:
  """Reverses `packed`."""
  if bits == 8:
    return data
  # Shifts of signed integers to the right keep the sign.
  lifts = range(8 - bits, -1, -bits)
  parts = [(data << lift) >> (8 - bits) for lift in lifts]
  return arrays_of(data).concatenate(parts, axis=-1)


def _rounded_up(x: jax.Array) -> jax.Array:
  """Rounds non-negative float32 up to values of bfloat16.

  No value of a block exceeds a scale that is rounded up.
  """
  # Sums of larger bits, of some numbers that are not one, would overflow.
  bits = jnp.minimum(
    jax.lax.bitcast_convert_type(x, jnp.uint32), jnp.uint32(0x7FC00000)
  )
  upper = (bits + jnp.uint32(0xFFFF)) & jnp.uint32(0xFFFF0000)
  return jax.lax.bitcast_convert_type(upper, jnp.float32)


@dataclasses.dataclass(frozen=True)
class Levels:
  """Few bits a value: the levels of least error for Gaussian numbers.

    x' = s c(x / s),                       c(z) the level nearest to z
    x' = R^T s c(y / s),   y = R x,        with a rotation
    s  = <y, c> / <c, c>                   the scale of least error |y - s c|

  without a rotation of the 2^bits - 1 levels that contain zero, so that zeros
  stay zeros; with one of the 2^bits levels with the least mean squared error
  (Lloyd 1982; Max 1960): 0.36, 0.12 and 0.0095 of the variance of Gaussian
  numbers with 1, 2 and 4 bits.

  A rotation R of every block makes its values y nearly Gaussian, whatever they
  were, and spreads the error of each over all:

    R = H D / granule^(1/2),    H of Walsh and Hadamard, D of signs

  Levels are chosen twice: by a first scale, the largest magnitude or with a
  rotation the root mean square; then s is computed from them and rounded to
  8 bits, 2^(i / 8) of the largest scale; then levels are chosen by the s that
  is decoded. So no block gains energy, |x - x'| < |x|, whatever its values are:
  a scale that ignores the levels, as the root mean square does, decodes a
  spike to 1.5 times its size with 2 bits, and error feedback then diverges.
  Sent as zeros are only blocks below 2^-32 of the largest scale, and values
  below about 1e-37, where float32 ends.

  Needs error feedback. One value that is not finite makes decoded ones so.

  Source: EDEN (Vargaftik et al. 2022, arXiv:2108.08842). Departures: blocks
  instead of whole vectors; the scale is for the least error, and biased, since
  the error is fed back; the signs are fixed.
  """

  # Values in a block, of whole bytes; with a rotation a power of two.
  granule: int
  bits: int = 4  # 4; with a rotation also 2 or 1
  is_rotated: bool = False
  needs_feedback: ClassVar[bool] = True

  @property
  def moves_zeros(self) -> bool:
    return self.is_rotated

  @property
  def _levels(self) -> np.ndarray:
    return gaussian_levels(2**self.bits - 1 + self.is_rotated)

  def encode(self, values: jax.Array, key: jax.Array) -> Encoded:
    blocks = values.reshape(*values.shape[:-1], -1, self.granule)
    # Squares of numbers below one stay in range.
    largest = jnp.max(jnp.abs(blocks), axis=-1, keepdims=True)
    largest = jnp.where(largest > _LEAST, largest, 1.0)
    unit = blocks / largest
    levels = self._levels
    first = jnp.asarray(1 / levels[-1], jnp.float32)
    if self.is_rotated:
      # y = R x
      unit = _hadamard(unit * _signs(self.granule))
      first = jnp.sqrt(sums.of_last(jnp.square(unit)) / self.granule)
    # s = <y, c> / <c, c>
    chosen = _chosen(unit, first, levels)
    energy = sums.of_last(jnp.square(chosen))
    scale = sums.of_last(unit * chosen) / jnp.where(energy > 0, energy, 1.0)
    scale = scale * largest
    top = jnp.max(scale, axis=-2)
    shares = jnp.log2(scale[..., 0] / jnp.where(top > 0, top, 1.0))
    scales = jnp.clip(jnp.round(255 + 8 * shares), 0, 255).astype(jnp.uint8)
    decoded = (top * jnp.asarray(_shares())[scales])[..., None]
    integers = packed(_index(unit, decoded / largest, levels), self.bits)
    integers = integers.reshape(*values.shape[:-1], -1)
    return Encoded((integers, scales), top)

  def decode(self, sent: Encoded) -> jax.Array:
    integers, scales = sent.blocks
    arrays = arrays_of(scales)
    scales = sent.common * arrays.asarray(_shares())[scales]
    integers = integers.reshape(*scales.shape, -1)
    chosen = arrays.asarray(self._levels)[unpacked(integers, self.bits)]
    if self.is_rotated:
      chosen = _hadamard(chosen) * _signs(self.granule)  # R^T c
    return (chosen * scales[..., None]).reshape(*scales.shape[:-1], -1)

  def num_bytes(self, size: int, parts: int = 1) -> int:
    return size * self.bits // 8 + size // self.granule + 4 * parts


def _thresholds(levels: np.ndarray) -> list[float]:
  """Returns the numbers between levels, at which the nearest one changes."""
  return ((levels[1:] + levels[:-1]) / 2).tolist()


def _index(
  values: jax.Array, scale: jax.Array, levels: np.ndarray
) -> jax.Array:
  """Returns the index of the level times scale nearest to a value, uint8."""
  above = ((values > t * scale).astype(jnp.uint8) for t in _thresholds(levels))
  return sum(above, jnp.uint8(0))


def _chosen(
  values: jax.Array, scale: jax.Array, levels: np.ndarray
) -> jax.Array:
  """Returns the level whose multiple by the scale is nearest to a value."""
  steps = zip(_thresholds(levels), np.diff(levels).tolist(), strict=True)
  above = (jnp.where(values > t * scale, step, 0.0) for t, step in steps)
  return sum(above, jnp.float32(levels[0]))


def _signs(size: int) -> np.ndarray:
  """Returns the signs of a rotation, float32 [size]."""
  signs = np.random.default_rng(_SEED).integers(2, size=size)
  return (1.0 - 2.0 * signs).astype(np.float32)


def _hadamard(values: Any) -> Any:
  """Multiplies float32 [..., n] by H n^(-1/2), the orthonormal Walsh-Hadamard.

  H of a b entries is the Kronecker product of H of a and of b entries, and up
  to 256 of them one product is soonest: on two CPU cores it took a fifth of
  the time of log2(n) rounds of additions with n = 64, and a half with 256.
  """
  size = values.shape[-1]
  if isinstance(values, np.ndarray):
    return _by_additions(values) * np.float32(size**-0.5)
  right = min(size, _LARGEST_FACTOR)
  left = size // right
  product = functools.partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)
  if left == 1:
    return product("...b,bc->...c", values, _walsh(right))
  cells = values.reshape(*values.shape[:-1], left, right)
  cells = product("...ab,bc->...ac", cells, _walsh(right))
  cells = product("da,...ac->...dc", _walsh(left), cells)
  return cells.reshape(values.shape)


def _by_additions(values: np.ndarray) -> np.ndarray:
  """Multiplies by H without a scale: sums and differences, in one order."""
  size = values.shape[-1]
  blocks = values.reshape(-1, size)
  found = np.empty_like(blocks)
  for start in range(0, len(blocks), _CACHED):
    # Columns: additions of long rows, in a cache.
    rows = blocks[start : start + _CACHED].T.copy()
    for width in (2**i for i in range(size.bit_length() - 1)):
      pairs = rows.reshape(-1, 2, width, rows.shape[-1])
      a, b = pairs[:, 0], pairs[:, 1]
      rows = np.stack((a + b, a - b), axis=1).reshape(rows.shape)
    found[start : start + _CACHED] = rows.T
  return found.reshape(values.shape)


def _walsh(size: int) -> np.ndarray:
  """Returns the orthonormal matrix of Walsh and Hadamard, float32."""
  rows = np.arange(size, dtype=np.uint64)
  odd = np.bitwise_count(rows[:, None] & rows) & 1
  return ((1.0 - 2.0 * odd) * size**-0.5).astype(np.float32)


@functools.cache
def gaussian_levels(count: int) -> np.ndarray:
  """Returns the levels for Gaussian numbers, float32, by Lloyd's method.

  A level is the mean of the numbers nearest to it:

    c_j = (f(t_j) - f(t_j+1)) / (F(t_j+1) - F(t_j)),   t_j = (c_j-1 + c_j) / 2

  with f the density of a Gaussian and F its distribution. They are symmetric;
  the middle one of an odd number is exactly zero.
  """
  levels = np.linspace(-2.5, 2.5, count)
  for _ in range(2000):
    ends = [-np.inf, *(levels[1:] + levels[:-1]) / 2, np.inf]
    density = np.exp(-np.square(ends) / 2) / math.sqrt(2 * math.pi)
    below = [(1 + math.erf(end / math.sqrt(2))) / 2 for end in ends]
    levels = -np.diff(density) / np.diff(below)
    levels = (levels - levels[::-1]) / 2
  return levels.astype(np.float32)


def _shares() -> np.ndarray:
  """Returns the scales by index, as shares of the largest; float32 [256]."""
  shares = np.exp2((np.arange(256) - 255) / 8)
  shares[0] = 0
  return shares.astype(np.float32)


# Blocks should not be larger than a column. Scales cost 1.6 and 3.1 %.
_WIRE_CODES: dict[str, Code | None] = {
  "float32": None,
  "bfloat16": Bfloat16(),
  "int8": Blockwise(8, 128),
  "int4": Levels(64),
}


def arrays_of(x: Any) -> Any:
  """Returns the module that computes with an array: NumPy, or jax.numpy."""
  return np if isinstance(x, np.ndarray) else jnp


def code_of(wire_dtype: Any, *, has_feedback: bool = True) -> Code | None:
  """Returns the code that `wire_dtype` names.

  Args:
    wire_dtype: "float32", "bfloat16", "int8" or "int4", or a dtype.
    has_feedback: Whether errors are fed back; integers need it.

  Returns:
    The code; None for float32.

  Raises:
    ValueError: if `wire_dtype` names no code, or one that needs feedback.
  """
  name = wire_dtype
  if not isinstance(wire_dtype, str):
    try:
      name = jnp.dtype(wire_dtype).name
    except Exception:  # NumPy raises several kinds
      name = None
  allowed = [
    own
    for own, code in _WIRE_CODES.items()
    if has_feedback or code is None or not code.needs_feedback
  ]
  if name not in allowed:
    remedy = "use bfloat16 for half the bytes"
    if name in _WIRE_CODES:
      remedy = "use quantize(bits=8) for dense gradients in integers"
    raise ValueError(
      f"`wire_dtype` must be one of {', '.join(allowed)}, got {wire_dtype!r};"
      f" {remedy}."
    )
  return _WIRE_CODES[name]


def name_of(code: Code | None) -> str:
  """Returns the `wire_dtype` that names a code.

  >>> name_of(code_of("bfloat16"))
  'bfloat16'
  """
  for name, own in _WIRE_CODES.items():
    if own == code:
      return name
  if isinstance(code, Blockwise):
    return f"integers of {code.bits} bits"
  if isinstance(code, Levels):
    return f"{code.bits} bits{', rotated' * code.is_rotated}"
  return type(code).__name__
