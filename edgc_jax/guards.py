"""Checks that turn silent waste, wrong results and hangs into errors."""

import math
import warnings
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from edgc_jax import collectives, cpu_devices
from edgc_jax.matrices import Leaf
from edgc_jax.plan import Plan
from edgc_jax.varying import is_varying

# Steps in which the gradients of the replicas are compared.
CHECKED_STEPS = 3
CHECK_BYTES = 12  # of one such comparison, over the replicas
STAGE_CHECK_BYTES = 8  # of every step, over stages: see `agree`


def require(
  condition: bool, name: str, value: Any, rule: str, remedy: str
) -> None:
  """Raises a ValueError that names argument, value, rule and remedy."""
  if not condition:
    raise ValueError(f"`{name}` must be {rule}, got {value!r}; {remedy}.")


def require_one_of(name: str, value: Any, options: Sequence[str]) -> None:
  """Raises unless `value` is one of the options."""
  require(
    value in options, name, value, f"one of {options}", "pick one of them"
  )


def require_int(name: str, value: Any, least: int) -> None:
  """Raises unless `value` is a Python integer of at least `least`."""
  if isinstance(value, bool) or not isinstance(value, int):
    raise TypeError(
      f"`{name}` must be a Python integer, since it decides shapes, got"
      f" {value!r}; under optax.inject_hyperparams list it in `static_args`."
    )
  require(
    value >= least, name, value, f"at least {least}", f"use {least} or more"
  )


def require_several(name: str, values: Sequence[int], least: int) -> None:
  """Raises unless they are such that a line can be fitted through them."""
  for value in values:
    require_int(name, value, least)
  several = len({value // least for value in values}) > 1
  remedy = "add one, since a line through one point can have any slope"
  require(several, name, values, "at least two that differ", remedy)


def require_number(name: str, value: Any) -> None:
  """Raises unless `value` is a plain Python number."""
  if isinstance(value, bool) or not isinstance(value, int | float):
    raise TypeError(
      f"`{name}` must be a Python number, since it is compiled in, got"
      f" {value!r}; under optax.inject_hyperparams list it in `static_args`."
    )


def require_finite(name: str, value: Any, remedy: str) -> None:
  """Raises on what is not a number, negative, or not finite."""
  require_number(name, value)
  is_fine = math.isfinite(value) and value >= 0
  require(is_fine, name, value, "at least 0 and finite", remedy)


def require_local(
  gradients: Sequence[jax.Array], leaves: Sequence[Leaf], axis_name: str
) -> None:
  """Raises where JAX's types show gradients already summed over the axis.

  Args:
    gradients: The leaves, as they come into `update`.
    leaves: What is known about each.
    axis_name: The bound axis of the replicas.

  Raises:
    ValueError: if varying types are tracked and a leaf does not vary.
  """
  if collectives.num_devices(axis_name) == 1 or not gradients:
    return
  if not collectives.tracks_varying(axis_name):
    return
  summed = [
    leaf.path
    for gradient, leaf in zip(gradients, leaves, strict=True)
    if not is_varying(gradient, axis_name)
  ]
  if summed:
    raise ValueError(
      f"`updates` must be local gradients that vary over axis {axis_name!r},"
      f" got gradients equal on all replicas at {summed[0] or 'the root'}"
      f" ({len(summed)} of {len(leaves)} leaves): under shard_map, jax.grad"
      " with respect to replicated parameters sums them over the axis,"
      " uncompressed;"
      f" differentiate with respect to jax.lax.pcast(params, {axis_name!r},"
      ' to="varying") instead, and drop any pmean or psum of the gradients.'
    )


def require_stages(
  gradients: Sequence[jax.Array],
  leaves: Sequence[Leaf],
  params: Sequence[jax.Array] | None,
  stage_axis: str,
) -> None:
  """Raises where a placement and JAX's types disagree.

  Args:
    gradients: The leaves, as they come into `update`.
    leaves: What is known about each.
    params: The parameters, if `update` was given them.
    stage_axis: The bound axis of the stages.

  Raises:
    ValueError: if the axis is not bound, varying types are not tracked, a
      leaf that differs by stage has a gradient equal on all stages, or a
      shared one has parameters that differ.
    RuntimeError: if CPU devices may run programs from JAX's cache.
  """
  if collectives.num_devices(stage_axis, "stage_axis") == 1:
    return
  cpu_devices.require_no_cached_programs()
  if not collectives.tracks_varying(stage_axis):
    raise ValueError(
      f"`stage_axis` must be an axis of jax.shard_map with its default"
      f" check_vma=True, got {stage_axis!r} where JAX does not track what"
      " varies; drop check_vma=False, and jax.pmap."
    )
  for gradient, leaf in zip(gradients, leaves, strict=True):
    varies = is_varying(gradient, stage_axis)
    if leaf.placement != "shared" and not varies:
      raise ValueError(
        f"`placement` must be 'shared' for a leaf that is equal on all stages,"
        f" got {leaf.placement!r} for {leaf.path}, whose gradient does not"
        f" vary over {stage_axis!r}; return 'shared' for its path, or shard it"
        " over the stages."
      )
  for param, leaf in zip(params or (), leaves, strict=False):
    if leaf.placement == "shared" and is_varying(param, stage_axis):
      raise ValueError(
        "`placement` must be 'own' or 'split' for a leaf that differs by stage,"
        f" got 'shared' for {leaf.path}, which varies over {stage_axis!r};"
        " gradients of different layers would be summed."
      )


def warn_if_nothing_pays(plan: Plan) -> None:
  """Warns where a ladder of ranks compresses no leaf at all.

  Warns:
    RuntimeWarning: if every leaf travels dense at every rung.
  """
  ranks = [rank for rank in plan.ladder if rank]
  if ranks and plan.leaves and not plan.compressible:
    warnings.warn(
      f"No leaf saves `min_ratio` ({plan.min_ratio:g}) at rank {min(ranks)} or"
      " above, so all gradients travel dense. Lower the rank, or give a"
      " `matrix_view` that folds the leaves into larger matrices.",
      RuntimeWarning,
      stacklevel=4,
    )


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
  is_finite: jax.Array, verdict: jax.Array, stage_axis: str | None
) -> tuple[jax.Array, jax.Array]:
  """Whether all stages' steps are finite, and the least of their verdicts.

  One collective of `STAGE_CHECK_BYTES`, in every step: one in a branch might
  mix with others over the stages (`ordering.in_turn`).
  """
  if stage_axis is None:
    return is_finite, verdict
  seen = jnp.stack([is_finite.astype(jnp.int32), verdict])
  finite, verdict = collectives.least(seen, stage_axis)
  return finite > 0, verdict


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
