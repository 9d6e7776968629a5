"""Detects replicas that differ although they must not, and settles a step.

Gradients. Replicas whose gradients are equal in the first steps were averaged
before the reducer saw them, or read the same data. Under `pmap` a comparison of
checksums is the only sign of it.

Parameters. Replicas apply the same update at every step only as long as nothing
goes wrong: a flipped bit, initial parameters of different seeds, a leaf that
nobody averages. Hosts that round differently do not have equal bits, so random
projections are compared. Of every leaf x with norm |x|

  z_v += (sum_j s_vj x_j / |x| + w_v ln |x|) / tolerance,    v = 1 ... 4

with random signs s and weights w of about one. If x differs by d between two
replicas, z_v differs by about |d| / |x| in units of the tolerance, for any d.
Replicas have parted if some z_v differ by more than 1. (Entries whose squares
are out of float32's range, below 1e-22 or above 1e19, count as zeros or as not
finite.)
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from edgc_jax.comm import collectives

# Steps in which the gradients of the replicas are compared.
CHECKED_STEPS = 3
CHECK_BYTES = 12  # of one such comparison, over the replicas
STAGE_CHECK_BYTES = 12  # of every step, over stages: see `agree`
CHECK_EVERY = 100  # steps from one comparison of parameters to the next
_GROUP = 32  # leaves that share z: the more, the coarser float32 is for it
_VALUES = 4  # projections; all are below a tenth of |d| once in 25,000 times
# Of a leaf's norm. Hosts that round differently stay within 1e-5 (measured);
# replicas that went their own way differ by this within some steps.
_TOLERANCE = 1e-3
# For parameters in narrow floats: roundings of these that replicas may differ
# by, since an update that is equal to 1e-6 is rounded up here and down there.
_ROUNDINGS = 8.0


class Check(NamedTuple):
  """Result of a comparison of the replicas, equal on all of them."""

  verdict: jax.Array  # int32 []
  wire_bytes: jax.Array  # float32 [], sent in this step


def compare_gradients(
  gradients: Sequence[jax.Array], identical_steps: jax.Array, axis_name: str
) -> Check:
  """Compares the replicas' gradients by a checksum, in the first steps.

  They are compared until they differed once (in the first step, as a rule) or
  were equal in `CHECKED_STEPS` steps. `CHECK_BYTES` on the wire.

  Args:
    gradients: The leaves, as they come into `update`.
    identical_steps: int32 [], the count so far, from `count_identical`.
    axis_name: The bound axis of the replicas.

  Returns:
    1 if they are equal, -1 if not, 0 if they are not compared, or all zero, or
    not finite.
  """
  if not gradients or collectives.num_devices(axis_name) == 1:
    return Check(jnp.zeros((), jnp.int32), jnp.zeros((), jnp.float32))
  is_settled = (identical_steps < 0) | (identical_steps >= CHECKED_STEPS)

  def compare() -> jax.Array:
    checksum = sum(jnp.sum(g.astype(jnp.float32)) for g in gradients)
    return collectives.compare(checksum, axis_name)

  verdict = _if_due(~is_settled, compare)
  return Check(verdict, jnp.where(~is_settled, float(CHECK_BYTES), 0.0))


def count_identical(
  identical_steps: jax.Array, verdict: jax.Array
) -> jax.Array:
  """Counts the first steps with equal gradients on all replicas.

  Args:
    identical_steps: int32 [], the count so far, -1 once they differed.
    verdict: int32 [], from `compare_gradients`, the same on all stages.

  Returns:
    int32 [], the new count.
  """
  step = jnp.where(verdict > 0, identical_steps + 1, -1)
  return jnp.where(verdict == 0, identical_steps, step)


def have_parted(
  tree: Any, is_due: jax.Array, count: jax.Array, axis_name: str
) -> Check:
  """Compares arrays that replicas must have in common.

  Args:
    tree: Arrays that are equal on all replicas, up to rounding.
    is_due: bool [], equal on all replicas.
    count: int32 [], steps done, which changes the signs.
    axis_name: The bound axis of the replicas.

  Returns:
    1 if replicas have parted, 0 if not, or if the check is not due. On the
    wire 40 bytes up to 32 leaves, when it is due.
  """
  is_float = lambda x: jnp.issubdtype(x.dtype, jnp.floating)  # noqa: E731
  leaves = [x for x in jax.tree.leaves(tree) if is_float(x)]
  if not leaves or collectives.num_devices(axis_name) == 1:
    return Check(jnp.zeros((), jnp.int32), jnp.zeros((), jnp.float32))

  def compare() -> jax.Array:
    z = _projections(leaves, count)
    # A number that is not finite on some replicas only has parted them, too.
    is_broken = ~jnp.isfinite(z)
    seen = jnp.append(jnp.where(is_broken, 0.0, z), jnp.any(is_broken) * 2.0)
    return (collectives.spread(seen, axis_name) > 1.0).astype(jnp.int32)

  num_bytes = 4 * 2 * (_VALUES * -(-len(leaves) // _GROUP) + 1)
  return Check(
    _if_due(is_due, compare), jnp.where(is_due, float(num_bytes), 0.0)
  )


def agree(
  is_finite: jax.Array,
  verdict: jax.Array,
  parted: jax.Array,
  stage_axis: str | None,
) -> tuple[jax.Array, jax.Array, jax.Array, int]:
  """Combines what the stages found in a step.

  One collective of `STAGE_CHECK_BYTES`, in every step: one in a branch might
  mix with others over the stages (`dataflow.in_turn`).

  Args:
    is_finite: bool [], whether the stage's step was finite.
    verdict: int32 [], from `compare_gradients`.
    parted: int32 [], from `have_parted`.
    stage_axis: The bound axis of the stages, None if there are none.

  Returns:
    Whether all stages are finite, the least verdict, whether the replicas of
    any stage have parted, and the bytes sent.
  """
  if stage_axis is None:
    return is_finite, verdict, parted, 0
  seen = jnp.stack([is_finite.astype(jnp.int32), verdict, -parted])
  finite, verdict, together = collectives.least(seen, stage_axis)
  is_alone = collectives.num_devices(stage_axis) == 1
  num_bytes = 0 if is_alone else STAGE_CHECK_BYTES
  return finite > 0, verdict, -together, num_bytes


def _if_due(is_due: jax.Array, compare: Callable[[], jax.Array]) -> jax.Array:
  """The verdict of a comparison, or 0 without sending anything."""
  verdict = jax.eval_shape(compare)
  return jax.lax.cond(
    is_due, compare, lambda: collectives.zeros_like_type(verdict)
  )


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
