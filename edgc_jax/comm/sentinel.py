"""Whether replicas still hold the same, compared once in a while.

Replicas apply the same update at every step only as long as nothing goes wrong:
a bit that flips, initial parameters of different seeds, a leaf that nobody
averages. Equal bits are too much to ask of hosts that round differently, so
what is compared are random projections. Of every leaf x with norm |x|

  z_v += (sum_j s_vj x_j / |x| + w_v ln |x|) / tolerance,    v = 1 ... 4

with random signs s and weights w of about one, and where x differs by d between
two replicas, z_v does by about |d| / |x| in units of the tolerance, whatever d
is. Replicas have parted where some z_v differ by more than 1. (Entries
whose squares are out of float32's range, below 1e-22 or above 1e19, count as
zeros or as not finite.)
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from edgc_jax.comm import collectives

CHECK_EVERY = 100  # steps, unless the user says otherwise
_GROUP = 32  # leaves that share z: the more, the coarser float32 is for it
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
  """Compares what replicas hold; `check_bytes` on the wire where it is due.

  Args:
    tree: Arrays that are equal on all replicas, up to rounding.
    is_due: bool [], equal on all replicas.
    count: int32 [], steps done, which changes the signs.
    axis_name: The bound axis of the replicas.

  Returns:
    int32 [], equal on all replicas: 1 if they have parted, 0 if not, or if it
    is not due.
  """
  leaves = _floats(tree)
  if not leaves or collectives.num_devices(axis_name) == 1:
    return jnp.zeros((), jnp.int32)

  def compare() -> jax.Array:
    z = _projections(leaves, count)
    # A number that is not finite on some replicas only has parted them, too.
    is_broken = ~jnp.isfinite(z)
    seen = jnp.append(jnp.where(is_broken, 0.0, z), jnp.any(is_broken) * 2.0)
    return (collectives.spread(seen, axis_name) > 1.0).astype(jnp.int32)

  verdict = jax.eval_shape(compare)
  return jax.lax.cond(
    is_due, compare, lambda: collectives.zeros_like_type(verdict)
  )


def check_bytes(tree: Any, axis_name: str) -> int:
  """Bytes that one comparison sends over the replicas: 40 up to 32 leaves."""
  leaves = _floats(tree)
  if not leaves or collectives.num_devices(axis_name) == 1:
    return 0
  return 4 * 2 * (_VALUES * -(-len(leaves) // _GROUP) + 1)


def _floats(tree: Any) -> list[jax.Array]:
  is_float = lambda x: jnp.issubdtype(x.dtype, jnp.floating)  # noqa: E731
  return [x for x in jax.tree.leaves(tree) if is_float(x)]


def _projections(leaves: Sequence[jax.Array], count: jax.Array) -> jax.Array:
  """z of each group of leaves, one after the other; float32 [.. _VALUES]."""
  seeds = jnp.arange(1, 1 + len(leaves), dtype=jnp.uint32)
  seeds = seeds * np.uint32(0x9E3779B1) + count.astype(jnp.uint32)
  sums = jnp.stack([_sums(x, seeds[i]) for i, x in enumerate(leaves)])
  roundings = [_ROUNDINGS * float(jnp.finfo(x.dtype).eps) for x in leaves]
  tolerance = jnp.maximum(jnp.array(roundings, jnp.float32), _TOLERANCE)
  norm = jnp.sqrt(sums[:, -1])
  length = jnp.where(norm > 0, jnp.log(norm), 0.0)
  norm = jnp.where(norm > 0, norm, 1.0)
  # Without the logarithm a factor between replicas would not be seen; weights
  # that are no signs keep those of two leaves from cancelling.
  bits = _mixed(~seeds[:, None] + jnp.arange(_VALUES, dtype=jnp.uint32))
  weights = 0.5 + bits.astype(jnp.float32) * 2.0**-32
  z = sums[:, :-1] / norm[:, None] + weights * length[:, None]
  z = jnp.pad(z / tolerance[:, None], ((0, -len(leaves) % _GROUP), (0, 0)))
  return jnp.sum(z.reshape(-1, _GROUP, _VALUES), axis=1).ravel()


@jax.jit  # traced once for all leaves of a shape
def _sums(x: jax.Array, seed: jax.Array) -> jax.Array:
  """Sums with random signs and, last, of squares; float32 [_VALUES + 1].

  One pass over a leaf, and one kernel to compile. The bits of an entry follow
  from its place: the compiler makes them where they are used, so they take no
  memory, and sharded arrays need not be flattened.
  """
  x = x.astype(jnp.float32)
  place, stride = jnp.zeros(x.shape, jnp.uint32), 1
  for axis in reversed(range(x.ndim)):
    own = jax.lax.broadcasted_iota(jnp.uint32, x.shape, axis)
    place += own * np.uint32(stride % 2**32)
    stride *= x.shape[axis]
  bits = _mixed(place * np.uint32(0xCC9E2D51) + seed)
  row = jnp.arange(_VALUES + 1, dtype=jnp.uint32).reshape(-1, *[1] * x.ndim)
  signed = jnp.where((bits >> row) & 1 > 0, x, -x)
  terms = jnp.where(row < _VALUES, signed, x * x)
  return jnp.sum(terms, axis=tuple(range(1, terms.ndim)))


def _mixed(h: jax.Array) -> jax.Array:
  """uint32 to 32 random bits, the same on every platform.

  The last steps of Austin Appleby's MurmurHash3.
  """
  h = (h ^ (h >> 16)) * np.uint32(0x85EBCA6B)
  h = (h ^ (h >> 13)) * np.uint32(0xC2B2AE35)
  return h ^ (h >> 16)
