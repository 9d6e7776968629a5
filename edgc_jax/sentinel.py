"""Whether replicas still hold the same, compared once in a while.

Replicas apply the same update at every step only as long as nothing goes wrong:
a bit that flips, initial parameters of different seeds, a leaf that nobody
averages. Equal bits are too much to ask of hosts that round differently, so
what is compared are random projections. Of every leaf x with norm |x|

  z_v += (sum_j s_vj x_j / |x| + w_v ln |x|) / tolerance,    v = 1 ... 4

with random signs s and weights w of about one, and where x differs by d between
two replicas, z_v does by about |d| / |x| in units of the tolerance, whatever d
is. Replicas have parted where some z_v differ by more than 1.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from edgc_jax import collectives

CHECK_EVERY = 100  # steps, unless the user says otherwise
_VALUES = 4  # projections; all are below a tenth of |d| once in 25,000 times
# Of a leaf's norm. Hosts that round differently stay within 1e-5 (measured);
# replicas that went their own way differ by this within some steps.
_TOLERANCE = 1e-3
# For parameters in narrow floats: roundings of these that replicas may differ
# by, since an update that is equal to 1e-6 is rounded up here and down there.
_ROUNDINGS = 8.0


def have_parted(
  tree: Any, is_due: jax.Array, count: jax.Array, axis_name: str
) -> jax.Array:
  """Compares what replicas hold; 40 bytes on the wire where it is due.

  Args:
    tree: Arrays that are equal on all replicas, up to rounding.
    is_due: bool [], equal on all replicas.
    count: int32 [], steps done, which changes the signs.
    axis_name: The bound axis of the replicas.

  Returns:
    int32 [], equal on all replicas: 1 if they have parted, 0 if not, or if it
    is not due.
  """
  leaves = [
    x for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.floating)
  ]
  if not leaves or collectives.num_devices(axis_name) == 1:
    return jnp.zeros((), jnp.int32)

  def compare() -> jax.Array:
    z = sum(_projections(x, i, count) for i, x in enumerate(leaves, 1))
    # A number that is not finite on some replicas only has parted them, too.
    is_broken = ~jnp.isfinite(z)
    seen = jnp.append(jnp.where(is_broken, 0.0, z), jnp.any(is_broken) * 2.0)
    return (collectives.spread(seen, axis_name) > 1.0).astype(jnp.int32)

  verdict = jax.eval_shape(compare)
  return jax.lax.cond(
    is_due, compare, lambda: collectives.zeros_like_type(verdict)
  )


def check_bytes(axis_name: str) -> int:
  """Bytes that one comparison sends over the replicas."""
  if collectives.num_devices(axis_name) == 1:
    return 0
  return 4 * 2 * (_VALUES + 1)


def _projections(x: jax.Array, salt: int, count: jax.Array) -> jax.Array:
  """z of one leaf, float32 [_VALUES]."""
  rounding = float(jnp.finfo(x.dtype).eps)
  tolerance = max(_TOLERANCE, _ROUNDINGS * rounding)
  x = x.astype(jnp.float32)
  largest = jnp.max(jnp.abs(x), initial=0.0)
  x = x / jnp.where(largest > 0, largest, 1.0)
  norm = jnp.sqrt(jnp.sum(jnp.square(x)))
  bits = _random_bits(x.shape, salt, count)
  # Without the logarithm a factor between replicas would not be seen; weights
  # that are no signs keep those of two leaves from cancelling.
  own_bits = _random_bits((_VALUES,), ~salt, count)
  weights = 0.5 + own_bits.astype(jnp.float32) * 2.0**-32
  length = jnp.where(norm > 0, jnp.log(norm) + jnp.log(largest), 0.0)
  norm = jnp.where(norm > 0, norm, 1.0)
  sums = [
    jnp.sum(jnp.where((bits >> v) & 1 > 0, x, -x)) for v in range(_VALUES)
  ]
  return (jnp.stack(sums) / norm + weights * length) / tolerance


def _random_bits(
  shape: tuple[int, ...], salt: int, count: jax.Array
) -> jax.Array:
  """32 random bits for every entry; uint32, the same on every platform.

  Integers of the entry's place, mixed as in Austin Appleby's MurmurHash3: the
  compiler makes them where they are used, so they take no memory. Only where
  an entry is decides its bits, so sharded arrays need not be flattened.
  """
  strides = np.cumprod((1, *shape[:0:-1]))[::-1]
  place = functools.reduce(
    jnp.add,
    (
      jax.lax.broadcasted_iota(jnp.uint32, shape, axis)
      * np.uint32(stride % 2**32)
      for axis, stride in enumerate(strides[: len(shape)])
    ),
    jnp.zeros(shape, jnp.uint32),
  )
  start = np.uint32(salt * 0x9E3779B1 % 2**32)
  h = place * np.uint32(0xCC9E2D51) + start + count.astype(jnp.uint32)
  h = (h ^ (h >> 16)) * np.uint32(0x85EBCA6B)
  h = (h ^ (h >> 13)) * np.uint32(0xC2B2AE35)
  return h ^ (h >> 16)
