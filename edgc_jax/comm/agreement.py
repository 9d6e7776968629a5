"""What replicas, and stages, have to agree on in a step."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from edgc_jax.comm import collectives

# Steps in which the gradients of the replicas are compared.
CHECKED_STEPS = 3
CHECK_BYTES = 12  # of one such comparison, over the replicas
STAGE_CHECK_BYTES = 12  # of every step, over stages: see `agree`


def is_still_open(
  gradients: Sequence[jax.Array], identical_steps: jax.Array, axis_name: str
) -> jax.Array:
  """Whether replicas' gradients are still to be compared; bool [].

  They are until they differed once (in the first step, as a rule) or were equal
  in `CHECKED_STEPS` steps.
  """
  is_settled = (identical_steps < 0) | (identical_steps >= CHECKED_STEPS)
  there_are_some = gradients and collectives.num_devices(axis_name) > 1
  return ~is_settled & bool(there_are_some)


def compare_replicas(
  gradients: Sequence[jax.Array], is_compared: jax.Array, axis_name: str
) -> jax.Array:
  """Whether gradients are equal on all replicas, by a checksum.

  Under `pmap` this is the only sign that somebody averaged them before.

  Args:
    gradients: The leaves, as they come into `update`.
    is_compared: bool [], equal on all replicas. `CHECK_BYTES` on the wire.
    axis_name: The bound axis of the replicas.

  Returns:
    int32 []: 1 if they are, -1 if not, 0 where that is not asked, or would
    tell nothing: they are all zero, or not finite.
  """
  if not gradients or collectives.num_devices(axis_name) == 1:
    return jnp.zeros((), jnp.int32)

  def compare() -> jax.Array:
    checksum = sum(jnp.sum(g.astype(jnp.float32)) for g in gradients)
    return collectives.compare(checksum, axis_name)

  verdict = jax.eval_shape(compare)
  return jax.lax.cond(
    is_compared, compare, lambda: collectives.zeros_like_type(verdict)
  )


def all_finite(tree: Any) -> jax.Array:
  """Whether every entry of every leaf is finite; bool []."""
  flags = [jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(tree)]
  return jnp.all(jnp.stack(flags)) if flags else jnp.array(True)


def agree(
  is_finite: jax.Array,
  verdict: jax.Array,
  parted: jax.Array,
  stage_axis: str | None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Whether all stages' steps are finite, the least of their verdicts, and
  whether the replicas of any have parted.

  One collective of `STAGE_CHECK_BYTES`, in every step: one in a branch might
  mix with others over the stages (`ordering.in_turn`).
  """
  if stage_axis is None:
    return is_finite, verdict, parted
  seen = jnp.stack([is_finite.astype(jnp.int32), verdict, -parted])
  finite, verdict, together = collectives.least(seen, stage_axis)
  return finite > 0, verdict, -together


def stage_check_bytes(stage_axis: str | None) -> int:
  """What `agree` sends in a step."""
  if stage_axis is None or collectives.num_devices(stage_axis) == 1:
    return 0
  return STAGE_CHECK_BYTES


def count_identical(
  identical_steps: jax.Array, verdict: jax.Array
) -> jax.Array:
  """Counts the first steps with equal gradients on all replicas.

  Args:
    identical_steps: int32 [], the count so far, -1 once they differed.
    verdict: int32 [], from `compare_replicas`, the same on all stages.

  Returns:
    int32 [], the new count.
  """
  step = jnp.where(verdict > 0, identical_steps + 1, -1)
  return jnp.where(verdict == 0, identical_steps, step)
