"""The reducer of DeMo: the largest frequencies of momentum."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from edgc_jax import extend, validation
from edgc_jax.methods import chunks
from edgc_jax.methods.entrywise import Round
from edgc_jax.wire.codes import Bfloat16, Encoded
from edgc_jax.wire.order import AxisName
from edgc_jax.wire.wire import Send

_SIDE = 64  # the longest side of a chunk


def demo(
  axis_name: AxisName = "data",
  *,
  count: int = 32,
  momentum: float = 0.999,
  **options: Any,
) -> optax.GradientTransformationExtraArgs:
  """Averages the largest frequencies of momentum; a sign descent follows.

    M_i = gradient_i + momentum residual_i
    q_i = the `count` largest frequencies of each chunk of M_i, by cosines
    residual_i = M_i - q_i,    update = mean_i q_i

  so the residual is the momentum, of which each step takes out what it sends.
  Chain it with the sign and the learning rate:

    optax.chain(demo(), optax.scale_by_sign(), optax.scale_by_learning_rate(lr))

  Wire, N replicas: N / 2 times about 3.1 count bytes for each chunk.

  Args:
    axis_name: As for `edgc_jax.edgc`.
    count: Frequencies of a whole chunk of 64 x 64 that are sent, even; of
      smaller chunks as large a share.
    momentum: The decay of the momentum.
    **options: Further arguments of entrywise reducers.

  Returns:
    A gradient transformation, from local gradients to their mean.

  Raises:
    ValueError: if `count` is odd, or above 4,096.

  References:
    DeMo, Peng et al. 2024, arXiv:2411.19870. Departures: values have 16 bits
    and indices about 9; small leaves are sent dense.
  """
  validation.require_int("count", count, 2)
  validation.require_share("momentum", momentum)
  validation.require(
    count % 2 == 0 and count <= chunks.MOST,
    "count",
    count,
    f"even, up to {chunks.MOST}",
    "use 32",
  )

  def average(m: jax.Array, key: jax.Array) -> Round:
    del key
    sides = [_divisor(side) for side in m.shape[1:]]
    validation.require(
      sides[0] * sides[1] > 1,
      "updates",
      m.shape[1:],
      f"matrices with a side that has a divisor from 2 to {_SIDE}",
      "pad it, or send it dense with a matrix_view that returns None for it",
    )
    size = sides[0] * sides[1]
    first, second = (jnp.asarray(_cosines(side)) for side in sides)
    high = {"precision": jax.lax.Precision.HIGHEST}
    k, down, across = len(m), *np.floor_divide(m.shape[1:], sides)
    cut = m.reshape(k, down, sides[0], across, sides[1])
    # Frequencies C M C^T of each chunk.
    found = jnp.einsum("ai,kdicj,bj->kdcab", first, cut, second, **high)
    own = max(2, size * count // chunks.MOST // 2 * 2)
    values, index = chunks.largest(found.reshape(-1, size), own)
    values = Bfloat16().encode(values, jax.random.key(0))
    reply = yield Send(gathered=(values, chunks.pack_indices(index, size)))
    all_values, all_indices = reply.gathered

    def back(values: Encoded, index: jax.Array) -> jax.Array:
      mean = chunks.in_place(Bfloat16().decode(values), index, size)
      mean = mean.reshape(k, down, across, *sides)
      mean = jnp.einsum("ai,kdcab,bj->kdicj", first, mean, second, **high)
      return mean.reshape(m.shape)

    places = chunks.unpack_indices(all_indices, own, size)
    return back(all_values, places), back(
      jax.tree.map(lambda x: x[None], values), index[None]
    )

  method = extend.entrywise(average, residual_decay=momentum)
  return extend.reducer(method, axis_name, **options)


def _divisor(side: int) -> int:
  """Returns the largest divisor up to 64."""
  return max(d for d in range(1, min(side, _SIDE) + 1) if side % d == 0)


def _cosines(size: int) -> np.ndarray:
  """Returns the orthonormal cosine transform, float32 [size, size].

  C_ai = (2 / n)^(1/2) cos(pi a (i + 1/2) / n),   and n^(-1/2) for a = 0
  """
  a, i = np.mgrid[:size, :size]
  cosines = np.sqrt(2 / size) * np.cos(np.pi * a * (i + 0.5) / size)
  cosines[0] = size**-0.5
  return cosines.astype(np.float32)
