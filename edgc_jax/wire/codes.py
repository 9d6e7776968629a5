"""Codes: float32 values in fewer bits on the wire.

A code encodes float32 values as integers (and scales), which every platform
sends unchanged, and decodes them. The caller keeps the error of a lossy code.
"""

import dataclasses
import functools
import math
from typing import Any, ClassVar, Protocol

import jax
import jax.numpy as jnp
import numpy as np

_SEED = 4  # of the signs of a rotation
_LEAST = float(np.finfo(np.float32).tiny)


class Code(Protocol):
  """An encoding of values in groups."""

  @property
  def granule(self) -> int:
    """Values in a group."""

  @property
  def needs_feedback(self) -> bool:
    """Whether its errors must be added to the next values."""

  def encode(self, values: jax.Array, key: jax.Array) -> Any:
    """Encodes float32 [..., n], n a multiple of the granule, as [..., *]."""

  def decode(self, sent: Any) -> jax.Array:
    """Decodes the arrays of `encode` to float32 [..., n]."""

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

  def encode(self, values: jax.Array, key: jax.Array) -> jax.Array:
    del key
    return jax.lax.bitcast_convert_type(values.astype(jnp.bfloat16), jnp.uint16)

  def decode(self, sent: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(sent, jnp.bfloat16).astype(jnp.float32)

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

  @property
  def needs_feedback(self) -> bool:
    return not self.is_random

  @property
  def _levels(self) -> int:
    return 2 ** (self.bits - 1) - 1

  def encode(self, values: jax.Array, key: jax.Array) -> dict[str, jax.Array]:
    blocks = values.reshape(*values.shape[:-1], -1, self.granule)
    scale = _rounded_up(jnp.max(jnp.abs(blocks), axis=-1, keepdims=True))
    # Divides by the scale: 1 / scale overflows for the smallest numbers.
    safe = jnp.where(scale > 0, scale, 1.0)
    offset = jax.random.uniform(key, blocks.shape) if self.is_random else 0.5
    # floor(L x / s + u)
    rounded = jnp.floor(blocks / safe * self._levels + offset)
    integers = jnp.clip(rounded, -self._levels, self._levels).astype(jnp.int8)
    integers = integers.reshape(values.shape)
    integers = packed(integers, self.bits)
    scales = Bfloat16().encode(scale[..., 0], key)
    return {"integers": integers, "scales": scales}

  def decode(self, sent: dict[str, jax.Array]) -> jax.Array:
    integers = unpacked(sent["integers"], self.bits)
    scales = Bfloat16().decode(sent["scales"])
    shape = integers.shape
    blocks = integers.reshape(*shape[:-1], -1, self.granule)
    step = scales[..., None] / self._levels
    return (blocks.astype(jnp.float32) * step).reshape(shape)

  def num_bytes(self, size: int, parts: int = 1) -> int:
    del parts
    return size * self.bits // 8 + 2 * (size // self.granule)


def packed(integers: jax.Array, bits: int) -> jax.Array:
  """Packs integers of some bits, int8 or uint8 [..., n], into whole bytes."""
  if bits == 8:
    return integers
  parts = jnp.split(integers, 8 // bits, axis=-1)
  mask = 2**bits - 1
  shifted = [(part & mask) << (bits * i) for i, part in enumerate(parts)]
  return functools.reduce(jnp.bitwise_or, shifted)


def unpacked(data: jax.Array, bits: int) -> jax.Array:
  """Reverses `packed`."""
  if bits == 8:
    return data
  # Shifts of signed integers to the right keep the sign.
  lifts = range(8 - bits, -1, -bits)
  parts = [(data << lift) >> (8 - bits) for lift in lifts]
  return jnp.concatenate(parts, axis=-1)


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
class Rotated:
  """Few bits a value: levels for Gaussian numbers, after a rotation.

  A rotation R of every block makes its values x nearly Gaussian, whatever they
  were, and spreads the error of each over all:

    y = R x,   R = H D / granule^(1/2),    H of Walsh and Hadamard, D of signs
    x' = R^T s c(y / s),                   s the root mean square of a block

  with c(z) the nearest of the 2^bits levels with the least mean squared error
  for Gaussian numbers (Lloyd 1982; Max 1960): 0.36, 0.12 and 0.0095 of their
  variance with 1, 2 and 4 bits. Scales have 8 bits, 2^(i / 8) of the largest
  one; a block below 2^-32 of it is zero. Needs error feedback. One value that
  is not finite makes all decoded values so.

  Source: EDEN (Vargaftik et al. 2022, arXiv:2108.08842). Departures: blocks
  instead of whole vectors; the scale is for the least error, and biased, since
  the error is fed back; the signs are fixed.
  """

  granule: int  # values in a block, a power of two
  bits: int = 4  # 4, 2 or 1
  needs_feedback: ClassVar[bool] = True

  def encode(self, values: jax.Array, key: jax.Array) -> dict[str, jax.Array]:
    blocks = values.reshape(*values.shape[:-1], -1, self.granule)
    # Squares of numbers below one stay in range.
    largest = jnp.max(jnp.abs(blocks), axis=-1, keepdims=True)
    largest = jnp.where(largest > _LEAST, largest, 1.0)
    # y = R x
    rotated = jnp.matmul(
      blocks / largest, self._rotation.T, precision=jax.lax.Precision.HIGHEST
    )
    size = jnp.sqrt(jnp.mean(jnp.square(rotated), axis=-1, keepdims=True))
    unit = rotated / jnp.where(size > 0, size, 1.0)
    # The index of a level is the number of thresholds below.
    levels = _gaussian_levels(self.bits)
    between = (levels[1:] + levels[:-1]) / 2
    above = ((unit > t).astype(jnp.uint8) for t in between.tolist())
    index = sum(above, jnp.uint8(0))
    integers = packed(index.reshape(values.shape), self.bits)
    scale = (size * largest)[..., 0]
    top = jnp.max(scale, axis=-1, keepdims=True)
    shares = jnp.log2(scale / jnp.where(top > 0, top, 1.0))
    scales = jnp.clip(jnp.round(255 + 8 * shares), 0, 255).astype(jnp.uint8)
    return {"integers": integers, "scales": scales, "top": top}

  def decode(self, sent: dict[str, jax.Array]) -> jax.Array:
    scales = sent["top"] * jnp.asarray(_shares())[sent["scales"]]
    index = unpacked(sent["integers"], self.bits)
    blocks = index.reshape(*index.shape[:-1], -1, self.granule)
    levels = jnp.asarray(_gaussian_levels(self.bits))[blocks]
    # x' = R^T s c
    values = jnp.matmul(
      levels * scales[..., None],
      self._rotation,
      precision=jax.lax.Precision.HIGHEST,
    )
    return values.reshape(index.shape)

  def num_bytes(self, size: int, parts: int = 1) -> int:
    return size * self.bits // 8 + size // self.granule + 4 * parts

  @property
  def _rotation(self) -> np.ndarray:
    """R, float32 [granule, granule]."""
    rows = np.arange(self.granule, dtype=np.uint64)
    odd = np.bitwise_count(rows[:, None] & rows) & 1
    signs = 1.0 - 2.0 * np.random.default_rng(_SEED).integers(2, size=len(rows))
    rotation = (1.0 - 2.0 * odd) * signs * self.granule**-0.5
    return rotation.astype(np.float32)


@functools.cache
def _gaussian_levels(bits: int) -> np.ndarray:
  """Returns the levels for Gaussian numbers, float32, by Lloyd's method.

  A level is the mean of the numbers nearest to it:

    c_j = (f(t_j) - f(t_j+1)) / (F(t_j+1) - F(t_j)),   t_j = (c_j-1 + c_j) / 2

  with f the density of a Gaussian and F its distribution.
  """
  levels = np.linspace(-2.5, 2.5, 2**bits)
  for _ in range(2000):
    ends = [-np.inf, *(levels[1:] + levels[:-1]) / 2, np.inf]
    density = np.exp(-np.square(ends) / 2) / math.sqrt(2 * math.pi)
    below = [(1 + math.erf(end / math.sqrt(2))) / 2 for end in ends]
    levels = -np.diff(density) / np.diff(below)
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
  "int4": Rotated(64),
}


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
  if isinstance(code, Rotated):
    return f"{code.bits} bits, rotated"
  return type(code).__name__
