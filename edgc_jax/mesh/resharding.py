"""Converts a state to parameters that are sharded otherwise."""

from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding

from edgc_jax import validation
from edgc_jax.budget.entropy_budget import EntropyState
from edgc_jax.leaves.leaf import (
  LeafState,
  arrays_of,
  is_leaf_state,
  without_variables,
)
from edgc_jax.mesh.sharding import bound_init, placed
from edgc_jax.state.growth import Growth
from edgc_jax.state.state import ReducerState, Stats, parts_of
from edgc_jax.wire import order
from edgc_jax.wire.order import AxisName


def resize_shards(
  tx: optax.GradientTransformation,
  params: Any,
  opt_state: Any,
  axis_name: AxisName = "data",
  *,
  mesh: Mesh,
  param_specs: Any,
) -> Any:
  """Converts an optimiser state to parameters that are sharded otherwise.

  As global arrays, parameters, moments and residuals do not depend on the
  shards, and stay as they are. Factors belong to the matrices of a shard and
  start anew: the first steps lose more, which error feedback makes up for.
  `edgc` keeps its rank, and takes means of its entropies over the old shards;
  since parts of another size have other entropies, call
  `restart_reference`, too.
  Matrices have equal ranks until the next window. It also gives
  the state to a reducer of another rank, on the same mesh or on another.

  For another number of replicas, too, call `resize_replicas` first, with the
  old specs.

  Args:
    tx: The transformation, for the new mesh.
    params: The parameters as global arrays, placed on the new mesh or not at
      all.
    opt_state: The state of the old mesh as global arrays. With several
      processes it must be on the host, as after `resize_replicas`.
    axis_name: As for `state_specs`.
    mesh: The new mesh.
    param_specs: As for `state_specs`, on the new mesh.

  Returns:
    The state, placed on the new mesh; of plain arrays, if they were variables
    of Flax NNX.

  Raises:
    ValueError: if the state is not of these parameters and as many replicas,
      or of pipeline stages.

  Warns:
    RuntimeWarning: if parts of a leaf are too small to be compressed any more,
      so that its residual is lost.
  """
  params = without_variables(arrays_of(params))
  opt_state = without_variables(opt_state)
  init, own, specs = bound_init(tx, params, mesh, axis_name, param_specs)
  shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), own)
  fresh = jax.jit(init)(jax.device_put(params, shardings))

  def convert(path: tuple, new: Any, old: Any) -> Any:
    if isinstance(new, ReducerState):
      return _reducer(jax.tree.map(np.asarray, old), new)
    _require_shape(old, new, path)
    return old if order.is_key(old) else np.asarray(old)

  state = jax.tree_util.tree_map_with_path(
    convert, fresh, opt_state, is_leaf=lambda x: isinstance(x, ReducerState)
  )
  return placed(state, mesh, specs)


def _reducer(old: ReducerState, new: ReducerState) -> ReducerState:
  """Returns the first state on the new mesh, with what the old one learnt.

  The allocation starts anew: ranks are equal until the next window, since its
  level is another one, or since its first ranks are equal.
  """
  validation.require(
    not (parts_of(old).stages or parts_of(new).stages),
    "opt_state",
    type(old).__name__,
    "without pipeline stages",
    "every number of stages has layers of its own; resume on the same number",
  )
  new = new._replace(leaves=_leaves(old, new), checks=old.checks)
  if not np.any(old.count):  # no step yet, so no rank in use
    return new
  return new._replace(
    count=old.count,
    budget=_budget(old, new) if old.budget and new.budget else new.budget,
    stats=_stats(old.stats, new.stats),
    growth=_growth(new.growth),
  )


def _budget(old: ReducerState, new: ReducerState) -> EntropyState:
  """Returns the old budget, with means over its shards on each new one."""

  def convert(x: np.ndarray, like: jax.Array) -> np.ndarray:
    parts = _shards_of(x, old)  # [F] or [F, K]
    if parts.ndim > 1:
      return _by_matrix(parts, old, new).astype(x.dtype).reshape(like.shape)
    return np.broadcast_to(_mean(parts), like.shape).astype(x.dtype)

  common = {"decision": None, "first_rank": None}  # equal on all shards
  own = [state.budget._replace(**common) for state in (old, new)]
  return jax.tree.map(convert, *own)._replace(
    decision=old.budget.decision, first_rank=old.budget.first_rank
  )


def _by_matrix(
  parts: np.ndarray, old: ReducerState, new: ReducerState
) -> np.ndarray:
  """Converts an array over matrices, [F, K] for F old shards, to new shards.

  If the shards divide a stack of matrices, each keeps its value. Otherwise
  every part of a matrix gets the mean over its old parts; a leaf that had no
  matrices gets the mean over all.
  """
  olds, news = (_matrices(state) for state in (old, new))
  starts = np.cumsum([0, *(num for _, num in olds.values())])
  values = {
    path: parts[:, start : start + num]
    for (path, (_, num)), start in zip(olds.items(), starts, strict=False)
  }
  converted = []
  for path, (shards, num) in news.items():
    value = values.get(path, parts.mean(keepdims=True))
    if value.size == shards * num and value.shape[1] != num:
      value = value.reshape(shards, num)  # [F k] matrices of one stack
    elif value.shape[1] == num:
      value = value.mean(axis=0)
    else:
      value = value.mean()
    converted.append(np.broadcast_to(value, (shards, num)))
  return np.concatenate(converted, axis=1)


def _matrices(state: ReducerState) -> dict[str, tuple[int, ...]]:
  """Returns the numbers of shards and of matrices of each leaf, by path.

  Of the leaves whose matrices the budget sees.
  """
  return {
    path: (1, *leaf.stats.entropy.shape)[-2:]
    for path, leaf in _by_path(state.leaves).items()
    if leaf.stats is not None and leaf.stats.entropy is not None
  }


def _stats(old: Stats, new: Stats) -> Stats:
  """Returns the old statistics; the ratio of bytes sent so far is kept.

  Bytes are counted for each shard, and add up.
  """
  shards = np.size(new.wire_bytes)
  dense_bytes = np.asarray(_host(new.dense_bytes))

  def convert(name: str, x: Any, like: Any) -> Any:
    if x is None or like is None or name == "diverging_windows":
      return like
    value = _mean(np.ravel(x))
    if name == "wire_bytes":
      value = np.sum(x) / shards
    elif name == "dense_bytes":
      value = dense_bytes
    elif name == "mean_wire_bytes":
      value = np.sum(x) / np.sum(old.dense_bytes) * dense_bytes
    return np.broadcast_to(value, like.shape).astype(x.dtype)

  return Stats(
    *[
      convert(name, x, like)
      for name, x, like in zip(Stats._fields, old, new, strict=True)
    ]
  )


def _growth(new: Growth | tuple[()]) -> Growth | tuple[()]:
  """Returns the state of shards whose residuals are not known."""
  if not isinstance(new, Growth):
    return new
  return new._replace(residual=jax.numpy.full_like(new.residual, -1.0))


def _leaves(old: ReducerState, new: ReducerState) -> Any:
  """Returns the new leaves with the old residuals, zeros where none was."""
  olds, news = _by_path(old.leaves), _by_path(new.leaves)
  lost = [
    path
    for path, leaf in olds.items()
    if leaf.residual is not None
    and (path not in news or news[path].residual is None)
    and np.any(leaf.residual)
  ]
  if lost:
    validation.warn(
      f"Residuals of {len(lost)} leaves, such as {min(lost)}, are lost: their"
      " parts on the new mesh are too small to be compressed. Their gradients"
      " are sent dense from now on; lower `min_ratio` to compress them."
    )

  def residual(path: tuple, leaf: LeafState) -> LeafState:
    before = olds.get(jax.tree_util.keystr(path), leaf).residual
    if leaf.residual is None or before is None:
      return leaf
    _require_shape(before, leaf.residual, path)
    return leaf._replace(residual=before)

  return jax.tree_util.tree_map_with_path(
    residual, new.leaves, is_leaf=is_leaf_state
  )


def _require_shape(old: Any, new: Any, path: tuple) -> None:
  """Raises unless an array has the same global shape on both meshes."""
  validation.require(
    np.shape(old) == np.shape(new),
    "opt_state",
    np.shape(old),
    f"of the global shape {np.shape(new)} at {jax.tree_util.keystr(path)}",
    "pass the global arrays of these parameters and of as many replicas, or"
    " convert them with edgc_jax.resize_replicas first",
  )


def _shards_of(x: np.ndarray, state: ReducerState) -> np.ndarray:
  """Returns an array of all shards, [F, ...], from [1, F, ...] or one's own."""
  return x[0] if parts_of(state).shards else x[None]


def _mean(values: np.ndarray) -> Any:
  """Returns the mean of floats, and the first of integers, which are equal."""
  return values.mean() if values.dtype.kind == "f" else values[0]


def _host(x: jax.Array) -> np.ndarray:
  """Returns the first element of an array whose elements are equal."""
  return np.ravel(x.addressable_shards[0].data)[0]


def _by_path(leaves: Any) -> dict[str, LeafState]:
  """Returns the states of leaves by their paths, in order."""
  found = jax.tree_util.tree_leaves_with_path(leaves, is_leaf=is_leaf_state)
  return {jax.tree_util.keystr(path): leaf for path, leaf in found}
