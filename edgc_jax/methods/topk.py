"""Defines `topk`: sends the largest entries of tensors, or of their chunks."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from edgc_jax import validation
from edgc_jax.leaves.views import ViewFn
from edgc_jax.methods import chunks
from edgc_jax.methods.entrywise import Round, count_of, entrywise
from edgc_jax.reducer.of_method import MIN_SIZE, reducer
from edgc_jax.stages.stages import Stages
from edgc_jax.wire.agreement import CHECK_EVERY
from edgc_jax.wire.order import AxisName
from edgc_jax.wire.wire import Send


def topk(
  density: float = 0.01,
  axis_name: AxisName = "data",
  *,
  chunk: int | None = None,
  bits: int = 32,
  residual_decay: float = 1.0,
  min_size: int = MIN_SIZE,
  matrix_view: ViewFn | None = None,
  stages: Stages | None = None,
  check_every: int = CHECK_EVERY,
) -> optax.GradientTransformationExtraArgs:
  """Averages the largest entries, with error feedback.

    k = max(1, round(density n)),  sent_i = Q(the k largest |M_i| of n entries)
    update = mean_i sent_i,        residual_i = M_i - sent_i

  of each tensor, or of each chunk of its entries. In 2 bits Q keeps the sign
  and one of two magnitudes: the mean of those up to the mean magnitude, and the
  mean of the others; if there are zeros, zero and the mean of the others. As
  the outer reducer of `local_steps`,

    optax.chain(topk(1 / 64, chunk=4096, bits=2, residual_decay=0.95),
                optax.sgd(1.0))

  is SparseLoCo.

  Wire, N replicas: 4 N k bytes for each tensor, since values and int32 indices
  are gathered (half of 8 N k: an all-gather counts as half an all-reduce). It
  grows with N: at N density = 1 it equals dense. In chunks of n entries an
  index takes 2 + log2(n / k) bits or less, so at a density of 1 / 64 k values
  of 32 bits take N 2.5 k bytes, and of 2 bits N (0.625 k + 2): less than dense
  up to N = 390. And 72 bytes for each matrix, of which the error is read, and
  8 for all. Leaves that are sent dense have 4 bits a value, and a residual.

  Args:
    density: Share of the entries that is sent, in (0, 1].
    axis_name: As for `edgc`.
    chunk: Entries of a chunk of the flat tensor, a multiple of 4 up to 4,096,
      of which k is a multiple of 4; None is the whole tensor.
    bits: Of a value: 32; or 2, in chunks.
    residual_decay: As for `quantize`.
    min_size: Leaves of fewer entries are sent dense, and so are those without
      a matrix, such as vectors.
    matrix_view, stages, check_every: As for `edgc`.

  Returns:
    A gradient transformation, from local gradients to their mean.

  Raises:
    TypeError: if an argument that decides shapes is not a Python number.
    ValueError: if an argument is out of range.

  References:
    Stich et al. 2018, arXiv:1809.07599. SparseLoCo, Sarfi et al. 2025,
    arXiv:2508.15706, with departures: the magnitudes are means, of each chunk,
    chunks are of the flat tensor, an index takes 8 bits where it has 12 there,
    and vectors are in 4 bits. Indices: Elias 1974, Fano 1971.

  >>> tx = optax.chain(topk(density=0.01), optax.adam(1e-3))
  """
  validation.require_share("density", density)
  if chunk is not None:
    validation.require_int("chunk", chunk, chunks.MULTIPLE)
    validation.require(
      chunk <= chunks.MOST and chunk % chunks.MULTIPLE == 0,
      "chunk",
      chunk,
      f"a multiple of {chunks.MULTIPLE}, up to {chunks.MOST}",
      f"use {chunks.MOST}",
    )
  validation.require_int("bits", bits, chunks.FEW)
  validation.require(
    bits == 32 or (bits == chunks.FEW and chunk is not None),
    "bits",
    bits,
    f"32, or {chunks.FEW} with chunks",
    f"pass chunk={chunks.MOST} for {chunks.FEW} bits",
  )
  encode, decode = _plain, _plain
  if bits == chunks.FEW:
    encode, decode = chunks.encode_values, chunks.decode_values

  def average(m: jax.Array, key: jax.Array) -> Round:
    del key
    if chunk is None:
      size, count = m.size, count_of(density, m.size)
    else:
      size, count = chunks.sizes_of(density, chunk, m.size)
    pieces = chunks.cut(m, size)
    values, index = chunks.largest(pieces, count)
    coded = encode(values)
    packed_index = chunks.pack_indices(index, size) if chunk else index
    reply = yield Send(gathered=(coded, packed_index))
    all_coded, places = reply.gathered
    if chunk:
      places = chunks.unpack_indices(places, count, size)
    # mean = sum_i sent_i / N
    mean = chunks.in_place(decode(all_coded), places, size)
    rows = jnp.arange(len(pieces))[:, None]
    sent = jnp.zeros_like(pieces).at[rows, index].set(decode(coded))
    return mean.ravel()[: m.size], sent.ravel()[: m.size]

  return reducer(
    entrywise(average, residual_decay=residual_decay),
    axis_name,
    wire_dtype="int4",
    min_size=min_size,
    matrix_view=matrix_view,
    stages=stages,
    check_every=check_every,
  )


def _plain(values: Any) -> Any:
  return values
