"""Training state as it is stored: the same for pmap and for any mesh.

What all replicas hold alike is stored once. What each holds for itself is one
array, the replicas' parts one after the other on the first axis, as
`jax.shard_map` has it. So a run may go on through another backend, and, with
`edgc_jax.resize_replicas`, on another number of replicas.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import edgc_jax

TREES = ("params", "opt_state")
Stored = Mapping[str, Any]  # of one tree, arrays or shapes by their path


@dataclasses.dataclass(frozen=True)
class StoredForm:
  """Between training state and its stored form.

  Attributes:
    shapes: Of the global arrays, (parameters, optimiser state).
    specs: Trees like it, of PartitionSpecs.
    mesh: The devices.
    data_axis: Axis of the replicas.
    is_stacked: Whether the training state is `pmap`'s, with every local array
      on a first axis of replicas.
  """

  shapes: tuple[Any, Any]
  specs: tuple[Any, Any]
  mesh: Mesh
  data_axis: str
  is_stacked: bool

  @classmethod
  def of_pmap(
    cls,
    tx: optax.GradientTransformation,
    params: Any,
    opt_state: Any,
    mesh: Mesh,
    data_axis: str,
  ) -> "StoredForm":
    """That of (parameters, optimiser state) under `jax.pmap`.

    Args:
      tx: The optimiser.
      params: Shapes of a replica's parameters.
      opt_state: Shapes of a replica's state.
      mesh: The devices, replicas alone.
      data_axis: Its axis.
    """
    own = jax.tree.map(lambda _: PartitionSpec(), params)
    specs = (own, edgc_jax.state_specs(tx, params, data_axis))
    local = cls((params, opt_state), specs, mesh, data_axis, is_stacked=True)
    return dataclasses.replace(local, shapes=local._global_shapes())

  def store(self, state: Any) -> Mapping[str, Stored]:
    """What to save of a state; each process gives what its devices hold."""
    if self.is_stacked:
      state = jax.tree.map(self._unstacked, state, self.shapes, self.specs)
    return _flat(state)

  def template(self, replicas: int) -> Mapping[str, Stored]:
    """Shapes to load, as saved on `replicas`, and where their parts belong.

    Those without a sharding are loaded whole, by every process.
    """

    def shape_of(leaf: Any, spec: PartitionSpec) -> jax.ShapeDtypeStruct:
      shape, sharding = leaf.shape, NamedSharding(self.mesh, spec)
      if self._differs(spec):
        shape = (shape[0] // self._replicas * replicas, *shape[1:])
        if replicas != self._replicas:
          sharding = None
      elif self.is_stacked:
        sharding = None
      return jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=sharding)

    return _flat(jax.tree.map(shape_of, self.shapes, self.specs))

  def load(
    self, stored: Mapping[str, Stored], replicas: int
  ) -> tuple[Any, ...]:
    """What was saved on `replicas`, on this form's devices; some trees or all.

    Args:
      stored: By the names of `store`.
      replicas: Of the run that saved it.

    Returns:
      The trees given, in the order of (parameters, optimiser state).
    """
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
      stages=self.mesh.size // self._replicas,
    )
    place = self._stacked if self.is_stacked else self._placed
    return jax.tree.map(place, state, specs)

  def _global_shapes(self) -> tuple[Any, Any]:
    """From those of one replica's arrays."""

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
    """By replica."""
    return bool(len(spec)) and self.data_axis in np.ravel(spec[0])

  def _unstacked(self, x: jax.Array, shape: Any, spec: PartitionSpec) -> Any:
    """[local replicas, ...] of pmap to the global array, or its value."""
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
    """The global array to [local replicas, ...], on the host."""
    local = [d for d in self.mesh.devices.flat if d.process_index == _here()]
    if not self._differs(spec):
      return np.broadcast_to(x, (len(local), *np.shape(x)))
    if isinstance(x, jax.Array):
      shards = sorted(x.addressable_shards, key=lambda s: s.index[0].start or 0)
      return np.stack([np.asarray(shard.data) for shard in shards])
    parts = np.reshape(x, (self._replicas, -1, *np.shape(x)[1:]))
    first = list(self.mesh.devices.flat).index(local[0])
    return parts[first : first + len(local)]

  def _placed(self, x: Any, spec: PartitionSpec) -> jax.Array:
    if isinstance(x, jax.Array):
      return x
    sharding = NamedSharding(self.mesh, spec)
    return jax.make_array_from_callback(
      np.shape(x), sharding, lambda index: x[index]
    )


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
  """A tree like `tree` of what is stored under its paths."""
  return jax.tree_util.tree_map_with_path(
    lambda path, _: stored[_path(path)], tree
  )
