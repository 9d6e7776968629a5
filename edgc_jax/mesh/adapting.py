"""Adapts a running state: after replicas have diverged, or to another batch."""

from typing import Any

import jax

from edgc_jax.budget.entropy_budget import EntropyState, restarted
from edgc_jax.state.state import PerReplica, ReducerState, is_per_replica
from edgc_jax.wire import collectives
from edgc_jax.wire.order import AxisName


def follow_first_replica(tree: Any, axis_name: AxisName = "data") -> Any:
  """Copies the first replica's parameters and state to all replicas.

  This repairs replicas that have diverged (`metrics` counts them as
  `diverged_steps`). Residuals, accumulated gradients and what `local_steps`
  keeps of each replica are local, and stay: they will still be sent. Call it
  where the axis is bound, on parameters and optimiser state together:

    params, opt_state = follow_first_replica((params, opt_state), "data")

  On pipeline stages every stage copies its own first replica.

  Wire: an all-reduce for each array outside of a reducer's state, and one for
  that state; for parameters and Adam's moments three times the bytes of a dense
  gradient.

  Args:
    tree: Parameters, optimiser state, or both.
    axis_name: The bound axis of the replicas.

  Returns:
    The same tree, equal on all replicas except for the local arrays.

  >>> x = jax.numpy.arange(3.0)
  >>> jax.vmap(follow_first_replica, axis_name="data")(x).tolist()
  [0.0, 0.0, 0.0]
  """
  kinds = (ReducerState, PerReplica)

  def follow(part: Any) -> Any:
    if is_per_replica(part):
      return part
    if not isinstance(part, ReducerState):
      return collectives.from_first(part, axis_name)
    parts, structure = jax.tree.flatten(part, is_leaf=is_per_replica)
    # None keeps what is local out of the copy.
    common = collectives.from_first(
      [None if is_per_replica(x) else x for x in parts], axis_name
    )
    pairs = zip(parts, common, strict=True)
    kept = [own if is_per_replica(own) else x for own, x in pairs]
    return jax.tree.unflatten(structure, kept)

  return jax.tree.map(follow, tree, is_leaf=lambda x: isinstance(x, kinds))


def restart_reference(opt_state: Any) -> Any:
  """Prepares `edgc` for another batch size or another scale of the loss.

  Gradients of half as many sequences have 0.1 to 0.3 nats more entropy, and
  gradients of half the scale 0.69 nats less, which is more than the whole rank
  ladder spans. Call it between the last step before the change and the first
  step after it. H_ref then moves once: by the entropy of the next whole window,
  less the entropy of the last window before the change. The samples of the
  running window are dropped.

  Residuals keep the scale of past gradients, and are sent in the next steps.

  Args:
    opt_state: Any optimiser state, with or without reducers of this package,
      under pmap, global, or on the host.

  Returns:
    The same state, with the change marked in each `edgc`.
  """

  def mark(state: Any) -> Any:
    if isinstance(getattr(state, "budget", None), EntropyState):
      return state._replace(budget=restarted(state.budget))
    return state

  return jax.tree.map(
    mark, opt_state, is_leaf=lambda x: isinstance(x, ReducerState)
  )
