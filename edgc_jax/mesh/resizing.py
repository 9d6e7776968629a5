"""Converts a state to other replicas, other shards, or another rank.

What is equal on all replicas stays as it is. What each replica has for itself
(`PerReplica`) keeps its mean, on which alone later updates depend.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from edgc_jax import validation
from edgc_jax.budget.entropy_budget import EntropyState
from edgc_jax.leaves.leaf import LeafState, is_leaf_state, without_variables
from edgc_jax.state.growth import Growth
from edgc_jax.state.metrics import find
from edgc_jax.state.state import (
  LocalStepsState,
  PerReplica,
  ReducerState,
  Stats,
  is_per_replica,
)
from edgc_jax.wire import order

Path = tuple[str, ...]


def resize(old: Any, like: Any) -> Any:
  """Converts an optimiser state to the form of another.

  To another number of replicas, other shards of the parameters, another rank,
  or any of these together:

    fresh = jax.jit(init)(params)  # on the new mesh, by the new transformation
    opt_state = edgc_jax.resize(opt_state, fresh)

  An array that differs by replica, [N, ...], gets one part for each of N' new
  replicas. If N' is a multiple of N, parts are copied; if N' divides N, parts
  are averaged in groups; otherwise all parts become their mean. In each case

    mean over new replicas = mean over old replicas,

  so a compressor that depends only on the mean continues as if nothing had
  happened. Averaging loses the differences between replicas.

  Parameters, moments and residuals do not depend on the shards. Factors belong
  to the matrices of a shard and to a rank, and start anew where either changes:
  the first steps lose more, which error feedback makes up for. `edgc` keeps its
  rank, takes means of its entropies over the old shards, and gives matrices
  equal ranks until the next window. Parts of another size, and batches of
  another size, have another entropy: call `restart_reference`, too.

  Args:
    old: The state, as global arrays or as under `jax.pmap`; with several
      processes on the host.
    like: The first state of the transformation as it is to continue, in the
      form in which `update` will take it. Types (`jax.eval_shape`) are enough
      if nothing starts anew.

  Returns:
    The state, a tree like `like`, placed as its arrays are; NumPy arrays where
    `like` has no arrays of JAX, and for a state of pmap. It may share arrays
    with `old` and `like`: a step that donates it deletes them.

  Raises:
    ValueError: if `old` lacks an array of the state, an array has another shape
      or dtype than the parameters need, or the number of stages differs.

  Warns:
    RuntimeWarning: if parts of a leaf are too small to be compressed any more,
      so that its residual is lost.

  >>> old, like = (PerReplica(np.arange(float(n))) for n in (4, 2))
  >>> resize(old, like).values
  array([0.5, 2.5])
  """
  structure, like = jax.tree.structure(like), without_variables(like)
  if _is_of_pmap(old):
    _require_one_run(old)
    old = _of_pmap(old)
  arrays = by_path(old)
  is_pmap = _is_of_pmap(like)
  one = jax.eval_shape(_of_pmap, like) if is_pmap else like
  _require_nothing_dropped(arrays, one)

  def fresh() -> Any:
    leaves = jax.tree.leaves(like)
    is_type = any(isinstance(x, jax.ShapeDtypeStruct) for x in leaves)
    return _of_pmap(like) if is_pmap and not is_type else one

  found = converted(arrays, one, fresh, "old")
  if not is_pmap:
    found = placed_as(found, like)
  else:
    count = next(iter(find(like, ReducerState))).count.shape[0]
    found = _on_each(
      found, lambda x: x[:, None], lambda x: _stacked([x] * count)
    )
  return jax.tree.unflatten(structure, jax.tree.leaves(found))


def by_path(tree: Any) -> dict[Path, Any]:
  """Returns the arrays of a state, or of what is stored of it, by path."""
  found = jax.tree_util.tree_leaves_with_path(without_variables(tree))
  return {_names(path): x for path, x in found}


def _below(arrays: Mapping[Path, Any], place: Path) -> dict[Path, Any]:
  """Returns the arrays below a place, by their paths from there."""
  size = len(place)
  return {p[size:]: x for p, x in arrays.items() if p[:size] == place}


def converted(
  arrays: Mapping[Path, Any], like: Any, fresh: Callable[[], Any], name: str
) -> Any:
  """Returns a tree like another, of the arrays of a state.

  Args:
    arrays: The arrays of the state, by path.
    like: The tree, or its types, of global arrays.
    fresh: Returns the first state, whose values are taken where something
      starts anew.
    name: The argument that has the arrays, for errors.
  """
  old = _Old(arrays, name, functools.cache(lambda: by_path(fresh())))

  def convert(path: tuple, part: Any) -> Any:
    place = _names(path)
    if isinstance(part, ReducerState):
      return _reducer(old, place, part)
    if isinstance(part, PerReplica):
      return old.of_replicas(place, part)
    return old.required(place, part)

  _require_nothing_in_flight(old, like)
  kinds = (ReducerState, PerReplica)
  return jax.tree_util.tree_map_with_path(
    convert, like, is_leaf=lambda x: isinstance(x, kinds)
  )


def placed_as(tree: Any, like: Any) -> Any:
  """Places arrays of the host as those of another tree, or its types, are."""

  def place(x: Any, own: Any) -> Any:
    where = getattr(own, "sharding", None)
    if order.is_key(x):
      data = place(np.asarray(jax.random.key_data(x)), own)
      return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
    if where is None or isinstance(x, jax.Array):
      return x
    if not getattr(own, "committed", True):  # a step may take it to any mesh
      return jnp.asarray(x)
    # `device_put` would have all processes compare a host's array.
    return jax.make_array_from_callback(
      np.shape(x), where, lambda index: np.asarray(x)[index]
    )

  return jax.tree.map(place, tree, like)


class _Old(NamedTuple):
  """The arrays of the state that is converted, as they are found by path."""

  arrays: Mapping[Path, Any]
  name: str
  starts: Callable[[], Mapping[Path, Any]]  # arrays of the first state

  def of(self, place: Path, like: Any) -> Any:
    """Returns a tree like another of the arrays at a place, or None for one."""
    return jax.tree_util.tree_map_with_path(
      lambda path, _: self.arrays.get(place + _names(path)), like
    )

  def fresh(self, place: Path, like: Any) -> Any:
    """Returns the part of the first state at a place."""

    def start(path: tuple, own: Any) -> Any:
      found = self.starts()[place + _names(path)]
      validation.require(
        not isinstance(found, jax.ShapeDtypeStruct),
        "like",
        own,
        f"a state with arrays, since {_shown(place)} starts anew",
        "pass jax.jit(init)(params), not its types",
      )
      return found

    return jax.tree_util.tree_map_with_path(start, like)

  def required(self, place: Path, like: Any, skip: int = 0) -> Any:
    """Returns the array at a place.

    Args:
      place: Its path.
      like: The array, or its type, whose place it takes.
      skip: Number of first axes whose lengths may differ.

    Raises:
      ValueError: if there is none, or it has another shape or dtype.
    """
    found: Any = self.arrays.get(place)
    validation.require(
      found is not None,
      self.name,
      _shown(place),
      f"one with all arrays of the state, of shape {np.shape(like)}",
      "pass the options of the run that made it, such as its method",
    )
    if order.is_key(like):
      impl = jax.random.key_impl(jnp.zeros_like(like))
      if not order.is_key(found):
        found = jax.random.wrap_key_data(jnp.asarray(found), impl=impl)
      validation.require(
        jax.random.key_impl(found) == impl,
        self.name,
        jax.random.key_impl(found),
        f"one with keys of {impl} at {_shown(place)}",
        "pass the options of the run that made it",
      )
    shape = tuple(jnp.shape(found))
    validation.require(
      shape[skip:] == tuple(jnp.shape(like))[skip:],
      self.name,
      shape,
      f"of the global shape {np.shape(like)} at {_shown(place)}",
      "pass the state of these parameters, on as many pipeline stages",
    )
    if order.is_key(found):
      return found
    wanted, got = jnp.result_type(like), jnp.result_type(found)
    validation.require(
      wanted == got,
      self.name,
      got,
      f"of the dtype {wanted} at {_shown(place)}",
      "pass the dtypes of the run that made it, and cast the result",
    )
    where = getattr(like, "sharding", None)
    stays = isinstance(found, jax.Array) and where in (None, found.sharding)
    return found if stays else np.asarray(found)

  def of_replicas(self, place: Path, like: PerReplica) -> PerReplica:
    """Returns arrays at a place for as many replicas as `like` has."""

    def resized(path: tuple, own: Any) -> Any:
      found = self.required(place + _names(path), own, skip=1)
      return _resized(found, own.shape[0])

    return jax.tree_util.tree_map_with_path(resized, like)


def _resized(parts: Any, new: int) -> Any:
  """Converts parts [N, ...] to [new, ...] with the same mean.

  Means of integers are rounded. Random keys have none: all get the first.
  """
  old = len(parts)
  if new == old:
    return parts
  if order.is_key(parts):
    return jnp.repeat(parts[:1], new, axis=0)
  parts = np.asarray(parts)
  if new % old == 0:
    return np.repeat(parts, new // old, axis=0)
  groups = new if old % new == 0 else 1
  means = parts.reshape(groups, old // groups, *parts.shape[1:])
  means = means.mean(1, dtype=np.float64)
  if np.issubdtype(parts.dtype, np.integer):
    means = np.rint(means)
  return np.repeat(means.astype(parts.dtype), new // groups, axis=0)


def _reducer(old: _Old, place: Path, new: ReducerState) -> ReducerState:
  """Converts the state of a reducer.

  If shards or the rank have changed, the allocation starts anew: ranks are
  equal until the next window, since its level is another one.
  """
  _require_present_form(old, place)
  _warn_of_lost(old, place, new)
  stats = old.of((*place, "stats"), new.stats)
  same_shards = np.shape(stats.wire_bytes) == np.shape(new.stats.wire_bytes)
  is_other = _facts(_below(old.arrays, place)) != _facts(by_path(new))
  validation.require(
    not (same_shards and is_other),
    old.name,
    _shown(place),
    "one of the same method, with all arrays of the state",
    "pass the options of the run that made it",
  )
  if _fits(old, place, new):
    return _whole(old, place, new)
  validation.require(
    not (np.ndim(stats.rank) or np.ndim(new.stats.rank)),
    old.name,
    _shown(place),
    "a state without pipeline stages, and not one of pmap",
    "resume on the same number of stages; load a checkpoint of pmap with orbax"
    " and convert it with edgc_jax.resize",
  )
  fresh = old.fresh(place, new)

  def with_residual(path: tuple, leaf: LeafState) -> LeafState:
    where = (*place, "leaves", *_names(path), "residual")
    if leaf.residual is None or (*where, "values") not in old.arrays:
      return leaf
    return leaf._replace(residual=old.of_replicas(where, leaf.residual))

  fresh = fresh._replace(
    leaves=jax.tree_util.tree_map_with_path(
      with_residual, fresh.leaves, is_leaf=is_leaf_state
    ),
    checks=_whole(old, (*place, "checks"), fresh.checks),
  )
  count = old.required((*place, "count"), fresh.count)
  if not np.any(count):  # no step yet, so no rank in use
    return fresh
  growth = fresh.growth
  if isinstance(growth, Growth):  # of residuals that are not known
    growth = growth._replace(residual=jnp.full_like(growth.residual, -1.0))
  return fresh._replace(
    count=count,
    budget=_budget(old, place, fresh),
    stats=_stats(stats, fresh.stats),
    growth=growth,
  )


def _whole(old: _Old, place: Path, new: Any) -> Any:
  """Returns a part of a state whose arrays all have their shapes."""

  def take(path: tuple, own: Any) -> Any:
    where = place + _names(path)
    is_local = is_per_replica(own)
    return (old.of_replicas if is_local else old.required)(where, own)

  return jax.tree_util.tree_map_with_path(take, new, is_leaf=is_per_replica)


def _fits(old: _Old, place: Path, new: ReducerState) -> bool:
  """Returns whether all arrays of a state, on any replicas, have their shapes.

  A leaf that has factors must have had some.
  """

  def fits(path: tuple, own: Any) -> bool:
    where = place + _names(path)
    if isinstance(own, PerReplica):
      found = old.arrays.get((*where, "values"))
      return found is not None and np.shape(found)[1:] == own.values.shape[1:]
    found = old.arrays.get(where)
    return found is not None and np.shape(found) == np.shape(own)

  return all(
    jax.tree.leaves(
      jax.tree_util.tree_map_with_path(fits, new, is_leaf=is_per_replica)
    )
  )


def _facts(arrays: Mapping[Path, Any]) -> list[bool]:
  """Returns what tells a method from others: which arrays its state has."""
  of_leaves = {name for path in _below(arrays, ("leaves",)) for name in path}
  return [
    *(name in of_leaves for name in ("factor_q", "residual")),
    *(("stats", x) in arrays for x in ("entropy", "relative_error")),
  ]


def _warn_of_lost(old: _Old, place: Path, new: ReducerState) -> None:
  """Warns if leaves have a residual now, and none any more."""
  kept = by_path(new.leaves)
  lost = [
    path[:-2]
    for path, x in _below(old.arrays, (*place, "leaves")).items()
    if path[-2:] == ("residual", "values") and path not in kept and np.any(x)
  ]
  if lost:
    validation.warn(
      f"Residuals of {len(lost)} leaves, such as {_shown(min(lost))}, are lost:"
      " their parts are too small to be compressed any more. Their gradients"
      " are sent dense from now on; lower `min_ratio` to compress them."
    )


def _budget(old: _Old, place: Path, new: ReducerState) -> Any:
  """Returns the old budget, with means over its shards on each new one."""
  where, fresh = (*place, "budget"), new.budget
  has_old = (*where, "num_windows") in old.arrays
  if not (has_old and isinstance(fresh, EntropyState)):
    return fresh
  budget = old.of(where, fresh)
  has_shards = np.ndim(budget.num_windows) > 0

  def convert(x: Any, like: Any) -> np.ndarray:
    parts = np.asarray(x)[0] if has_shards else np.asarray(x)[None]
    if parts.ndim > 1:  # [F, K]
      found = _by_matrix(parts, *_matrices(old, place, new))
      return found.astype(parts.dtype).reshape(like.shape)
    return np.broadcast_to(_mean(parts), like.shape).astype(parts.dtype)

  common = {"decision": None, "first_rank": None}  # equal on all shards
  own = [state._replace(**common) for state in (budget, fresh)]
  return jax.tree.map(convert, *own)._replace(
    decision=jax.tree.map(np.asarray, budget.decision),
    first_rank=np.asarray(budget.first_rank),
  )


Matrices = Mapping[Path, tuple]  # numbers of shards and of matrices


def _matrices(
  old: _Old, place: Path, new: ReducerState
) -> tuple[Matrices, Matrices]:
  """Returns the matrices that the budget sees, by leaf: old ones, new ones."""

  def of(arrays: Mapping[Path, Any]) -> dict[Path, tuple]:
    return {
      path[:-2]: (1, *np.shape(x))[-2:]
      for path, x in arrays.items()
      if path[-2:] == ("stats", "entropy")
    }

  olds = of(_below(old.arrays, (*place, "leaves")))
  news = of(by_path(new.leaves))
  # What is stored has no order.
  every = jax.tree_util.tree_leaves_with_path(new.leaves, is_leaf=is_leaf_state)
  in_order = [path for x, _ in every if (path := _names(x)) in olds]
  return {path: olds[path] for path in in_order}, news


def _by_matrix(parts: np.ndarray, olds: Matrices, news: Matrices) -> np.ndarray:
  """Converts an array over matrices, [F, K] for F old shards, to new shards.

  If the shards divide a stack of matrices, each keeps its value. Otherwise
  every part of a matrix gets the mean over its old parts; a leaf that had no
  matrices gets the mean over all.
  """
  starts = np.cumsum([0, *(num for _, num in olds.values())])
  values = {
    path: parts[:, start : start + num]
    for (path, (_, num)), start in zip(olds.items(), starts, strict=False)
  }
  found = []
  for path, (shards, num) in news.items():
    value = values.get(path, parts.mean(keepdims=True))
    if value.size == shards * num and value.shape[1] != num:
      value = value.reshape(shards, num)  # [F k] matrices of one stack
    elif value.shape[1] == num:
      value = value.mean(axis=0)
    else:
      value = value.mean()
    found.append(np.broadcast_to(value, (shards, num)))
  return np.concatenate(found, axis=1)


def _stats(old: Stats, new: Stats) -> Stats:
  """Returns the old statistics; the ratio of bytes sent so far is kept.

  Bytes are counted for each shard, and add up.
  """
  shards = np.size(new.wire_bytes)
  # Those of a mesh are equal on all shards, and may be other processes'.
  own = getattr(new.dense_bytes, "addressable_shards", None)
  dense_bytes = np.ravel(own[0].data if own else new.dense_bytes)[0]

  def convert(name: str, x: Any, like: Any) -> Any:
    if x is None or like is None or name == "diverging_windows":
      return like
    x = np.asarray(x)
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


def _mean(values: np.ndarray) -> Any:
  """Returns the mean of floats, and the first of integers, which are equal."""
  return values.mean() if values.dtype.kind == "f" else values[0]


def _require_present_form(old: _Old, place: Path) -> None:
  """Raises if residuals have no axis of replicas, as before version 7."""
  leaves = _below(old.arrays, (*place, "leaves"))
  validation.require(
    not any(path[-1] == "residual" for path in leaves),
    old.name,
    _shown(place),
    "a state whose residuals have a first axis of replicas, not one of an older"
    " version of edgc_jax",
    "finish that run with the version that began it",
  )


def _require_nothing_dropped(arrays: Mapping[Path, Any], like: Any) -> None:
  """Raises if a state has arrays that another one has no place for.

  Those inside of a reducer depend on its rank and on shards.
  """
  dropped = set(arrays) - set(by_path(like))
  reducers = jax.tree_util.tree_leaves_with_path(
    like, is_leaf=lambda x: isinstance(x, ReducerState)
  )
  for path, part in reducers:
    if isinstance(part, ReducerState):
      leaves = jax.tree_util.tree_leaves_with_path(
        part.leaves, is_leaf=is_leaf_state
      )
      places = [("leaves", *_names(own)) for own, _ in leaves]
      places += [(name,) for name in part._fields if name != "leaves"]
      for place in places:
        start = (*_names(path), *place)
        dropped -= {x for x in dropped if x[: len(start)] == start}
  validation.require(
    not dropped,
    "like",
    f"nothing at {_shown(min(dropped, default=()))}",
    f"a state with all arrays of `old` ({len(dropped)} have no place)",
    "pass the first state of the same chain and parameters",
  )


def _require_nothing_in_flight(old: _Old, like: Any) -> None:
  """Raises if local steps without an overlap would drop s_i.

  Or if the state is of before version 8, which does not say what is in flight.
  """

  def check(path: tuple, part: Any) -> None:
    if not isinstance(part, LocalStepsState):
      return
    place = _names(path)
    validation.require(
      (*place, "in_flight") in old.arrays or not _below(old.arrays, place),
      old.name,
      _shown(place),
      "a state of local steps that says whether an exchange is in flight, not"
      " one of an older version of edgc_jax",
      "finish that run with the version that began it",
    )
    if not jax.tree.leaves(part.sent):
      validation.require(
        not _below(old.arrays, (*place, "sent")),
        old.name,
        "one of local steps with an overlap",
        "the state of overlap=0, as the transformation has",
        "pass the overlap of the run that made it",
      )

  jax.tree_util.tree_map_with_path(
    check, like, is_leaf=lambda x: isinstance(x, LocalStepsState)
  )


def _is_of_pmap(state: Any) -> bool:
  """Returns whether all arrays of a state have a first axis of replicas."""
  return any(np.ndim(x.count) > 0 for x in find(state, ReducerState))


def _of_pmap(state: Any) -> Any:
  """Returns the global arrays of a state of `jax.pmap`."""
  return _on_each(state, lambda x: x[:, 0], lambda x: x[0])


def _require_one_run(old: Any) -> None:
  """Raises unless what replicas of `jax.pmap` have in common is equal."""

  def check(x: Any) -> None:
    if order.is_key(x):
      return
    parts = np.asarray(x)
    validation.require(
      parts.tobytes() == np.repeat(parts[:1], len(parts), 0).tobytes(),
      "old",
      parts.shape,
      "a state of pmap whose common arrays are equal on all replicas",
      "copy the first replica's with follow_first_replica; states of several"
      " seeds by vmap are converted one at a time",
    )

  _on_each(old, lambda x: None, check)


def _stacked(copies: list) -> Any:
  """Returns equal arrays as one with a first axis."""
  return (jnp.stack if order.is_key(copies[0]) else np.stack)(copies)


def _on_each(
  tree: Any, local: Callable[[Any], Any], common: Callable[[Any], Any]
) -> Any:
  """Applies a function to what differs by replica, and one to all else."""
  return jax.tree.map(
    lambda x: jax.tree.map(local if is_per_replica(x) else common, x),
    tree,
    is_leaf=is_per_replica,
  )


def _names(path: tuple) -> Path:
  """Returns the names of a path of JAX, equal in a tree and in a checkpoint."""
  kinds = ("key", "idx", "name")
  return tuple(
    str(next(getattr(key, kind) for kind in kinds if hasattr(key, kind)))
    for key in path
  )


def _shown(path: Path) -> str:
  return ".".join(path) or "the root"
