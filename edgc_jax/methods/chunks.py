"""The largest entries of chunks: their choice, their indices, their sum.

Entries of all replicas are gathered, so the bytes that a replica receives grow
with their number.
"""

import jax
import jax.numpy as jnp

from edgc_jax.wire.codes import packed, unpacked

MOST = 4096  # entries of a chunk, which indices of 12 bits reach


def cut(x: jax.Array, size: int) -> jax.Array:
  """Cuts an array into chunks, [c, size], the last one padded with zeros."""
  flat = x.ravel()
  return jnp.pad(flat, (0, -flat.size % size)).reshape(-1, size)


def largest(chunks: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
  """Returns the `count` largest entries of each chunk [c, n].

  Non-finite entries are among them, so that all replicas detect them.

  Returns:
    The entries, float32 [c, k], and their indices, int32 [c, k].
  """
  magnitude = jnp.where(jnp.isfinite(chunks), jnp.abs(chunks), jnp.inf)
  index = jax.lax.top_k(magnitude, count)[1]
  return jnp.take_along_axis(chunks, index, 1), index


def pack_indices(index: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Packs indices below 4096, int32 [c, k] with an even k, in 12 bits each.

  Returns:
    Their lower 8 bits, and the upper 4 with two in a byte.
  """
  low = (index & 255).astype(jnp.uint8)
  return low, packed((index >> 8).astype(jnp.uint8), 4)


def unpack_indices(sent: tuple[jax.Array, jax.Array]) -> jax.Array:
  """Reverses `pack_indices`, for [..., k]."""
  low, high = sent
  return low.astype(jnp.int32) | (unpacked(high, 4).astype(jnp.int32) << 8)


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
