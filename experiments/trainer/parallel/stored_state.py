"""The stored form of a training state, the same for every backend and mesh.

A value that is equal on all replicas is stored once. A value that differs by
replica is stored as one array with a first axis of replicas, as in
`jax.shard_map`. So a run can resume with another backend and, through
`edgc_jax.resize`, on another number of replicas or shards.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

import edgc_jax
from edgc_jax.mesh.resizing import placed_as
from edgc_jax.mesh.sharding import bound_init, types_on
from experiments.trainer.parallel.meshes import DATA
from experiments.trainer.tasks.base import Layout

TREES = ("params", "opt_state")
Stored = Mapping[str, Any]  # arrays or shapes of one tree, by path


@dataclasses.dataclass(frozen=True)
class StoredForm:
  """The stored form of a training state, with conversions in both directions.

  Attributes:
    shapes: Shapes of the global arrays, (parameters, optimiser state).
    specs: PartitionSpecs, in trees of the same structure.
    mesh: The devices; abstract if nothing is placed on them.
    init: Creates the optimiser state on the mesh.
  """

  shapes: tuple[Any, Any]
  specs: tuple[Any, Any]
  mesh: Mesh | AbstractMesh
  init: Callable[[Any], Any]

  @classmethod
  def of(
    cls,
    params: Layout,
    tx: optax.GradientTransformation,
    mesh: Mesh | AbstractMesh,
  ) -> "StoredForm":
    """Makes the form of a state on a mesh, which need not exist."""
    init, _, specs = bound_init(tx, params.shapes, mesh, DATA, params.specs)
    opt_state = jax.eval_shape(init, params.shapes)
    return cls((params.shapes, opt_state), (params.specs, specs), mesh, init)

  def template(self, replicas: int) -> Mapping[str, Stored]:
    """Returns shapes and shardings of the arrays that `replicas` saved.

    Every process loads the arrays without a sharding as a whole: all of them
    if the mesh is abstract.
    """

    def shape_of(leaf: Any, spec: PartitionSpec) -> jax.ShapeDtypeStruct:
      shape, sharding = leaf.shape, NamedSharding(self.mesh, spec)
      is_resized = replicas != self._replicas and DATA in np.ravel(spec[:1])
      if is_resized:
        shape = (replicas, *shape[1:])
      if is_resized or isinstance(self.mesh, AbstractMesh):
        sharding = None
      return jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=sharding)

    return flat(jax.tree.map(shape_of, self.shapes, self.specs))

  def load(
    self,
    stored: Mapping[str, Stored],
    before: "StoredForm | None" = None,
  ) -> tuple[Any, Any]:
    """Places stored arrays on the devices of this mesh, or on one device.

    Args:
      stored: The arrays by tree and path, as `flat` returns them.
      before: The form of the run that saved them, if it sharded parameters
        otherwise.

    Returns:
      (parameters, optimiser state).
    """
    form = before or self
    params, old = (
      _unflat(stored[k], x) for k, x in zip(TREES, form.shapes, strict=True)
    )
    if before is None:
      state = params, edgc_jax.resize(old, self.shapes[1])
      return self._placed(state, self.specs)
    # Arrays that were loaded as a whole may lie on one device.
    params = self._placed(jax.tree.map(np.asarray, params), self.specs[0])
    return params, edgc_jax.resize(old, jax.jit(self.init)(params))

  def load_params(self, stored: Stored) -> Any:
    """Places stored parameters, by path, as `load` does."""
    return self._placed(_unflat(stored, self.shapes[0]), self.specs[0])

  def _placed(self, tree: Any, specs: Any) -> Any:
    if isinstance(self.mesh, AbstractMesh):
      return jax.device_put(tree)
    return placed_as(tree, types_on(self.mesh, tree, specs))

  @property
  def _replicas(self) -> int:
    return self.mesh.shape[DATA]


def flat(state: tuple[Any, Any]) -> Mapping[str, Stored]:
  """Returns (parameters, optimiser state) by tree and path, to be saved."""
  return {
    name: {
      _path(path): leaf
      for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }
    for name, tree in zip(TREES, state, strict=True)
  }


def _path(path: tuple) -> str:
  return jax.tree_util.keystr(path, simple=True, separator=".")


def _unflat(stored: Stored, tree: Any) -> Any:
  """Returns a tree like `tree` of the arrays stored under its paths."""
  return jax.tree_util.tree_map_with_path(
    lambda path, _: stored[_path(path)], tree
  )
