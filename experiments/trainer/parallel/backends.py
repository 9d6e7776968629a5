"""Backends by name: pmap, jit or vmap."""

import optax
from jax.sharding import AbstractMesh, Mesh
from ml_collections import ConfigDict

from experiments.trainer.parallel.backend import Backend
from experiments.trainer.parallel.mesh_backend import OnMesh
from experiments.trainer.parallel.pmap_backend import Pmap
from experiments.trainer.parallel.vmap_backend import Vmap
from experiments.trainer.tasks.base import Task

BACKENDS = ("pmap", "jit", "vmap")


def make(
  config: ConfigDict,
  task: Task,
  tx: optax.GradientTransformation,
  mesh: Mesh | AbstractMesh,
) -> Backend:
  """Makes the backend that `mesh.backend` names; compiles nothing yet."""
  common = (task, tx, mesh, config.seed)
  if config.mesh.backend == "jit":
    return OnMesh(*common, config.pipeline.microbatches)
  return {"pmap": Pmap, "vmap": Vmap}[config.mesh.backend](*common)
