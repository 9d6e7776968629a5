"""The largest entries of chunks: their choice, values, indices, and sum.

Entries of all replicas are gathered, so the bytes that a replica receives grow
with their number.
"""

import jax
import jax.numpy as jnp

from edgc_jax.wire.codes import (
  Bfloat16,
  Encoded,
  arrays_of,
  packed,
  unpacked,
)

MOST = 4096  # entries of a chunk
FEW = 2  # bits of a value, of which a byte holds 4
MULTIPLE = 8 // FEW  # of which a chunk and what it sends are multiples
_LARGEST = float(jnp.finfo(jnp.bfloat16).max)


def cut(x: jax.Array, size: int) -> jax.Array:
  """Cuts an array into chunks, [c, size], the last one padded with zeros."""
  flat = x.ravel()
  return jnp.pad(flat, (0, -flat.size % size)).reshape(-1, size)


def sizes_of(density: float, chunk: int, size: int) -> tuple[int, int]:
  """Returns the entries of a chunk of `size` entries, and those it sends."""
  chunk = min(chunk, -(-size // MULTIPLE) * MULTIPLE)
  return chunk, min(chunk, max(1, round(density * chunk / MULTIPLE)) * MULTIPLE)


def largest(chunks: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
  """Returns the `count` largest entries of each chunk [c, n], in their order.

  Non-finite entries are among them, so that all replicas detect them.

  Returns:
    The entries, float32 [c, k], and their indices, int32 [c, k].
  """
  magnitude = jnp.where(jnp.isfinite(chunks), jnp.abs(chunks), jnp.inf)
  index = jnp.sort(jax.lax.top_k(magnitude, count)[1], axis=1)
  return jnp.take_along_axis(chunks, index, 1), index


def encode_values(values: jax.Array) -> tuple[jax.Array, Encoded]:
  """Encodes [c, k] as signs and one of two magnitudes each, [c, 2].

  If a value is zero, the lower magnitude is, and stands for zeros alone.
  """
  magnitude = jnp.abs(values)
  # Sums of numbers up to one stay in range.
  most = magnitude.max(1, keepdims=True)
  unit = magnitude / jnp.where(most > 0, most, 1.0)
  has_zeros = unit.min(1, keepdims=True) == 0
  is_large = unit > jnp.where(has_zeros, 0.0, unit.mean(1, keepdims=True))
  levels = []
  for mask in (~is_large, is_large):
    number = jnp.maximum(mask.sum(1), 1)
    # A magnitude that is not finite reaches the level.
    levels.append(jnp.where(mask, unit, 0.0).sum(1) / number)
  code = is_large.astype(jnp.uint8) + 2 * (values < 0).astype(jnp.uint8)
  scales = jnp.minimum(jnp.stack(levels, 1) * most, _LARGEST)
  return packed(code, FEW), Bfloat16().encode(scales, jax.random.key(0))


def decode_values(sent: tuple[jax.Array, Encoded]) -> jax.Array:
  """Reverses `encode_values`, for [..., c, *]."""
  code, levels = unpacked(sent[0], FEW), Bfloat16().decode(sent[1])
  where = arrays_of(code).where
  magnitude = where(code & 1, levels[..., 1:], levels[..., :1])
  return where(code & 2, -magnitude, magnitude)


def pack_indices(index: jax.Array, size: int) -> tuple[jax.Array, jax.Array]:
  """Packs ascending indices of k of `size` entries, int32 [c, k], in few bits.

  With l = max(0, floor(log2(n / k))) lower bits kept of each index, the upper
  part h_i of the i-th is bit h_i + i of a map of k + ceil(n / 2^l) - 1 bits:
  2 + log2(n / k) bits an index or less (Elias 1974; Fano 1971), 8 of k = 64 in
  n = 4,096. Both are padded to whole bytes, and their length does not depend on
  the indices.

  Returns:
    The lower bits, uint8 [c, k l / 8], and the map, uint8 [c, bytes].
  """
  count = index.shape[-1]
  low = _low_bits(count, size)
  lower = (index[..., None] >> jnp.arange(low)) & 1
  lower = lower.reshape(*index.shape[:-1], count * low)
  ones = (index >> low) + jnp.arange(count)
  places = jnp.zeros_like(index, shape=(len(index), _map_size(count, size)))
  places = places.at[jnp.arange(len(index))[:, None], ones].set(1)
  return jnp.packbits(lower != 0, axis=-1), jnp.packbits(places != 0, axis=-1)


def unpack_indices(
  sent: tuple[jax.Array, jax.Array], count: int, size: int
) -> jax.Array:
  """Reverses `pack_indices`, for [..., c, *]; int32 [..., c, k]."""
  low, length = _low_bits(count, size), _map_size(count, size)
  arrays = arrays_of(sent[1])
  bits = arrays.unpackbits(sent[1], axis=-1, count=length)
  places = arrays.arange(length, dtype=jnp.int32)
  places = arrays.where(bits != 0, places, length)
  ones = arrays.sort(places, axis=-1)[..., :count]
  lower = arrays.unpackbits(sent[0], axis=-1, count=count * low)
  lower = lower.reshape(*ones.shape, low).astype(jnp.int32)
  upper = (ones - arrays.arange(count, dtype=jnp.int32)) << low
  return upper + (lower << arrays.arange(low)).sum(-1)


def _low_bits(count: int, size: int) -> int:
  """Returns l = max(0, floor(log2(n / k)))."""
  return max(0, (size // count).bit_length() - 1)


def _map_size(count: int, size: int) -> int:
  """Returns the bits of the map of the upper parts."""
  return count + ((size - 1) >> _low_bits(count, size))


def in_place(values: jax.Array, index: jax.Array, size: int) -> jax.Array:
  """Returns the mean of the entries of N replicas, [N, c, k], at their places.

  Replicas are added one after the other. The places of one replica differ, so
  every entry is summed in the same order on all devices, even if a device
  scatters with atomics.

  Returns:
    float32 [c, size].
  """

  def add(j: int, total: jax.Array) -> jax.Array:
    rows = jnp.arange(total.shape[0])[:, None]
    return total.at[rows, index[j]].add(values[j])

  zeros = jnp.zeros_like(values, shape=(values.shape[1], size))
  return jax.lax.fori_loop(0, len(values), add, zeros) / len(values)
