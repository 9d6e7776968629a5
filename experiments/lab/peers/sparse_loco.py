"""The exchange of SparseLoCo, with the bytes with which it was published."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from edgc_jax import extend, validation
from edgc_jax.methods import chunks
from edgc_jax.methods.entrywise import Round
from edgc_jax.wire.codes import packed, unpacked
from edgc_jax.wire.order import AxisName
from edgc_jax.wire.wire import Send


def sparse_loco(
  axis_name: AxisName = "data",
  *,
  count: int = 64,
  residual_decay: float = 0.95,
  **options: Any,
) -> optax.GradientTransformationExtraArgs:
  """Averages the largest entries of chunks of 4,096, with error feedback.

    sent_i = Q(the `count` largest |M_i| of each chunk)
    update = mean_i sent_i,    residual_i = M_i - sent_i

  as `edgc_jax.topk` in chunks and 2 bits, whose Q it takes, but with 12 bits an
  index, and vectors in float32. It belongs in `outer` of `local_steps`.

  Wire, N replicas: N / 2 times 1.75 count + 4 bytes for each chunk, and 4 bytes
  for each entry of a vector.

  Args:
    axis_name: As for `edgc_jax.edgc`.
    count: Entries of a chunk that are sent, a multiple of 4.
    residual_decay: The decay of the residual.
    **options: Further arguments of `edgc_jax.extend.reducer`.

  Returns:
    A gradient transformation, from local gradients to their mean.

  References:
    SparseLoCo, Sarfi et al. 2025, arXiv:2508.15706. Departures: those of `topk`
    in Q and in the chunks.

  Raises:
    ValueError: if `count` is no multiple of 4 up to 4,096.
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
    pieces = chunks.cut(m, chunks.MOST)
    values, index = chunks.largest(pieces, count)
    coded = chunks.encode_values(values)
    reply = yield Send(gathered=(coded, _in_12_bits(index)))
    all_coded, all_indices = reply.gathered

    def in_place(coded: Any, index: jax.Array) -> jax.Array:
      return chunks.in_place(chunks.decode_values(coded), index, chunks.MOST)

    mean = in_place(all_coded, _from_12_bits(all_indices))
    sent = in_place(jax.tree.map(lambda x: x[None], coded), index[None])
    return mean.ravel()[: m.size], sent.ravel()[: m.size]

  method = extend.entrywise(average, residual_decay=residual_decay)
  return extend.reducer(method, axis_name, **options)


def _in_12_bits(index: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Packs indices below 4,096: lower 8 bits, and two upper 4 in a byte."""
  upper = packed((index >> 8).astype(jnp.uint8), 4)
  return (index & 255).astype(jnp.uint8), upper


def _from_12_bits(sent: tuple[jax.Array, jax.Array]) -> jax.Array:
  """Reverses `_in_12_bits`."""
  lower, upper = sent
  return lower.astype(jnp.int32) | (unpacked(upper, 4).astype(jnp.int32) << 8)
