"""On pipeline stages: the gradients that travel after a stage's own.

They depend on what stage 0 does last. Were they computed before the first
exchange, every stage would wait for stage 0 before it may send anything.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from edgc_jax import validation
from edgc_jax.comm import collectives, cpu_backend, dataflow
from edgc_jax.comm.dataflow import is_varying
from edgc_jax.plan.leaves import Leaf, require_local
from edgc_jax.plan.plan import Plan

# From a function `after` to a tree like the updates: see `edgc`.
LateUpdates = Callable[[Callable[[Any], Any]], optax.Updates]


def rest_of(
  updates: optax.Updates,
  late_updates: LateUpdates | None,
  first_is_finite: jax.Array,
  plan: Plan,
  axis_name: str,
  stage_axis: str | None,
) -> list[jax.Array]:
  """The gradients of what is not a stage's own, after the first exchange.

  JAX has summed the gradient of a shared leaf over the stages already where
  its type says that it is equal on all of them.

  Args:
    updates: The gradients as they came into `update`.
    late_updates: What completes them, None if they are complete.
    first_is_finite: bool [], from the first exchange; what is returned waits
      for it.
    plan: All leaves.
    axis_name: The bound axis of the replicas.
    stage_axis: That of the stages, None if there are none.

  Returns:
    All leaves in order; the stage's own as they were.

  Raises:
    ValueError: if late updates are not local, have another form, or change
      what has been sent.
  """

  def after(tree: Any) -> Any:
    return dataflow.after(tree, first_is_finite)

  if late_updates is not None:
    updates = _checked(late_updates(after), updates, plan)
    require_local(jax.tree.leaves(updates), plan.leaves, axis_name)
  gradients = jax.tree.leaves(updates)
  for i, leaf in enumerate(plan.leaves):
    is_summed = leaf.placement == "shared" and not (
      stage_axis and is_varying(gradients[i], stage_axis)
    )
    if leaf.placement == "own":
      continue
    gradients[i] = after(gradients[i])
    if leaf.placement == "shared" and not is_summed:
      total = collectives.total(gradients[i].astype(jnp.float32), stage_axis)
      gradients[i] = total.astype(leaf.dtype)
  return gradients


def _checked(
  late: optax.Updates, updates: optax.Updates, plan: Plan
) -> optax.Updates:
  """Late updates, if they fit those that came first.

  What is a stage's own has been sent by then, so it must be as it was.
  """
  forms = [
    jax.tree.map(lambda x: (jnp.shape(x), jnp.result_type(x)), tree)
    for tree in (late, updates)
  ]
  if forms[0] != forms[1]:
    raise ValueError(
      "`late_updates` must return a tree like `updates`, got"
      f" {forms[0]} for {forms[1]}; return all leaves, those of the stage's"
      " own layers unchanged."
    )
  pairs = zip(jax.tree.leaves(late), jax.tree.leaves(updates), strict=True)
  for leaf, (new, old) in zip(plan.leaves, pairs, strict=True):
    if leaf.placement == "own" and new is not old:
      raise ValueError(
        "`late_updates` must return a stage's own leaves unchanged, got another"
        f" value for {leaf.path}, which has been sent before; hand back the"
        " one in `updates`, or let `placement` say 'split' or 'shared'."
      )
  return late


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
  cpu_backend.require_no_cached_programs()
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


def clip_by_global_norm(
  max_norm: float, stage_axis: str
) -> optax.GradientTransformation:
  """`optax.clip_by_global_norm` for updates that differ by pipeline stage.

    u * min(1, max_norm / |u|),   |u|^2 summed over all leaves of all stages

  Leaves that vary over the axis, by their types, are summed over it; the
  others are the same on all stages and count once. 4 bytes on the wire.

  Args:
    max_norm: The largest norm that is left as it is.
    stage_axis: The axis of the stages, bound by `jax.shard_map`.

  Returns:
    A gradient transformation; put it after the reducer.

  Raises:
    ValueError: if `max_norm` is not positive.

  >>> tx = optax.chain(clip_by_global_norm(1.0, "stage"), optax.adam(1e-3))
  """
  validation.require(
    max_norm > 0, "max_norm", max_norm, "positive", "1.0 is usual"
  )

  def update_fn(
    updates: optax.Updates,
    state: optax.EmptyState,
    params: optax.Params | None = None,
  ) -> tuple[optax.Updates, optax.EmptyState]:
    del params
    is_single = collectives.num_devices(stage_axis, "stage_axis") == 1
    validation.require(
      is_single or collectives.tracks_varying(stage_axis),
      "stage_axis",
      stage_axis,
      "an axis of jax.shard_map with its default check_vma=True",
      "drop check_vma=False; types tell which leaves differ by stage",
    )
    squares = {True: jnp.zeros(()), False: jnp.zeros(())}
    for u in jax.tree.leaves(updates):
      varies = is_varying(u, stage_axis)
      squares[varies] += jnp.sum(jnp.square(u.astype(jnp.float32)))
    own = collectives.total(squares[True], stage_axis)
    norm = jnp.sqrt(own + squares[False])
    scale = jnp.minimum(1.0, max_norm / jnp.maximum(norm, max_norm * 1e-6))
    return jax.tree.map(lambda u: (u * scale).astype(u.dtype), updates), state

  return optax.GradientTransformation(optax.init_empty_state, update_fn)
