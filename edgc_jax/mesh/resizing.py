"""Adapts a state to a change: of replicas, batch size, or loss scale.

Most of a reducer's state is equal on all replicas. The exceptions are
residuals, accumulated gradients and what `local_steps` keeps of each replica.
Later updates depend on their mean over replicas, so `resize_replicas` preserves
the mean.
"""

import math
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec

from edgc_jax import validation
from edgc_jax.budget.entropy_budget import EntropyState, restarted
from edgc_jax.leaves.leaf import is_leaf_state
from edgc_jax.mesh.sharding import axes_of
from edgc_jax.state.metrics import find
from edgc_jax.state.state import (
  PerReplica,
  ReducerState,
  map_leaves,
)
from edgc_jax.wire import collectives, order
from edgc_jax.wire.order import AxisName


def resize_replicas(
  opt_state: Any,
  specs: Any,
  old: int,
  new: int,
  axis_name: AxisName = "data",
  *,
  stages: int | None = None,
) -> Any:
  """Converts an optimiser state of `old` replicas to `new` replicas.

  An array [S old m, ...] that differs by replica has one part [m, ...] for each
  replica of each of S stages. If `new` is a multiple of `old`, parts are
  copied; if `new` divides `old`, parts are averaged in groups; otherwise all
  parts become their mean. In each case

    mean over new replicas = mean over old replicas,

  so a compressor that depends only on the mean continues as if nothing had
  happened. Averaging loses the differences between replicas.

  Args:
    opt_state: Global arrays, as under `jax.shard_map`, or arrays of `jax.pmap`,
      all with a first axis of replicas; fetched to the host.
    specs: PartitionSpecs of the state, from `state_specs`.
    old: Number of replicas of the state. It cannot be read from the arrays: a
      wrong number gives a wrong state.
    new: Number of replicas to convert to.
    axis_name: The mesh axis of the replicas, or a tuple of axes.
    stages: Number of pipeline stages, the same before and after; needed if
      `specs` shard arrays over stages, too.

  Returns:
    The state, with NumPy arrays where replicas differ.

  Raises:
    ValueError: if `old`, `new` or `stages` is below 1, `stages` is needed
      and not given, or the shape of an array does not fit `old`.

  >>> parts = np.array([1.0, 3.0, 5.0, 7.0])
  >>> resize_replicas(parts, PartitionSpec("data"), 4, 2)
  array([2., 6.])
  """
  num_stages = 1 if stages is None else stages
  for name, value in (("old", old), ("new", new), ("stages", num_stages)):
    validation.require_int(name, value, 1)

  names = {axis_name} if isinstance(axis_name, str) else set(axis_name)
  reducers = find(opt_state, ReducerState)
  named = axes_of(specs)
  has_own = bool(find(opt_state, PerReplica)) or any(
    leaf.residual is not None
    for reducer in reducers
    for leaf in jax.tree.leaves(reducer.leaves, is_leaf=is_leaf_state)
  )
  validation.require(
    bool(names & named) or not named or not has_own,
    "axis_name",
    axis_name,
    f"the axis of the replicas in `specs`, which name {sorted(named)}",
    "pass the axis_name of the reducer, or nothing would be converted",
  )
  is_stacked = any(np.ndim(reducer.count) for reducer in reducers)

  def resized(x: Any, spec: PartitionSpec) -> Any:
    if order.is_key(x):
      found = resized(jax.random.key_data(x), spec)
      return jax.random.wrap_key_data(found, impl=jax.random.key_impl(x))
    first = spec[0] if len(spec) else None
    axes = first if isinstance(first, tuple) else (first,)
    if old == new:
      return x
    if not names & set(axes):
      return _restacked(x, old, new) if is_stacked else x
    # Stages come before the replicas, and shards after them.
    start = min(i for i, axis in enumerate(axes) if axis in names)
    others = set(axes[:start])
    validation.require(
      not others or stages is not None,
      "stages",
      stages,
      f"given for arrays over the axes {axes}",
      "pass the number of pipeline stages",
    )
    x = np.asarray(x)
    parts_of = (num_stages if others else 1, old)
    validation.require(
      x.ndim > 0 and len(x) % math.prod(parts_of) == 0,
      "old",
      old,
      f"the number of replicas of a state with an array of shape {x.shape}",
      "pass the numbers of replicas and stages that it was made for",
    )
    # Not -1, which an array without entries does not tell.
    part = len(x) // math.prod(parts_of), *x.shape[1:]
    found = _resized(x.reshape(*parts_of, *part), new)
    return found.reshape(parts_of[0] * new * part[0], *part[1:])

  validation.require(
    jax.tree.structure(opt_state) == jax.tree.structure(specs),
    "specs",
    jax.tree.structure(specs),
    f"PartitionSpecs in a tree like the state, {jax.tree.structure(opt_state)}",
    "pass state_specs(tx, params) of the transformation that made the state",
  )
  return jax.tree.map(resized, opt_state, specs)


def _restacked(x: Any, old: int, new: int) -> np.ndarray:
  """Converts an array that is equal on all replicas of `pmap`, [old, ...].

  Returns:
    The first replica's part, repeated: [new, ...].

  Raises:
    ValueError: if the first axis is not `old`.
  """
  x = np.asarray(x)
  validation.require(
    x.shape[:1] == (old,),
    "old",
    old,
    f"the number of replicas of a pmap state, with an array of shape {x.shape}",
    "pass the number of replicas that it was made for",
  )
  return np.repeat(x[:1], new, axis=0)


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

  >>> tree = jax.vmap(follow_first_replica, axis_name="data")(np.arange(3.0))
  >>> tree.tolist()
  [0.0, 0.0, 0.0]
  """
  kinds = (ReducerState, PerReplica)

  def follow(part: Any) -> Any:
    if isinstance(part, ReducerState):
      # Residuals are local: None keeps them out of the copy.
      leaves = map_leaves(lambda x: x._replace(residual=None), part.leaves)
      common = collectives.from_first(part._replace(leaves=leaves), axis_name)
      leaves = jax.tree.map(
        lambda x, own: x._replace(residual=own.residual),
        common.leaves,
        part.leaves,
        is_leaf=is_leaf_state,
      )
      return common._replace(leaves=leaves)
    if isinstance(part, PerReplica):
      return part
    return collectives.from_first(part, axis_name)

  return jax.tree.map(follow, tree, is_leaf=lambda x: isinstance(x, kinds))


def _resized(parts: np.ndarray, new: int) -> np.ndarray:
  """Converts parts [S, old, ...] to [S, new, ...] with the same mean.

  Means of integers are rounded.
  """
  stages, old, *shape = parts.shape
  if new % old == 0:
    return np.repeat(parts, new // old, axis=1)
  groups = new if old % new == 0 else 1
  parts = parts.reshape(stages, groups, old // groups, *shape)
  means = parts.mean(2, dtype=np.float64)
  if np.issubdtype(parts.dtype, np.integer):
    means = np.rint(means)
  return np.repeat(means.astype(parts.dtype), new // groups, axis=1)


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
