"""Codes: float32 values in fewer bits on the wire.

A code encodes float32 values as integers (and scales), which every platform
sends unchanged, and decodes them. The caller keeps the error of a lossy code.
"""

import dataclasses
from typing import Any, Protocol

import jax
import jax.numpy as jnp


class Code(Protocol):
  """An encoding of values in groups of `granule`."""

  granule: int

  def encode(self, values: jax.Array, key: jax.Array) -> Any:
    """Encodes float32 [..., n], n a multiple of the granule, as [..., *]."""

  def decode(self, sent: Any) -> jax.Array:
    """Decodes the arrays of `encode` to float32 [..., n]."""

  def num_bytes(self, size: int) -> int:
    """Returns the bytes of `size` values, a multiple of the granule."""


@dataclasses.dataclass(frozen=True)
class Bfloat16:
  """The upper 16 bits of a float32, rounded to nearest, as integers.

  XLA's CPU backend widens collectives of bf16 to float32, which saves nothing,
  but sends integers of 16 bits unchanged.
  """

  granule: int = 1

  def encode(self, values: jax.Array, key: jax.Array) -> jax.Array:
    del key
    return jax.lax.bitcast_convert_type(values.astype(jnp.bfloat16), jnp.uint16)

  def decode(self, sent: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(sent, jnp.bfloat16).astype(jnp.float32)

  def num_bytes(self, size: int) -> int:
    return 2 * size


@dataclasses.dataclass(frozen=True)
class NativeBfloat16:
  """bf16 in the platform's all-reduce, which chooses the precision of sums.

  Not a `Code`: values are not decoded before they are summed.
  """

  granule: int = 1

  def num_bytes(self, size: int) -> int:
    """Returns 2 bytes per value, or 4 if XLA widens the collective."""
    return (4 if jax.default_backend() == "cpu" else 2) * size


@dataclasses.dataclass(frozen=True)
class Blockwise:
  """Integers of 8 or 4 bits and a float32 scale for every block.

  With L = 2^(bits - 1) - 1, s the largest magnitude of a block and u uniform
  in [0, 1), x is encoded as

    floor(L x / s + u),    unbiased since    E floor(y + u) = y.

  A block with a value that is not finite has a scale that is not finite, and
  decodes to values that are not finite.
  """

  bits: int  # 8 or 4
  granule: int  # values in a block

  @property
  def _levels(self) -> int:
    return 2 ** (self.bits - 1) - 1

  def encode(self, values: jax.Array, key: jax.Array) -> dict[str, jax.Array]:
    blocks = values.reshape(*values.shape[:-1], -1, self.granule)
    scale = jnp.max(jnp.abs(blocks), axis=-1, keepdims=True)
    # Divides by the scale: 1 / scale overflows for the smallest numbers.
    safe = jnp.where(scale > 0, scale, 1.0)
    noise = jax.random.uniform(key, blocks.shape)
    # floor(L x / s + u)
    rounded = jnp.floor(blocks / safe * self._levels + noise)
    integers = jnp.clip(rounded, -self._levels, self._levels).astype(jnp.int8)
    integers = integers.reshape(values.shape)
    if self.bits == 4:
      low, high = jnp.split(integers, 2, axis=-1)
      integers = ((high & 15) << 4) | (low & 15)
    return {"integers": integers, "scales": scale[..., 0]}

  def decode(self, sent: dict[str, jax.Array]) -> jax.Array:
    integers, scales = sent["integers"], sent["scales"]
    if self.bits == 4:
      # Shifts of signed integers keep the sign.
      integers = jnp.concatenate([(integers << 4) >> 4, integers >> 4], axis=-1)
    shape = integers.shape
    blocks = integers.reshape(*shape[:-1], -1, self.granule)
    step = scales[..., None] / self._levels
    return (blocks.astype(jnp.float32) * step).reshape(shape)

  def num_bytes(self, size: int) -> int:
    return size * self.bits // 8 + 4 * (size // self.granule)


@dataclasses.dataclass(frozen=True)
class Signs:
  """One bit per value, its sign, and the float32 mean magnitude of every block.

  Biased: needs error feedback (Karimireddy et al. 2019, arXiv:1901.09847).
  """

  granule: int  # values in a block, a multiple of 8

  def encode(self, values: jax.Array, key: jax.Array) -> dict[str, jax.Array]:
    del key
    blocks = values.reshape(*values.shape[:-1], -1, self.granule)
    return {
      "bits": jnp.packbits(values >= 0, axis=-1),
      "scales": jnp.mean(jnp.abs(blocks), axis=-1),
    }

  def decode(self, sent: dict[str, jax.Array]) -> jax.Array:
    bits = jnp.unpackbits(sent["bits"], axis=-1)
    signs = 2.0 * bits.astype(jnp.float32) - 1.0
    blocks = signs.reshape(*signs.shape[:-1], -1, self.granule)
    return (blocks * sent["scales"][..., None]).reshape(signs.shape)

  def num_bytes(self, size: int) -> int:
    return size // 8 + 4 * (size // self.granule)


_WIRE_CODES = {
  "float32": None,
  "bfloat16": Bfloat16(),
  "native_bfloat16": NativeBfloat16(),
}


def code_of(wire_dtype: Any) -> Bfloat16 | NativeBfloat16 | None:
  """Returns the code that `wire_dtype` names.

  Args:
    wire_dtype: "float32", "bfloat16" or "native_bfloat16", or a dtype.

  Returns:
    The code; None for float32.

  Raises:
    ValueError: if `wire_dtype` names no code.
  """
  name = wire_dtype
  if not isinstance(wire_dtype, str):
    try:
      name = jnp.dtype(wire_dtype).name
    except TypeError:
      name = None
  if name not in _WIRE_CODES:
    raise ValueError(
      f"`wire_dtype` must be one of {tuple(_WIRE_CODES)}, got {wire_dtype!r};"
      " use bfloat16 for half the bytes."
    )
  return _WIRE_CODES[name]


def name_of(code: Bfloat16 | NativeBfloat16 | None) -> str:
  """Returns the `wire_dtype` that names a code.

  >>> name_of(code_of("bfloat16"))
  'bfloat16'
  """
  return next(name for name, own in _WIRE_CODES.items() if own == code)
