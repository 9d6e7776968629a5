"""Backends by name: pmap, jit or vmap."""

import optax
from jax.sharding import AbstractMesh, Mesh
from ml_collections import ConfigDict

from experiments.parallel.backend import Backend
from experiments.parallel.mesh_backend import OnMesh
from experiments.parallel.vmap_backend import Vmap
from experiments.tasks.base import Task

BACKENDS = ("pmap", "jit", "vmap")


def make(
  config: ConfigDict,
  task: Task,
  tx: optax.GradientTransformation,
  mesh: Mesh | AbstractMesh,
) -> Backend:
  """Makes the backend that `mesh.backend` names; compiles nothing yet."""
  common = (task, tx, mesh, config.seed)
  if config.mesh.backend == "vmap":
    return Vmap(*common)
  return OnMesh(
    *common,
    is_plain=config.mesh.backend == "jit" and config.mesh.stage == 1,
    num_microbatches=config.pipeline.microbatches,
  )
