"""The reducer of SparseLoCo: 64 of 4,096 entries, in 2 bits."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from edgc_jax import validation
from edgc_jax.methods.entrywise import Round, make_entrywise
from edgc_jax.wire.codes import Bfloat16, packed, unpacked
from edgc_jax.wire.order import AxisName
from edgc_jax.wire.wire import Send
from experiments.peers import chunks
from experiments.peers.chunks import Sparse


def sparse_loco(
  axis_name: AxisName = "data",
  *,
  count: int = 64,
  residual_decay: float = 0.95,
  **options: Any,
) -> optax.GradientTransformationExtraArgs:
  """Averages the largest entries of chunks of 4,096, in 2 bits each.

    sent_i = Q(the `count` largest |M_i| of each chunk)
    residual_i = M_i - sent_i,    M_i = difference_i + decay residual_i

  Q keeps the sign and one of two magnitudes, the mean of those below the mean
  magnitude and the mean of the others. Meant for `local_steps` with an outer
  rate of 1 and without momentum.

  Wire, N replicas: N / 2 times (14 count / 8 + 4) bytes for each chunk.

  Args:
    axis_name: As for `edgc_jax.edgc`.
    count: Entries of a chunk that are sent, a multiple of 4.
    residual_decay: As for `edgc_jax.quantize`.
    **options: Further arguments of entrywise reducers.

  Returns:
    A gradient transformation, from local gradients to their mean.

  Raises:
    ValueError: if `count` is no multiple of 4, or above 4,096.

  References:
    SparseLoCo, Sarfi et al. 2025, arXiv:2508.15706. Departures: the two
    magnitudes are means, of each chunk; chunks are of the flat leaf.
  """
  validation.require_int("count", count, 4)
  validation.require(
    count % 4 == 0 and count <= chunks.MOST,
    "count",
    count,
    f"a multiple of 4, up to {chunks.MOST}",
    "use 64",
  )

  def average(m: jax.Array, key: jax.Array) -> Round:
    del key
    flat = m.ravel()
    size = chunks.MOST if flat.size >= chunks.MOST else flat.size
    padded = jnp.pad(flat, (0, -flat.size % size)).reshape(-1, size)
    own = min(count, max(4, size * count // chunks.MOST // 4 * 4))
    values, index = chunks.largest(padded, own)
    sparse = Sparse(*chunks.pack_indices(index), *_encode(values))
    reply = yield Send(gathered=sparse)
    found = Sparse(*reply.gathered)
    places = chunks.unpack_indices(found.low, found.high)
    mean = chunks.in_place(_decode(found.values, found.scales), places, size)
    rows = jnp.arange(len(padded))[:, None]
    sent = jnp.zeros_like(padded).at[rows, index].set(_decode(*sparse[2:]))
    return mean.ravel()[: flat.size], sent.ravel()[: flat.size]

  return make_entrywise(
    average, axis_name, residual_decay=residual_decay, **options
  )


def _encode(values: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Encodes [c, k] as a sign and one of two magnitudes."""
  magnitude = jnp.abs(values)
  is_large = magnitude > magnitude.mean(1, keepdims=True)
  levels = []
  for mask in (~is_large, is_large):
    number = jnp.maximum(mask.sum(1), 1)
    # A magnitude that is not finite reaches the level.
    levels.append(jnp.where(mask, magnitude, 0.0).sum(1) / number)
  code = is_large.astype(jnp.uint8) + 2 * (values < 0).astype(jnp.uint8)
  scales = Bfloat16().encode(jnp.stack(levels, 1), jax.random.key(0))
  return packed(code, 2), scales


def _decode(code: jax.Array, scales: jax.Array) -> jax.Array:
  """Reverses `_encode`, for [..., c, *]."""
  code, levels = unpacked(code, 2), Bfloat16().decode(scales)
  magnitude = jnp.where(code & 1, levels[..., 1:], levels[..., :1])
  return jnp.where(code & 2, -magnitude, magnitude)
