"""Averages of encoded values over the replicas.

An all-reduce cannot sum encoded values, so it is split into its two halves:

  replica i sends part j of encode(x_i) to replica j       all-to-all
  replica j decodes the parts and sums them in float32:    y_j
  replica j sends encode(y_j / N) to all replicas          all-gather

Each half sends every value once, like the halves of an all-reduce, so both
together send as many bytes as an all-reduce of the encoded values. The error of
the second encoding enters the error feedback too, as in 1-bit Adam (Tang et al.
2021, arXiv:2102.02888).
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from edgc_jax.wire import collectives, order
from edgc_jax.wire.codes import Code
from edgc_jax.wire.order import AxisName


class Averaged(NamedTuple):
  """The mean of the values and the contribution of this replica to it.

  The mean of `sent` over the replicas is `mean`, whatever both encodings lost.
  So `value - sent` is the residual of a value, and error feedback that adds it
  to the next values loses nothing.
  """

  mean: list[jax.Array]  # float32, shapes of the values; equal on all replicas
  sent: list[jax.Array]  # float32, the same shapes; local
  exact: Any  # the mean of the tree sent in float32


def average(
  values: Sequence[jax.Array],
  axis_name: AxisName,
  code: Code | None = None,
  key: jax.Array | None = None,
  exact: Any = None,
) -> Averaged:
  """Averages `values` over the replicas, encoded, and `exact` in float32.

  Sends as many bytes as `average_bytes` predicts, and the bytes of `exact`.

  Args:
    values: float32 arrays of any shapes, local.
    axis_name: The bound axis of the replicas.
    code: Encoding of the values; None sends them in float32, in one all-reduce
      with `exact`.
    key: Key for codes that round at random; equal on all replicas, which fold
      their index into it.
    exact: A tree that is averaged without encoding.

  Returns:
    The means, and the part of the values that was sent.
  """
  values = list(values)
  if code is None or not values:
    mean, exact = collectives.mean((values, exact), axis_name)
    return Averaged(mean, values, exact)
  assert key is not None  # given with a code
  replicas = collectives.num_devices(axis_name)
  replica = collectives.device_index(axis_name)
  first, second = jax.random.split(jax.random.fold_in(key, replica))
  parts = _pack(values, code, replicas)
  # All-to-all: y_j / N, the mean of part j of all replicas, on replica j.
  encoded = code.encode(parts, first)
  received = code.decode(collectives.exchange_parts(encoded, axis_name))
  mean = jnp.mean(received, axis=0)
  encoded_mean = code.encode(mean, second)
  # The replica that encodes a mean keeps its error, N times, in `sent`.
  error = replicas * (code.decode(encoded_mean) - mean)
  sent = code.decode(encoded).at[replica].add(error)
  # All-gather: the means of all parts, on every replica.
  all_means = code.decode(collectives.gather(encoded_mean, axis_name))
  exact = order.in_turn(exact, all_means)
  exact = collectives.mean(exact, axis_name)
  return Averaged(
    _unpack(all_means, values, code), _unpack(sent, values, code), exact
  )


def average_bytes(
  sizes: Sequence[int], code: Code | None = None, replicas: int = 1
) -> int:
  """Predicts the bytes of `average`, without `exact`.

  Args:
    sizes: The sizes of the values.
    code: Their encoding; None is float32.
    replicas: Number of replicas; values are padded to as many equal parts of
      whole granules.

  Returns:
    The payload, counted as for an all-reduce.
  """
  if code is None or not sizes:
    return 4 * sum(sizes)
  total = sum(_padded(size, code.granule) for size in sizes)
  return code.num_bytes(_padded(total, code.granule * replicas), replicas)


def _pack(values: Sequence[jax.Array], code: Code, replicas: int) -> jax.Array:
  """Packs all values as [replicas, n]; no two values share a granule."""
  flat = [
    # Padding repeats the last entry: zeros would enter the scale of a block.
    jnp.pad(
      value.ravel(),
      (0, _padded(value.size, code.granule) - value.size),
      mode="edge",
    )
    for value in values
  ]
  vector = jnp.concatenate(flat)
  length = _padded(vector.size, code.granule * replicas)
  return jnp.pad(vector, (0, length - vector.size)).reshape(replicas, -1)


def _unpack(
  parts: jax.Array, values: Sequence[jax.Array], code: Code
) -> list[jax.Array]:
  """Reverses `_pack`; `values` give the shapes."""
  ends = np.cumsum([_padded(value.size, code.granule) for value in values])
  pieces = jnp.split(parts.ravel()[: ends[-1]], ends[:-1])
  return [
    piece[: value.size].reshape(value.shape)
    for piece, value in zip(pieces, values, strict=True)
  ]


def _padded(size: int, granule: int) -> int:
  """Rounds `size` up to a multiple of `granule`."""
  return -(-size // granule) * granule
