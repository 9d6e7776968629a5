"""Converts a state to parameters that are sharded otherwise."""

import warnings
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from edgc_jax import validation
from edgc_jax.adaptation.controller import ControllerState
from edgc_jax.comm.dataflow import AxisName
from edgc_jax.compression.base import ExchangeState
from edgc_jax.plan.leaves import arrays_of, without_variables
from edgc_jax.plan.plan import Plan
from edgc_jax.plan.review import Reviewed, plans_seen
from edgc_jax.state.base import ReducerState, lead_axes
from edgc_jax.state.sharding import spread_specs, state_specs
from edgc_jax.state.statistics import Stats


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
  since parts of another size have other entropies, call `rebase_entropy`, too.
  Matrices have equal ranks until the next window.

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
  specs = state_specs(tx, params, axis_name, mesh=mesh, param_specs=param_specs)
  own = (spread_specs(param_specs, params),)
  init = jax.shard_map(
    lambda p: tx.init(p), mesh=mesh, in_specs=own, out_specs=specs
  )
  placed = jax.tree.map(
    lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec)), params, *own
  )
  with plans_seen() as seen:
    fresh = jax.jit(init)(placed)

  def convert(path: tuple, new: Any, old: Any) -> Any:
    if isinstance(new, ReducerState):
      return _reducer(jax.tree.map(np.asarray, old), new, seen)
    _require_shape(old, new, path)
    return np.asarray(old)

  def place(x: Any, spec: PartitionSpec) -> jax.Array:
    if isinstance(x, jax.Array):  # new
      return x
    sharding = NamedSharding(mesh, spec)
    return jax.make_array_from_callback(
      x.shape, sharding, lambda index: x[index]
    )

  state = jax.tree_util.tree_map_with_path(
    convert, fresh, opt_state, is_leaf=lambda x: isinstance(x, ReducerState)
  )
  return jax.tree.map(place, state, specs)


def _reducer(
  old: ReducerState, new: ReducerState, seen: Sequence[Reviewed]
) -> ReducerState:
  """Returns the first state on the new mesh, with what the old one learnt."""
  leads = lead_axes(old), lead_axes(new)
  validation.require(
    1 not in leads,
    "opt_state",
    type(old).__name__,
    "without pipeline stages",
    "every number of stages has layers of its own; resume on the same number",
  )
  exchange = ExchangeState(
    new.exchange.factor_q,
    _residuals(old.exchange.residual, new.exchange.residual),
  )
  if not np.any(old.count):  # no step yet, so no rank in use
    return new._replace(exchange=exchange, checks=old.checks)
  plans = _plans_of(new, seen)
  plan = plans[0]
  (rank,) = set(np.ravel(old.stats.rank).tolist())  # one for all shards
  usable = np.array(plan.ladder[plan.first_rung :])  # others send nothing
  rung = plan.first_rung + int(np.argmin(np.abs(usable - rank)))
  controller, allocator = new.controller, new.allocator
  if controller:
    controller = _controller(old, new)._replace(
      rung=np.full(controller.rung.shape, rung, np.int32),
      lead_rung=np.full(controller.lead_rung.shape, rung, np.int32),
    )
  if allocator:
    ranks = np.broadcast_to(plan.uniform_ranks[rung], allocator.ranks.shape)
    allocator = allocator._replace(ranks=ranks)
  return new._replace(
    count=old.count,
    controller=controller,
    allocator=allocator,
    exchange=exchange,
    stats=_stats(
      old.stats, new.stats, sum(plan.dense_bytes for plan in plans)
    )._replace(rung=np.full(new.stats.rung.shape, rung, np.int32)),
    checks=old.checks,
  )


def _plans_of(
  state: ReducerState, seen: Sequence[Reviewed]
) -> tuple[Plan, ...]:
  """Returns the plans of the reducer whose state this is.

  Reducers with the same matrices and bytes, such as none, need not be told
  apart.
  """
  paths = set(_by_path(state.stats.matrices.rank))
  dense_bytes = np.asarray(state.stats.dense_bytes.addressable_shards[0].data)

  def fits(plans: tuple[Plan, ...]) -> bool:
    found = {leaf.path for plan in plans for leaf in plan.matrices}
    total = np.float32(sum(plan.dense_bytes for plan in plans))
    return found == paths and bool(np.all(dense_bytes == total))

  return next(each.plans for each in seen if fits(each.plans))


def _controller(old: ReducerState, new: ReducerState) -> ControllerState:
  """Returns the old controller, with means over its shards on each new one."""

  def convert(x: np.ndarray, like: jax.Array) -> np.ndarray:
    if x.ndim == old.count.ndim and like.ndim == new.count.ndim:
      return x  # lead_rung
    parts = _shards_of(x, old)  # [F] or [F, K]
    if parts.ndim > 1:
      return _by_matrix(parts, old, new).astype(x.dtype).reshape(like.shape)
    return np.broadcast_to(_mean(parts), like.shape).astype(x.dtype)

  return jax.tree.map(convert, old.controller, new.controller)


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


def _matrices(state: ReducerState) -> dict[str, tuple[int, int]]:
  """Returns the numbers of shards and of matrices of each leaf, by path."""
  leaves = _by_path(state.stats.matrices.entropy)
  return {path: (1, *leaf.shape)[-2:] for path, leaf in leaves.items()}


def _stats(old: Stats, new: Stats, dense_bytes: int) -> Stats:
  """Returns the old statistics; the ratio of bytes sent so far is kept.

  Bytes are counted for each shard, and add up. Statistics of matrices are zero
  until the next step.
  """
  shards = np.size(new.rank)

  def convert(name: str, x: Any, like: Any) -> Any:
    if x is None or name == "matrices":
      return like
    value = _mean(np.ravel(x))
    if name == "wire_bytes":
      value = np.sum(x) / shards
    elif name == "dense_bytes":
      value = np.float64(dense_bytes)
    elif name == "mean_wire_bytes":
      value = np.sum(x) / np.sum(old.dense_bytes) * dense_bytes
    return np.broadcast_to(value, like.shape).astype(x.dtype)

  return Stats(
    *[
      convert(name, x, like)
      for name, x, like in zip(Stats._fields, old, new, strict=True)
    ]
  )


def _residuals(old: Any, new: Any) -> Any:
  """Returns the old residuals, and zeros for leaves that had none."""
  kept = _by_path(old)
  lost = kept.keys() - _by_path(new).keys()
  if any(np.any(kept[path]) for path in lost):
    warnings.warn(
      f"Residuals of {len(lost)} leaves, such as {min(lost)}, are lost: their"
      " parts on the new mesh are too small to be compressed. Their gradients"
      " are sent dense from now on; lower `min_ratio` to compress them.",
      RuntimeWarning,
      stacklevel=5,
    )

  def residual(path: tuple, like: Any) -> Any:
    value = kept.get(jax.tree_util.keystr(path), like)
    _require_shape(value, like, path)
    return value

  return jax.tree_util.tree_map_with_path(residual, new)


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
  return x[0] if lead_axes(state) else x[None]


def _mean(values: np.ndarray) -> Any:
  """Returns the mean of floats, and the first of integers, which are equal."""
  return values.mean() if values.dtype.kind == "f" else values[0]


def _by_path(tree: Any) -> dict[str, Any]:
  """Returns the leaves of a tree by their paths, in its order."""
  leaves = jax.tree_util.tree_leaves_with_path(tree)
  return {jax.tree_util.keystr(path): leaf for path, leaf in leaves}
