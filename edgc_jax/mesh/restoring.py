"""Restores checkpoints of any number of replicas and shards."""

import importlib
import os
import pathlib
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import Mesh

from edgc_jax import validation
from edgc_jax.leaves.leaf import arrays_of
from edgc_jax.leaves.review import reducers_seen
from edgc_jax.mesh.resizing import by_path, converted, placed_as
from edgc_jax.mesh.sharding import bound_init, given_or_set, types_on
from edgc_jax.wire.order import AxisName


def restore(
  path: str | os.PathLike[str],
  tx: optax.GradientTransformation,
  params: Any,
  *,
  mesh: Mesh | None = None,
  axis_name: AxisName = "data",
  param_specs: Any = None,
  stage_axis: str = "stage",
) -> tuple[Any, Any]:
  """Restores parameters and optimiser state onto a mesh.

  Converts the state to the replicas of the mesh, to the shards of `param_specs`
  and to the rank of `tx`, as `resize` does. Every process reads the whole
  checkpoint into its memory. If replicas get batches of another size from here
  on, call `restart_reference` next.

  Args:
    path: Folder of an orbax checkpoint of `(params, opt_state)`, or of a
      dictionary with the entries "params" and "opt_state", of global arrays.
      Other entries are ignored. Of a `CheckpointManager` its folder, for the
      newest step, or that of a step.
    tx: The transformation, with the options of the run that saved the state.
    params: The parameters or their `jax.ShapeDtypeStruct`s.
    mesh: The mesh to restore on; None takes the one of `jax.set_mesh`.
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
    RuntimeWarning: as `resize`.
  """
  params = arrays_of(params)
  mesh = given_or_set(mesh, jax.sharding.get_mesh)
  with reducers_seen():
    init, specs, of_state = bound_init(
      tx, params, mesh, axis_name, param_specs, stage_axis
    )
    like = types_on(mesh, params, specs)
    state = types_on(mesh, jax.eval_shape(init, like), of_state)
  entries = ("params", "opt_state")
  arrays = by_path(dict(zip(entries, _read(path), strict=True)))

  def found(part: str, like: Any, fresh: Any = dict) -> Any:
    tree = converted(arrays, {part: like}, lambda: {part: fresh()}, "path")
    return placed_as(tree[part], like)

  loaded = found("params", like)
  return loaded, found("opt_state", state, lambda: jax.jit(init)(loaded))


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
