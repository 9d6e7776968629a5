"""On pipeline stages: the gradients that travel after a stage's own.

They depend on what stage 0 does last. Were they computed before the first
exchange, every stage would wait for stage 0 before it may send anything.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from edgc_jax.comm import collectives, dataflow
from edgc_jax.comm.dataflow import is_varying
from edgc_jax.plan.leaves import require_local
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
