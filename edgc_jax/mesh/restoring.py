"""Restores checkpoints of any number of replicas and shards."""

import importlib
import os
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh
from jax.tree_util import GetAttrKey

from edgc_jax import validation
from edgc_jax.leaves.leaf import LeafState, LeafStats, arrays_of, is_leaf_state
from edgc_jax.leaves.review import reducers_seen
from edgc_jax.mesh.resharding import resize_shards
from edgc_jax.mesh.resizing import resize_replicas
from edgc_jax.mesh.sharding import (
  axes_of,
  bound_init,
  num_replicas,
  placed,
  specs_of_replicas,
  types_on,
)
from edgc_jax.state.state import (
  LocalStepsState,
  PerReplica,
  ReducerState,
  Stats,
)
from edgc_jax.wire import order
from edgc_jax.wire.order import AxisName


def restore(
  path: str | os.PathLike[str],
  tx: optax.GradientTransformation,
  params: Any,
  *,
  mesh: Mesh,
  axis_name: AxisName = "data",
  param_specs: Any = None,
  stage_axis: str = "stage",
) -> tuple[Any, Any]:
  """Restores parameters and optimiser state onto a mesh.

  Reads the old number of replicas and of shards from the arrays, and converts
  the state if they differ (`resize_replicas`, `resize_shards`). Every process
  reads the whole checkpoint into its memory. If replicas get batches of another
  size from here on, call `restart_reference` next.

  A reducer of another rank begins with factors of its own, and keeps the
  residuals.

  Args:
    path: Folder of an orbax checkpoint of `(params, opt_state)`, or of a
      dictionary with the entries "params" and "opt_state", of global arrays.
      Other entries are ignored. Of a `CheckpointManager` its folder, for the
      newest step, or that of a step.
    tx: The transformation, with the options of the run that saved the state.
    params: The parameters or their `jax.ShapeDtypeStruct`s.
    mesh: The mesh to restore on.
    axis_name: The axis of the replicas, or a tuple of axes.
    param_specs, stage_axis: As for `state_specs`.

  Returns:
    Parameters and optimiser state, placed on the mesh.

  Raises:
    ImportError: if orbax-checkpoint is not installed.
    TypeError: if `path`, `tx` or `mesh` has another type.
    ValueError: if there is no intact checkpoint, it lacks an array of the
      state, or an array has another shape or dtype than the transformation
      needs; or if the mesh has another number of stages.

  Warns:
    RuntimeWarning: as `resize_shards`.
  """
  params = arrays_of(params)
  with reducers_seen():
    init, own, of_state = bound_init(
      tx, params, mesh, axis_name, param_specs, stage_axis
    )
    new = jax.eval_shape(init, types_on(mesh, params, own))
  stored = _read(path)
  loaded = _like(params, stored[0], "params")
  for (place, leaf), found in zip(
    jax.tree_util.tree_leaves_with_path(params),
    jax.tree.leaves(loaded),
    strict=True,
  ):
    validation.require(
      np.shape(found) == np.shape(leaf),
      "params",
      f"{np.shape(leaf)} at {jax.tree_util.keystr(place)}",
      f"of the shapes in the checkpoint, such as {np.shape(found)} there",
      "pass the model that it was saved with",
    )
  _require_nothing_in_flight(new, stored[1])
  old = _like(_as_stored(new, stored[1]), stored[1], "opt_state")
  replicas = num_replicas(mesh, axis_name)
  before = _replicas_of(old, new, replicas)
  if before != replicas:
    # Arrays that only some stages hold name them in the specs of the new state.
    local = jax.tree.map(
      lambda own, new: new if isinstance(own, PerReplica) else own,
      specs_of_replicas(old, axis_name, stage_axis),
      of_state,
      is_leaf=lambda x: isinstance(x, PerReplica | ReducerState),
    )
    stages = mesh.shape.get(stage_axis)
    old = resize_replicas(
      old, local, before, replicas, axis_name, stages=stages
    )
  loaded = placed(loaded, mesh, own)
  if jax.tree.map(np.shape, old) != jax.tree.map(np.shape, new):
    how = {"mesh": mesh, "param_specs": own}
    return loaded, resize_shards(tx, loaded, old, axis_name, **how)
  return loaded, placed(old, mesh, of_state)


def _folders_of(folder: pathlib.Path) -> dict[str, pathlib.Path] | None:
  """Returns the folders of the trees of a checkpoint, by name.

  Of a `CheckpointManager` that is its newest step, with one tree, or with
  "params" and "opt_state" apart. None if there is no tree.
  """
  if (folder / "_METADATA").is_file():
    return {"": folder}
  inside = {own.name: own for own in folder.iterdir() if own.is_dir()}
  # The newest step that is whole; its saving may have been cut off.
  for name in sorted(filter(str.isdecimal, inside), key=int, reverse=True):
    if found := _folders_of(inside[name]):
      return found
  trees = {n: own for n, own in inside.items() if (own / "_METADATA").is_file()}
  if {"params", "opt_state"} <= set(trees):
    return {name: trees[name] for name in ("params", "opt_state")}
  own = trees.get("default") or (len(trees) == 1 and min(trees.values()))
  return {"": own} if own else None


def _read(path: str | os.PathLike[str]) -> tuple[Any, Any]:
  """Reads the two trees of a checkpoint, with NumPy arrays.

  Raises:
    TypeError: if `path` is no path.
    ValueError: if there is no folder, or no intact checkpoint in it.
  """
  if not isinstance(path, str | os.PathLike):
    raise TypeError(
      f"`path` must be a path, got {validation.shown(path)}; pass the folder of"
      " the checkpoint."
    )
  try:
    ocp = importlib.import_module("orbax.checkpoint")
  except ImportError as error:
    raise ImportError(
      "`restore` reads checkpoints of orbax, which is not installed; run pip"
      " install orbax-checkpoint."
    ) from error
  folder = os.path.abspath(path)
  validation.require(
    os.path.isdir(folder),
    "path",
    path,
    "an existing folder on a disk",
    "check its name, and copy a checkpoint out of a bucket first",
  )
  folders = _folders_of(pathlib.Path(folder))
  if folders is None:
    raise ValueError(
      "`path` must be the folder of an orbax checkpoint of a tree, got"
      f" {str(path)!r}, which holds"
      f" {validation.shown(sorted(os.listdir(folder)))}; pass the folder that"
      " PyTreeCheckpointer saved to, or a CheckpointManager's, or of one of its"
      " steps."
    )
  try:
    with ocp.PyTreeCheckpointer() as checkpointer:

      def read(folder: pathlib.Path) -> Any:
        tree = checkpointer.metadata(folder).item_metadata.tree
        args = jax.tree.map(
          lambda _: ocp.RestoreArgs(restore_type=np.ndarray), tree
        )
        return checkpointer.restore(folder, restore_args=args)

      found = {name: read(own) for name, own in folders.items()}
  except (PermissionError, MemoryError):
    raise  # the checkpoint may be intact
  except Exception as error:  # orbax raises many kinds
    raise ValueError(
      "`path` must be the folder of an intact orbax checkpoint of a tree, got"
      f" {str(path)!r} ({type(error).__name__}:"
      f" {validation.shown(str(error))}); pass an older checkpoint if its files"
      " are damaged."
    ) from error
  found = found.get("", found)
  if isinstance(found, dict):
    is_named = "params" in found
    keys = ("params", "opt_state") if is_named else ("0", "1")
    validation.require(
      set(keys) <= set(found),
      "path",
      sorted(found),
      'a checkpoint with the entries "params" and "opt_state"',
      "save {'params': params, 'opt_state': opt_state}, or the pair of them",
    )
    return found[keys[0]], found[keys[1]]
  validation.require(
    isinstance(found, list | tuple) and len(found) == 2,
    "path",
    f"a checkpoint of {type(found).__name__}",
    "a checkpoint of a pair or of a dictionary",
    "save {'params': params, 'opt_state': opt_state}, or the pair of them",
  )
  return found[0], found[1]


def _like(tree: Any, stored: Any, entry: str) -> Any:
  """Returns the stored arrays in a tree like `tree`."""

  def pick(path: tuple, leaf: Any) -> Any:
    found = _stored_at(path, stored)
    validation.require(
      found is not None,
      "path",
      entry + jax.tree_util.keystr(path),
      f"a checkpoint with all arrays of the state, of shape {leaf.shape}",
      "pass the options of the run that saved it, such as its rank",
    )
    wanted, got = jnp.result_type(leaf), jnp.result_type(found)
    if order.is_key(leaf):
      impl = jax.random.key_impl(jnp.zeros_like(leaf))
      return jax.random.wrap_key_data(jnp.asarray(found), impl=impl)
    validation.require(
      wanted == got,
      entry,
      f"{wanted} at {jax.tree_util.keystr(path) or 'the root'}",
      f"of the dtypes in the checkpoint, such as {got} there",
      "pass the dtypes of the run that saved it, and cast what is restored",
    )
    return found

  return jax.tree_util.tree_map_with_path(pick, tree)


def _as_stored(new: Any, stored: Any) -> Any:
  """Returns types of a state whose reducers have what is stored of them.

  At another rank, or on another number of shards, other leaves may be
  compressed, or none.
  """

  def of_reducer(path: tuple, part: Any) -> Any:
    if not isinstance(part, ReducerState):
      return part
    stats = Stats._make(_types_at((*path, GetAttrKey("stats")), Stats, stored))
    place = (*path, GetAttrKey("leaves"))
    leaves = jax.tree_util.tree_map_with_path(
      lambda own, _: _leaf_at((*place, *own), stored),
      part.leaves,
      is_leaf=is_leaf_state,
    )
    same_shards = np.shape(part.stats.wire_bytes) == np.shape(stats.wire_bytes)
    is_other = _facts(part.leaves, part.stats) != _facts(leaves, stats)
    if stats.wire_bytes is None or (same_shards and is_other):
      return part  # the arrays that it lacks are named
    kept = {
      name: getattr(part, name)
      if _stored_below((*path, GetAttrKey(name)), getattr(part, name), stored)
      else ()
      for name in ("budget", "allocation", "growth")
    }
    return part._replace(leaves=leaves, stats=stats, **kept)

  return jax.tree_util.tree_map_with_path(
    of_reducer, new, is_leaf=lambda x: isinstance(x, ReducerState)
  )


def _facts(leaves: Any, stats: Stats) -> list[bool]:
  """Returns what tells a method from others: which arrays it keeps."""
  states = jax.tree.leaves(leaves, is_leaf=is_leaf_state)
  kept = [
    any(getattr(state, name) is not None for state in states)
    for name in ("factor_q", "residual")
  ]
  return [*kept, stats.entropy is None, stats.relative_error is None]


def _require_nothing_in_flight(new: Any, stored: Any) -> None:
  """Raises if local steps without an overlap would drop s_i."""
  is_local = lambda x: isinstance(x, LocalStepsState)  # noqa: E731
  for path, part in jax.tree_util.tree_leaves_with_path(new, is_leaf=is_local):
    if is_local(part) and not jax.tree.leaves(part.sent):
      place = (*path, GetAttrKey("sent"))
      validation.require(
        not _stored_below(place, part.offset, stored),
        "path",
        "one of local steps with an overlap",
        "a checkpoint of overlap=0, as `tx` has",
        "pass the overlap of the run that saved it",
      )


def _leaf_at(path: tuple, stored: Any) -> LeafState:
  """Returns the types of what is stored of one leaf's state."""
  stats = _types_at((*path, GetAttrKey("stats")), LeafStats, stored)
  factor_q, residual, _ = _types_at(path, LeafState, stored)
  return LeafState(
    factor_q, residual, LeafStats._make(stats) if any(stats) else None
  )


def _types_at(path: tuple, kind: Any, stored: Any) -> list[Any]:
  """Returns the types of the arrays that are stored as fields of a tuple."""
  found = [
    _stored_at((*path, GetAttrKey(name)), stored) for name in kind._fields
  ]
  return [
    x if x is None else jax.ShapeDtypeStruct(np.shape(x), x.dtype)
    for x in found
  ]


def _stored_below(path: tuple, tree: Any, stored: Any) -> bool:
  """Returns whether any array of a tree is stored."""
  own = [place for place, _ in jax.tree_util.tree_leaves_with_path(tree)]
  return any(_stored_at((*path, *x), stored) is not None for x in own)


def _stored_at(path: tuple, stored: Any) -> Any:
  """Returns the stored array at a path; None if there is none."""
  for key in path:
    name = next(
      str(getattr(key, kind))
      for kind in ("key", "idx", "name")
      if hasattr(key, kind)
    )
    if isinstance(stored, list | tuple):
      stored = {str(i): entry for i, entry in enumerate(stored)}
    stored = stored.get(name) if isinstance(stored, dict) else None
  return None if isinstance(stored, dict | list | tuple) else stored


def _replicas_of(old: Any, new: Any, replicas: int) -> int:
  """Returns the number of replicas of a state, given one of `replicas`."""
  specs = specs_of_replicas(new, "replicas")
  split = {
    path: np.shape(after)
    for (path, after), spec in zip(
      jax.tree_util.tree_leaves_with_path(new),
      jax.tree.leaves(specs),
      strict=True,
    )
    if "replicas" in axes_of(spec) and np.size(after)
  }
  for path, before in jax.tree_util.tree_leaves_with_path(old):
    if path in split:  # [N m, ...], with the same m
      return np.shape(before)[0] * replicas // split[path][0]
  return replicas
