"""Checks that compare the replicas, and combine the findings of the stages.

Gradients must differ between replicas. If they are equal in each of the first
steps, they were averaged before the reducer saw them, or the replicas read the
same data. Under `pmap` only a comparison of checksums detects this.

Parameters must be equal on all replicas, since all apply the same update. They
diverge after a flipped bit, with initial parameters of different seeds, or if a
leaf is not averaged. Hosts that round differently do not have equal bits, so
random projections are compared. Every leaf x of norm |x| contributes

  z_v += (sum_j s_vj x_j / |x| + w_v ln |x|) / tolerance,    v = 1 ... 4

with random signs s and weights w of about one. If x differs by d between two
replicas, z_v differs by about |d| / |x| in units of the tolerance, for any d.
Replicas have diverged if some z_v differ by more than 1. (Entries whose squares
are out of float32's range, below 1e-22 or above 1e19, count as zeros or as not
finite.)
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from edgc_jax.wire import collectives
from edgc_jax.wire.channel import Channel
from edgc_jax.wire.order import axes_left, names, varying_axes

CHECKED_STEPS = 3  # first steps, in which gradients are compared
STAGE_CHECK_BYTES = 12  # sent by `agree` in every step, over the stages
CHECK_EVERY = 100  # steps from one comparison of parameters to the next
_GROUP = 32  # leaves that share one z; float32 is coarser for a larger sum
_SMALL = 2**16  # entries; each larger leaf is read in a kernel of its own
_VALUES = 4  # projections; all are below |d| / 10 once in 25,000 cases
# Relative to a leaf's norm. Hosts that round differently stay within 1e-5
# (measured); replicas that diverge differ by more than this within a few steps.
_TOLERANCE = 1e-3
# Parameters in narrow floats may differ by this many roundings: an update that
# is equal to 1e-6 may be rounded up on one replica and down on another.
_ROUNDINGS = 8.0


def compare_gradients(
  gradients: Sequence[jax.Array], identical_steps: jax.Array, channel: Channel
) -> jax.Array:
  """Compares the replicas' gradients by a checksum in the first steps.

  The comparisons end once the gradients differ (in the first step, as a rule)
  or have been equal in `CHECKED_STEPS` steps. Each sends 12 bytes.

  Args:
    gradients: The leaves passed to `update`, local.
    identical_steps: int32 [], the count so far, from `count_identical`.
    channel: To the other replicas.

  Returns:
    int32 [], equal on all replicas: 1 if the gradients are equal, -1 if they
    differ, and 0 if they are not compared, all zero, or not finite.
  """
  if not gradients or channel.num_devices == 1:
    return jnp.zeros((), jnp.int32)
  is_known = (identical_steps < 0) | (identical_steps >= CHECKED_STEPS)

  def compare() -> jax.Array:
    checksum = sum(map(jnp.sum, _few(gradients)), jnp.float32(0))
    return channel.compare(checksum)

  return channel.cond(~is_known, compare)


def count_identical(
  identical_steps: jax.Array, verdict: jax.Array
) -> jax.Array:
  """Counts the first steps in which all replicas had equal gradients.

  Args:
    identical_steps: int32 [], the count so far; -1 once gradients differed.
    verdict: int32 [], from `compare_gradients`, equal on all stages.

  Returns:
    int32 [], the new count.
  """
  step = jnp.where(verdict > 0, identical_steps + 1, -1)
  return jnp.where(verdict == 0, identical_steps, step)


def have_diverged(
  tree: Any, is_due: jax.Array, count: jax.Array, channel: Channel
) -> jax.Array:
  """Compares arrays that must be equal on all replicas, up to rounding.

  Sends 40 bytes for up to 32 leaves if the check is due.

  Args:
    tree: The arrays, usually the parameters.
    is_due: bool [], whether to compare now; equal on all replicas.
    count: int32 [], steps done; selects the random signs.
    channel: To the other replicas.

  Returns:
    int32 [], equal on all replicas: 1 if they have diverged, and 0 if they have
    not or if the check is not due.
  """
  is_float = lambda x: jnp.issubdtype(x.dtype, jnp.floating)  # noqa: E731
  leaves = [x for x in jax.tree.leaves(tree) if is_float(x)]
  if not leaves or channel.num_devices == 1:
    return jnp.zeros((), jnp.int32)

  def compare() -> jax.Array:
    z = _projections(leaves, count)
    # A number that is not finite on only some replicas is a divergence, too.
    is_broken = ~jnp.isfinite(z)
    seen = jnp.append(jnp.where(is_broken, 0.0, z), jnp.any(is_broken) * 2.0)
    return (channel.difference(seen) > 1.0).astype(jnp.int32)

  return channel.cond(is_due, compare)


def agree(
  is_finite: jax.Array,
  verdict: jax.Array,
  diverged: jax.Array,
  stage_axis: str | None,
  shards: tuple[str, ...] = (),
) -> tuple[jax.Array, jax.Array, jax.Array, int]:
  """Combines the checks of all pipeline stages and shards.

  Sends `STAGE_CHECK_BYTES` in one collective in every step: in a branch, it
  might mix with other collectives over the stages (`wire.channel`).

  Args:
    is_finite: bool [], whether the step of this stage was finite.
    verdict: int32 [], from `compare_gradients`.
    diverged: int32 [], from `have_diverged`.
    stage_axis: The bound axis of the stages; None if there are none.
    shards: The axes over which leaves are sharded.

  Returns:
    Whether the step was finite on all stages and shards, the least verdict,
    whether the replicas of any stage or shard have diverged, and the bytes sent
    over the stages.
  """
  axes = names(stage_axis) + shards
  if not axes:
    return is_finite, verdict, diverged, 0
  seen = jnp.stack([is_finite.astype(jnp.int32), verdict, -diverged])
  seen = collectives.as_varying(seen, axes)
  finite, verdict, together = collectives.least(seen, axes)
  is_alone = stage_axis is None or collectives.num_devices(stage_axis) == 1
  num_bytes = 0 if is_alone else STAGE_CHECK_BYTES
  return finite > 0, verdict, -together, num_bytes


def _projections(leaves: Sequence[jax.Array], count: jax.Array) -> jax.Array:
  """Returns z of every group of leaves; float32 [groups * _VALUES]."""
  seeds = jnp.arange(1, 1 + len(leaves), dtype=jnp.uint32)
  seeds = seeds * np.uint32(0x9E3779B1) + count.astype(jnp.uint32)
  sums = _all_sums(leaves, seeds)
  roundings = [_ROUNDINGS * float(jnp.finfo(x.dtype).eps) for x in leaves]
  tolerance = jnp.maximum(jnp.array(roundings, jnp.float32), _TOLERANCE)
  norm = jnp.sqrt(sums[:, -1])
  length = jnp.where(norm > 0, jnp.log(norm), 0.0)
  norm = jnp.where(norm > 0, norm, 1.0)
  # The logarithm detects leaves that differ by a factor. Its weights are not
  # signs, so that the terms of two leaves do not cancel.
  bits = _random_bits(~seeds[:, None] + jnp.arange(_VALUES, dtype=jnp.uint32))
  weights = 0.5 + bits.astype(jnp.float32) * 2.0**-32
  # z_v = (sum_j s_vj x_j / |x| + w_v ln |x|) / tolerance, summed by group.
  z = sums[:, :-1] / norm[:, None] + weights * length[:, None]
  z = jnp.pad(z / tolerance[:, None], ((0, -len(leaves) % _GROUP), (0, 0)))
  return jnp.sum(z.reshape(-1, _GROUP, _VALUES), axis=1).ravel()


def _all_sums(leaves: Sequence[jax.Array], seeds: jax.Array) -> jax.Array:
  """Sums all leaves, as `_sums`; float32 [leaves, _VALUES + 1].

  Small leaves of one shape are summed together, which compiles once.
  """
  kinds: dict[Any, list[int]] = {}
  for i, x in enumerate(leaves):
    is_small = x.size <= _SMALL and not axes_left()
    kind = (x.shape, x.dtype, varying_axes(x)) if is_small else i
    kinds.setdefault(kind, []).append(i)
  rows: dict[int, jax.Array] = {}
  for members in kinds.values():
    if len(members) == 1:
      rows[members[0]] = _sums(leaves[members[0]], seeds[members[0]])
      continue
    stack = jnp.stack([leaves[i] for i in members])
    own = jax.vmap(_sums)(stack, seeds[np.array(members)])
    rows |= {i: own[j] for j, i in enumerate(members)}
  return jnp.stack([rows[i] for i in range(len(leaves))])


def _few(arrays: Sequence[jax.Array]) -> list[jax.Array]:
  """Returns the same numbers in fewer float32 arrays: small ones are joined."""
  if axes_left():
    return [x.astype(jnp.float32) for x in arrays]
  flat = [x.astype(jnp.float32).ravel() for x in arrays if x.size <= _SMALL]
  large = [x.astype(jnp.float32) for x in arrays if x.size > _SMALL]
  kinds: dict[Any, list[jax.Array]] = {}
  for x in flat:
    kinds.setdefault(varying_axes(x), []).append(x)
  return [*large, *[jnp.concatenate(own) for own in kinds.values()]]


@jax.jit  # traced once for all leaves of a shape
def _sums(x: jax.Array, seed: jax.Array) -> jax.Array:
  """Sums a leaf with random signs, and its squares; float32 [_VALUES + 1].

  Reads the leaf once, in one kernel. The signs of an entry are a hash of its
  index: the compiler fuses them into the sums, so they take no memory, and
  sharded arrays need not be flattened.
  """
  x = x.astype(jnp.float32)
  index, stride = jnp.zeros(x.shape, jnp.uint32), 1
  for axis in reversed(range(x.ndim)):
    along_axis = jax.lax.broadcasted_iota(jnp.uint32, x.shape, axis)
    index += along_axis * np.uint32(stride % 2**32)
    stride *= x.shape[axis]
  bits = _random_bits(index * np.uint32(0xCC9E2D51) + seed)
  row = jnp.arange(_VALUES + 1, dtype=jnp.uint32).reshape(-1, *[1] * x.ndim)
  signed = jnp.where((bits >> row) & 1 > 0, x, -x)
  terms = jnp.where(row < _VALUES, signed, x * x)
  return jnp.sum(terms, axis=tuple(range(1, terms.ndim)))


def _random_bits(h: jax.Array) -> jax.Array:
  """Hashes uint32 to 32 random bits, the same on every platform.

  The finalizer of Austin Appleby's MurmurHash3.
  """
  h = (h ^ (h >> 16)) * np.uint32(0x85EBCA6B)
  h = (h ^ (h >> 13)) * np.uint32(0xC2B2AE35)
  return h ^ (h >> 16)
