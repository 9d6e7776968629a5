"""Gradients on pipeline stages: the order, the checks, and the global norm.

A stage sends the gradients of its own layers as soon as its backward pass is
done. Leaves that are split over the stages, or shared by them, get their
gradients last, when stage 0 is done. `late_gradients` completes them after the
exchange of the stage's own leaves: before it, every stage would have to wait
for stage 0 before it could send anything.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from edgc_jax import validation
from edgc_jax.leaves.checks import require_local
from edgc_jax.leaves.leaf import Leaf
from edgc_jax.wire import collectives, cpu_backend, order
from edgc_jax.wire.order import (
  Axes,
  AxisName,
  is_varying,
  names,
  require_names,
)

# Returns a tree like the updates, given a function `after`: see `edgc`.
LateUpdates = Callable[[Callable[[Any], Any]], optax.Updates]


def late_gradients(
  updates: optax.Updates,
  late_updates: LateUpdates | None,
  first_is_finite: jax.Array,
  leaves: Sequence[Leaf],
  axes: Axes,
) -> list[jax.Array]:
  """Completes the gradients of split and shared leaves.

  They wait for the first exchange, the one of the stage's own leaves. Gradients
  of shared leaves are summed over the stages, 4 bytes a value, unless their
  type says that they are equal on all stages: then JAX has summed them.

  Args:
    updates: The gradients passed to `update`.
    late_updates: Computes the late ones; None if `updates` is complete.
    first_is_finite: bool [], from the first exchange; late gradients wait for
      it.
    leaves: All leaves.
    axes: The bound axes of replicas and stages.

  Returns:
    All leaves in order; the stage's own ones are unchanged.

  Raises:
    ValueError: if `late_updates` returns a tree of another form, gradients
      that are not local, or new values for the stage's own leaves.
  """

  def after(tree: Any) -> Any:
    return order.after(tree, first_is_finite)

  if late_updates is not None:
    updates = _checked(late_updates(after), updates, leaves)
    require_local(jax.tree.leaves(updates), leaves, axes.replicas)
  gradients = jax.tree.leaves(updates)
  for i, leaf in enumerate(leaves):
    if not leaf.is_late:
      continue
    stage = axes.stage if is_varying(gradients[i], names(axes.stage)) else None
    gradients[i] = after(gradients[i])
    if leaf.is_shared and stage:  # JAX has not summed it
      # sum over stages of the gradient, in float32
      total = collectives.total(gradients[i].astype(jnp.float32), stage)
      gradients[i] = total.astype(leaf.dtype)
  return gradients


def _checked(
  late: optax.Updates, updates: optax.Updates, leaves: Sequence[Leaf]
) -> optax.Updates:
  """Returns `late`, checked against `updates`.

  Raises:
    ValueError: if the trees differ in form, or in one of the stage's own
      leaves, which have been sent by then.
  """
  forms = [
    jax.tree.map(lambda x: (jnp.shape(x), jnp.result_type(x)), tree)
    for tree in (late, updates)
  ]
  if forms[0] != forms[1]:
    raise ValueError(
      "`late_updates` must return a tree like `updates`, got"
      f" {forms[0]} for {forms[1]}; return all leaves, and the leaves of the"
      " stage's own layers unchanged."
    )
  pairs = zip(jax.tree.leaves(late), jax.tree.leaves(updates), strict=True)
  for leaf, (new, old) in zip(leaves, pairs, strict=True):
    if not leaf.is_late and new is not old:
      raise ValueError(
        "`late_updates` must return a stage's own leaves unchanged, got another"
        f" value for {leaf.path}, which has already been sent; return the array"
        " of `updates`, or let `placement` return 'split' or 'shared' for it."
      )
  return late


def require_stages(
  gradients: Sequence[jax.Array],
  leaves: Sequence[Leaf],
  params: Sequence[jax.Array] | None,
  stage_axis: str | None,
) -> None:
  """Raises unless the placement of every leaf agrees with JAX's types.

  Args:
    gradients: The leaves passed to `update`.
    leaves: Their paths and placements.
    params: The parameter of each, if `update` was given them.
    stage_axis: The bound axis of the stages; None on shards.

  Raises:
    ValueError: if the axis is not bound, JAX does not track varying types, a
      leaf that is not shared has a gradient equal on all stages, or a shared
      leaf has parameters that vary over the stages.
    RuntimeError: if CPU devices may run programs from JAX's persistent cache.
  """
  if stage_axis and collectives.num_devices(stage_axis, "stage_axis") == 1:
    return
  cpu_backend.require_no_cached_programs()
  if stage_axis is None:
    return
  if not collectives.tracks_varying(stage_axis):
    raise ValueError(
      f"`stage_axis` must be an axis of jax.shard_map with its default"
      f" check_vma=True, got {stage_axis!r}, over which JAX does not track"
      " varying types; remove check_vma=False, and use jax.shard_map instead of"
      " jax.pmap."
    )
  for gradient, leaf in zip(gradients, leaves, strict=True):
    varies = is_varying(gradient, stage_axis)
    if not leaf.is_shared and not varies:
      raise ValueError(
        f"`placement` must be 'shared' for a leaf that is equal on all stages,"
        f" got {leaf.placement!r} for {leaf.path}, whose gradient does not"
        f" vary over {stage_axis!r}; return 'shared' for its path, or shard the"
        " leaf over the stages."
      )
  if params is None:
    return
  for param, leaf in zip(params, leaves, strict=True):
    if leaf.is_shared and is_varying(param, stage_axis):
      raise ValueError(
        "`placement` must be 'own' or 'split' for a leaf that differs by stage,"
        f" got 'shared' for {leaf.path}, which varies over {stage_axis!r};"
        " 'shared' would sum the gradients of different layers."
      )


def clip_by_global_norm(
  max_norm: float, stage_axis: AxisName
) -> optax.GradientTransformation:
  """Clips updates by their global norm over all pipeline stages or shards.

    u * min(1, max_norm / |u|),   |u|^2 summed over all leaves of all parts

  `optax.clip_by_global_norm` would use a different norm on each device. A leaf
  is summed over the axes that its type varies over; along the others it is
  equal, and counts once.

  Wire: 4 bytes for each combination of axes that some leaf varies over.

  Args:
    max_norm: Updates up to this norm stay as they are.
    stage_axis: The axis of the stages, or the axes that shard parameters, bound
      by `jax.shard_map`.

  Returns:
    A gradient transformation; place it after the reducer.

  Raises:
    TypeError: if `max_norm` is not a Python number.
    ValueError: if `max_norm` is not positive and finite; in `update`, if the
      axis is not bound or JAX does not track varying types.

  >>> tx = optax.chain(clip_by_global_norm(1.0, "stage"), optax.adam(1e-3))
  """
  validation.require_finite("max_norm", max_norm, "1.0 is usual")
  validation.require(
    max_norm > 0, "max_norm", max_norm, "positive", "1.0 is usual"
  )
  require_names("stage_axis", stage_axis)

  def update_fn(
    updates: optax.Updates,
    state: optax.OptState,
    params: optax.Params | None = None,
  ) -> tuple[optax.Updates, optax.OptState]:
    del params
    is_single = collectives.num_devices(stage_axis, "stage_axis") == 1
    is_tracked = all(map(collectives.tracks_varying, names(stage_axis)))
    validation.require(
      is_single or is_tracked,
      "stage_axis",
      stage_axis,
      "an axis of jax.shard_map with its default check_vma=True",
      "remove check_vma=False, since types show which leaves differ by stage",
    )
    # |u|^2 by the axes that leaves vary over
    squares: dict[tuple[str, ...], Any] = {}
    for u in jax.tree.leaves(updates):
      axes = tuple(axis for axis in names(stage_axis) if is_varying(u, axis))
      square = jnp.sum(jnp.square(u.astype(jnp.float32)))
      squares[axes] = squares.get(axes, 0.0) + square
    totals = [
      collectives.total(square, axes) if axes else square
      for axes, square in squares.items()
    ]
    norm = jnp.sqrt(sum(totals))
    # min(1, max_norm / |u|)
    scale = jnp.minimum(1.0, max_norm / jnp.maximum(norm, max_norm * 1e-6))

    def scaled(u: jax.Array) -> jax.Array:
      return (u.astype(jnp.float32) * scale).astype(u.dtype)

    return jax.tree.map(scaled, updates), state

  return optax.GradientTransformation(optax.init_empty_state, update_fn)
