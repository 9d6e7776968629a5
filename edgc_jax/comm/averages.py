"""The mean over replicas of values that travel coded.

Integers cannot be summed on the way, so an all-reduce is done in its two
halves:

  replica i sends part j of code(x_i) to replica j         all-to-all
  replica j sums what it decodes, in float32:  y_j
  replica j sends code(y_j / N) to all                     all-gather

Each half sends every value once, as the halves of an all-reduce do, so the
bytes are those of an all-reduce of what the code makes of the values. The
second coding's error goes on too, as in 1-bit Adam (Tang et al. 2021,
arXiv:2102.02888).
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from edgc_jax.comm import collectives, dataflow
from edgc_jax.comm.codes import Code, NativeBfloat16


class Averaged(NamedTuple):
  """What came, and what a replica put in, each float32 as the values were.

  The mean over replicas of `sent` is `mean`, whatever the code lost, on both
  ways: what is left of a value is `value - sent`, and nothing is lost if that
  goes on next time. (For native bf16 only up to how the platform sums.)
  """

  mean: list[jax.Array]  # equal on all replicas
  sent: list[jax.Array]  # local
  exact: Any  # the mean of what went along in float32


def average(
  values: Sequence[jax.Array],
  axis_name: str,
  code: Code | NativeBfloat16 | None = None,
  key: jax.Array | None = None,
  exact: Any = None,
) -> Averaged:
  """Averages arrays over replicas, coded, and others as they are.

  Args:
    values: float32, of any shapes, local.
    axis_name: The bound axis of the replicas.
    code: How they travel; None is float32, in one all-reduce with `exact`.
    key: For codes that round at random; each replica makes its own of it.
    exact: A tree that travels as it is.

  Returns:
    The means. Bytes on the wire are `average_bytes`, and those of `exact`.
  """
  values = list(values)
  if code is None or not values:
    mean, exact = collectives.mean((values, exact), axis_name)
    return Averaged(mean, values, exact)
  if isinstance(code, NativeBfloat16):
    narrow = [value.astype(jnp.bfloat16) for value in values]
    mean, exact = collectives.mean((narrow, exact), axis_name)
    wide = lambda xs: [x.astype(jnp.float32) for x in xs]  # noqa: E731
    return Averaged(wide(mean), wide(narrow), exact)
  replicas = collectives.num_devices(axis_name)
  own = collectives.device_index(axis_name)
  first, second = jax.random.split(jax.random.fold_in(key, own))
  parts = _parts(values, code, replicas)
  encoded = code.encode(parts, first)
  received = code.decode(collectives.exchange_parts(encoded, axis_name))
  mean = jnp.mean(received, axis=0)
  encoded_mean = code.encode(mean, second)
  # What the second coding lost is put on the replica that did it.
  error = replicas * (code.decode(encoded_mean) - mean)
  sent = code.decode(encoded).at[own].add(error)
  all_means = code.decode(collectives.gather(encoded_mean, axis_name))
  exact = dataflow.in_turn(exact, all_means)
  exact = collectives.mean(exact, axis_name)
  return Averaged(
    _cut(all_means, values, code), _cut(sent, values, code), exact
  )


def average_bytes(
  groups: Sequence[Sequence[int]],
  code: Code | NativeBfloat16 | None = None,
  replicas: int = 1,
) -> list[int]:
  """Predicts the bytes of several calls of `average`, without `exact`.

  Args:
    groups: Sizes of the values of each call.
    code: Their encoding.
    replicas: Values are padded to as many parts of whole granules.

  Returns:
    Bytes of each call, counted as for an all-reduce.
  """
  if code is None:
    return [4 * sum(sizes) for sizes in groups]
  if isinstance(code, NativeBfloat16):
    return [code.num_bytes(sum(sizes)) for sizes in groups]
  totals = [
    sum(_padded(size, code.granule) for size in sizes) for sizes in groups
  ]
  granule = code.granule * replicas
  return [code.num_bytes(_padded(total, granule)) for total in totals]


def _parts(values: Sequence[jax.Array], code: Code, replicas: int) -> jax.Array:
  """All values as [replicas, n]; no granule holds parts of two of them."""
  flat = [
    # With its last entry: zeros would count in the scale of a block.
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


def _cut(
  parts: jax.Array, values: Sequence[jax.Array], code: Code
) -> list[jax.Array]:
  """The reverse of `_parts`."""
  ends = np.cumsum([_padded(value.size, code.granule) for value in values])
  pieces = jnp.split(parts.ravel()[: ends[-1]], ends[:-1])
  return [
    piece[: value.size].reshape(value.shape)
    for piece, value in zip(pieces, values, strict=True)
  ]


def _padded(size: int, granule: int) -> int:
  return -(-size // granule) * granule
