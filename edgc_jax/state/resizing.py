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

from edgc_jax import validation
from edgc_jax.adaptation.controller import mark_rebase, rescaled
from edgc_jax.comm import collectives
from edgc_jax.state.base import AccumulateState, ReducerState
from edgc_jax.state.metrics import find


def resize_replicas(
  opt_state: Any,
  specs: Any,
  old: int,
  new: int,
  axis_name: str | tuple[str, ...] = "data",
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
    opt_state: Global arrays, as under `jax.shard_map`, or those of `jax.pmap`,
      all with a first axis of replicas; fetched to the host.
    specs: Those of `state_specs`.
    old: Replicas of the state. Arrays do not tell: a wrong number gives a
      wrong state.
    new: Replicas it is for.
    axis_name: The mesh axis of the replicas, or a tuple of axes.
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
    validation.require_int(name, value, 1)

  names = {axis_name} if isinstance(axis_name, str) else set(axis_name)
  reducers = find(opt_state, ReducerState)
  is_stacked = any(np.ndim(reducer.count) for reducer in reducers)

  def resized(x: Any, spec: PartitionSpec) -> Any:
    first = spec[0] if len(spec) else None
    axes = first if isinstance(first, tuple) else (first,)
    if old == new:
      return x
    if not names & set(axes):
      return _restacked(x, old, new) if is_stacked else x
    others = set(axes) - names
    validation.require(
      not others or stages is not None,
      "stages",
      stages,
      f"given for arrays over the axes {axes}",
      "pass the number of pipeline stages",
    )
    x = np.asarray(x)
    lead = (stages if others else 1, old)
    validation.require(
      len(x) % math.prod(lead) == 0,
      "old",
      old,
      f"the replicas of a state with an array of shape {x.shape}",
      "pass how many it was made on, and its stages",
    )
    parts = x.reshape(*lead, -1, *x.shape[1:])
    return _resized(parts, new).reshape(-1, *x.shape[1:])

  return jax.tree.map(resized, opt_state, specs)


def _restacked(x: Any, old: int, new: int) -> np.ndarray:
  """What pmap's replicas hold alike, [old, ...], for another number of them."""
  x = np.asarray(x)
  validation.require(
    x.shape[:1] == (old,),
    "old",
    old,
    f"the replicas of a pmapped state with an array of shape {x.shape}",
    "pass how many it was made on",
  )
  return np.repeat(x[:1], new, axis=0)


def follow_first_replica(tree: Any, axis_name: str = "data") -> Any:
  """Replaces what replicas should hold alike by the first replica's.

  The way back for replicas that have parted (`metrics` counts them as
  `parted_steps`). Error feedback and accumulated gradients, which are each
  replica's own, stay: what is owed stays owed. Call it where the axis is bound,
  on parameters and optimiser state together:

    params, opt_state = follow_first_replica((params, opt_state), "data")

  On pipeline stages every stage follows its own first replica.

  Args:
    tree: Parameters, optimiser state, or both.
    axis_name: The bound axis of the replicas.

  Returns:
    The same tree. On the wire an all-reduce of all of it: of parameters and
    Adam's moments three times the bytes of a dense gradient.

  >>> tree = jax.vmap(follow_first_replica, axis_name="data")(np.arange(3.0))
  >>> tree.tolist()
  [0.0, 0.0, 0.0]
  """
  kinds = (ReducerState, AccumulateState)

  def follow(part: Any) -> Any:
    if isinstance(part, ReducerState):
      # None stands for what is a replica's own.
      common = part._replace(exchange=part.exchange._replace(residual=None))
      common = collectives.from_first(common, axis_name)
      exchange = common.exchange._replace(residual=part.exchange.residual)
      return common._replace(exchange=exchange)
    if isinstance(part, AccumulateState):
      return part._replace(
        mini_step=collectives.from_first(part.mini_step, axis_name),
        inner_state=follow_first_replica(part.inner_state, axis_name),
      )
    return collectives.from_first(part, axis_name)

  return jax.tree.map(follow, tree, is_leaf=lambda x: isinstance(x, kinds))


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


def rescale_gradients(opt_state: Any, factor: float) -> Any:
  """Tells reducers that from here on gradients come `factor` times as large.

  Reducers keep gradients: error feedback, and `edgc` the entropy at its
  reference. A loss with another weight, or another loss scale that is undone
  only after the reducer, changes new gradients but not those kept: what is owed
  then comes back at the wrong size, and the rank follows a change of scale as
  if it were one of entropy (half the scale is 0.69 nats, more than all ranks
  are worth). Best is to undo a loss scale before the reducer; where a change is
  known, this carries the state over it.

  Args:
    opt_state: Any optimiser state, with or without reducers of this package,
      under pmap, global, or on the host. What an optimiser such as Adam keeps
      stays as it is.
    factor: New scale over old, positive.

  Returns:
    The same, rescaled.

  Raises:
    ValueError: if `factor` is not positive and finite.
  """
  validation.require_finite("factor", factor, "give new scale over old")
  validation.require(
    factor > 0, "factor", factor, "positive", "1 changes nothing"
  )

  def rescale(part: Any) -> Any:
    scaled = lambda tree: jax.tree.map(lambda x: x * factor, tree)  # noqa: E731
    if isinstance(part, AccumulateState):
      inner = rescale_gradients(part.inner_state, factor)
      return part._replace(
        accumulated=scaled(part.accumulated), inner_state=inner
      )
    if not isinstance(part, ReducerState):
      return part
    exchange = part.exchange
    exchange = exchange._replace(residual=scaled(exchange.residual))
    controller = part.controller
    if controller:
      controller = rescaled(controller, factor)
    return part._replace(exchange=exchange, controller=controller)

  return jax.tree.map(
    rescale,
    opt_state,
    is_leaf=lambda x: isinstance(x, ReducerState | AccumulateState),
  )
