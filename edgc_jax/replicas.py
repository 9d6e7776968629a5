"""The state of one number of replicas as that of another.

What all replicas hold alike needs nothing. What each holds for itself is error
feedback, and of that the mean over replicas is what later updates are made
of: it stays.
"""

import math
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec

from edgc_jax import guards
from edgc_jax.controller_state import mark_rebase
from edgc_jax.reducer_state import ReducerState


def resize_replicas(
  opt_state: Any,
  specs: Any,
  old: int,
  new: int,
  axis_name: str = "data",
  *,
  stages: int | None = None,
) -> Any:
  """An optimiser state of `old` replicas, cut for `new` of them.

  Of every array [S old m, ...] that differs by replica the parts [m, ...] are
  copied where `new` is a multiple of `old`, averaged in groups where it
  divides it, and replaced by their mean otherwise. In each case

    mean over new replicas = mean over old replicas,

  so that a compressor which depends on the mean alone goes on as if nothing
  had happened. What set replicas apart is lost where they are averaged.

  Args:
    opt_state: Global arrays, as under `jax.shard_map`; fetched to the host.
    specs: Those of `state_specs`.
    old: Replicas of the state. Arrays do not tell: a wrong number gives a
      wrong state.
    new: Replicas it is for.
    axis_name: The mesh axis of the replicas.
    stages: Pipeline stages, the same before and after; needed where `specs`
      shard arrays over them, too.

  Returns:
    The state, with NumPy arrays where replicas differ.

  Raises:
    ValueError: if `old`, `new` or `stages` is below 1, `stages` is needed
      and not given, or an array cannot be of so many replicas.

  >>> parts = np.array([1.0, 3.0, 5.0, 7.0])
  >>> resize_replicas(parts, PartitionSpec("data"), 4, 2)
  array([2., 6.])
  """
  for name, value in (("old", old), ("new", new), ("stages", stages or 1)):
    guards.require_int(name, value, 1)

  def resized(x: Any, spec: PartitionSpec) -> Any:
    first = spec[0] if len(spec) else None
    axes = first if isinstance(first, tuple) else (first,)
    if axis_name not in axes or old == new:
      return x
    guards.require(
      len(axes) == 1 or stages is not None,
      "stages",
      stages,
      f"given for arrays over the axes {axes}",
      "pass the number of pipeline stages",
    )
    x = np.asarray(x)
    lead = (stages if len(axes) > 1 else 1, old)
    guards.require(
      len(x) % math.prod(lead) == 0,
      "old",
      old,
      f"the replicas of a state with an array of shape {x.shape}",
      "pass how many it was made on, and its stages",
    )
    parts = x.reshape(*lead, -1, *x.shape[1:])
    return _resized(parts, new).reshape(-1, *x.shape[1:])

  return jax.tree.map(resized, opt_state, specs)


def _resized(parts: np.ndarray, new: int) -> np.ndarray:
  """[S, old, ...] to [S, new, ...]."""
  stages, old, *shape = parts.shape
  if new % old == 0:
    return np.repeat(parts, new // old, axis=1)
  groups = new if old % new == 0 else 1
  parts = parts.reshape(stages, groups, old // groups, *shape)
  means = parts.mean(2, dtype=np.float64).astype(parts.dtype)
  return np.repeat(means, new // groups, axis=1)


def rebase_entropy(opt_state: Any) -> Any:
  """Tells `edgc` that from here on a replica's batch has another size.

  Gradients of half as many sequences have 0.1 to 0.3 nats more entropy, more
  than all ranks are worth. The first window without steps from before moves
  H_ref by its entropy less that of the last window before.

  Args:
    opt_state: Any optimiser state, with or without reducers of this package.

  Returns:
    The same, marked.
  """

  def mark(state: Any) -> Any:
    if isinstance(state, ReducerState) and state.controller:
      return state._replace(controller=mark_rebase(state.controller))
    return state

  return jax.tree.map(
    mark, opt_state, is_leaf=lambda x: isinstance(x, ReducerState)
  )
