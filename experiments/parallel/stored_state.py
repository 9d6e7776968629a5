"""The stored form of a training state, the same for pmap and for any mesh.

A value that is equal on all replicas is stored once. A value that differs by
replica is stored as one array with the replicas' parts concatenated along the
first axis, as in `jax.shard_map`. So a run can resume with another backend and,
through `edgc_jax.resize_replicas`, on another number of replicas.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

import edgc_jax
from edgc_jax.mesh.sharding import placed
from experiments.parallel.meshes import STAGE

TREES = ("params", "opt_state")
Stored = Mapping[str, Any]  # arrays or shapes of one tree, by path


@dataclasses.dataclass(frozen=True)
class StoredForm:
  """The stored form of a training state, with conversions in both directions.

  Attributes:
    shapes: Shapes of the global arrays, (parameters, optimiser state).
    specs: PartitionSpecs, in trees of the same structure.
    mesh: The devices; abstract if nothing is placed on them.
    data_axis: The mesh axis of the replicas.
    is_stacked: Whether the training state comes from `jax.pmap`, in which
      every array has a first axis of local replicas.
  """

  shapes: tuple[Any, Any]
  specs: tuple[Any, Any]
  mesh: Mesh | AbstractMesh
  data_axis: str
  is_stacked: bool

  @classmethod
  def of_replicas(
    cls,
    tx: optax.GradientTransformation,
    params: Any,
    mesh: Mesh | AbstractMesh,
    data_axis: str,
    is_stacked: bool = False,
  ) -> "StoredForm":
    """Makes the form of a state on replicas alone.

    Args:
      tx: The optimiser.
      params: Shapes of the parameters.
      mesh: The devices, without stages.
      data_axis: The mesh axis of the replicas.
      is_stacked: As for the class.
    """
    own = jax.tree.map(lambda _: PartitionSpec(), params)
    specs = (own, edgc_jax.state_specs(tx, params, data_axis))
    opt_state = jax.eval_shape(tx.init, params)
    local = cls((params, opt_state), specs, mesh, data_axis, is_stacked)
    return dataclasses.replace(local, shapes=local._global_shapes())

  def store(self, state: Any) -> Mapping[str, Stored]:
    """Returns the arrays to save, as far as this process's devices hold them.

    Args:
      state: (parameters, optimiser state).
    """
    if self.is_stacked:
      state = jax.tree.map(self._unstacked, state, self.shapes, self.specs)
    return _flat(state)

  def template(self, replicas: int) -> Mapping[str, Stored]:
    """Returns shapes and shardings of the arrays that `replicas` saved.

    Every process loads the arrays without a sharding as a whole: all of them
    if the mesh is abstract.
    """

    def shape_of(leaf: Any, spec: PartitionSpec) -> jax.ShapeDtypeStruct:
      shape, sharding = leaf.shape, NamedSharding(self.mesh, spec)
      if self._differs(spec):
        shape = (shape[0] // self._replicas * replicas, *shape[1:])
        if replicas != self._replicas:
          sharding = None
      elif self.is_stacked:
        sharding = None
      if isinstance(self.mesh, AbstractMesh):
        sharding = None
      return jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=sharding)

    return _flat(jax.tree.map(shape_of, self.shapes, self.specs))

  def load(
    self,
    stored: Mapping[str, Stored],
    replicas: int,
    tx: optax.GradientTransformation,
    before: "StoredForm | None" = None,
  ) -> tuple[Any, ...]:
    """Places stored arrays on the devices of this mesh.

    Args:
      stored: One or both trees, by the names of `store`.
      replicas: Number of replicas of the run that saved them.
      tx: The optimiser.
      before: The form of that run, if it sharded parameters otherwise; then
        both trees are needed.

    Returns:
      The given trees, in the order (parameters, optimiser state).
    """
    if before is not None:
      stored = self._resharded(stored, replicas, tx, before)
      replicas = self._replicas
    names = [name for name in TREES if name in stored]
    shapes, specs = (
      tuple(trees[TREES.index(name)] for name in names)
      for trees in (self.shapes, self.specs)
    )
    state = edgc_jax.resize_replicas(
      tuple(map(_unflat, (stored[name] for name in names), shapes)),
      specs,
      replicas,
      self._replicas,
      self.data_axis,
      stages=self.mesh.shape.get(STAGE, 1),
    )
    if self.is_stacked:
      return jax.tree.map(self._stacked, state, specs)
    if isinstance(self.mesh, AbstractMesh):
      return state
    return placed(state, self.mesh, specs)

  def _resharded(
    self,
    stored: Mapping[str, Stored],
    replicas: int,
    tx: optax.GradientTransformation,
    before: "StoredForm",
  ) -> Mapping[str, Stored]:
    """Converts stored arrays to the shards and the replicas of this mesh."""
    params, opt_state = (
      _unflat(stored[name], shapes)
      for name, shapes in zip(TREES, before.shapes, strict=True)
    )
    opt_state = edgc_jax.resize_replicas(
      opt_state, before.specs[1], replicas, self._replicas, self.data_axis
    )
    # Arrays that were loaded as a whole may lie on one device.
    params = jax.tree.map(np.asarray, params)
    params = placed(params, self.mesh, self.specs[0])
    opt_state = edgc_jax.resize_shards(
      tx,
      params,
      opt_state,
      self.data_axis,
      mesh=self.mesh,
      param_specs=self.specs[0],
    )
    return _flat((params, opt_state))

  def _global_shapes(self) -> tuple[Any, Any]:
    """Returns the global shapes, given `shapes` of one replica."""

    def grown(leaf: Any, spec: PartitionSpec) -> jax.ShapeDtypeStruct:
      shape = leaf.shape
      if self._differs(spec):
        shape = (shape[0] * self._replicas, *shape[1:])
      return jax.ShapeDtypeStruct(shape, leaf.dtype)

    return jax.tree.map(grown, self.shapes, self.specs)

  @property
  def _replicas(self) -> int:
    return self.mesh.shape[self.data_axis]

  def _differs(self, spec: PartitionSpec) -> bool:
    """Returns whether an array with this spec differs by replica."""
    return bool(len(spec)) and self.data_axis in np.ravel(spec[0])

  def _unstacked(self, x: jax.Array, shape: Any, spec: PartitionSpec) -> Any:
    """Converts pmap's [local replicas, ...] to the global array or value."""
    if not self._differs(spec):
      return np.asarray(np.asarray(x.addressable_shards[0].data)[0])
    local = np.concatenate(
      [np.asarray(s.data)[0] for s in x.addressable_shards]
    )
    if local.shape == shape.shape:
      return local
    return jax.make_array_from_process_local_data(
      NamedSharding(self.mesh, spec), local, shape.shape
    )

  def _stacked(self, x: Any, spec: PartitionSpec) -> np.ndarray:
    """Converts a global array to pmap's [local replicas, ...] on the host."""
    local = [d for d in self.mesh.devices.flat if d.process_index == _here()]
    if not self._differs(spec):
      return np.broadcast_to(x, (len(local), *np.shape(x)))
    if isinstance(x, jax.Array):
      shards = sorted(x.addressable_shards, key=lambda s: s.index[0].start or 0)
      return np.stack([np.asarray(shard.data) for shard in shards])
    parts = np.reshape(x, (self._replicas, -1, *np.shape(x)[1:]))
    first = list(self.mesh.devices.flat).index(local[0])
    return parts[first : first + len(local)]


def _here() -> int:
  return jax.process_index()


def _path(path: tuple) -> str:
  return jax.tree_util.keystr(path, simple=True, separator=".")


def _flat(state: tuple) -> Mapping[str, Stored]:
  return {
    name: {
      _path(path): leaf
      for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }
    for name, tree in zip(TREES, state, strict=True)
  }


def _unflat(stored: Stored, tree: Any) -> Any:
  """Returns a tree like `tree` of the arrays stored under its paths."""
  return jax.tree_util.tree_map_with_path(
    lambda path, _: stored[_path(path)], tree
  )
