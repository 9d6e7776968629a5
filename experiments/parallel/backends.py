"""The same training step on many devices: through pmap, or on a mesh.

Both hide from the trainer where arrays live.
"""

from collections.abc import Mapping
from typing import Any, Protocol

import jax
import numpy as np
import optax
from jax.sharding import Mesh
from ml_collections import ConfigDict

from experiments.models.gpt2 import GPT2Config
from experiments.parallel.mesh_backend import OnMesh
from experiments.parallel.pmap_backend import Pmap
from experiments.parallel.stored_state import Stored, StoredForm

BACKENDS = ("pmap", "shard_map")


class Parallel(Protocol):
  """What the trainer needs of either backend."""

  traces: int  # how often JAX traced the step
  num_params: int
  stored: StoredForm  # of (parameters, optimiser state)

  def init(self, key: jax.Array) -> tuple[Any, Any]:
    """Parameters and optimiser state."""

  def load(self, trees: Mapping[str, Stored], replicas: int) -> tuple[Any, ...]:
    """The same, or one of them, from what `stored` gave on `replicas`."""

  def step(
    self, params: Any, opt_state: Any, batch: np.ndarray
  ) -> tuple[Any, Any, dict[str, jax.Array]]:
    """One step on this process's rows [.., context + 1] of a batch.

    Returns:
      Parameters, optimiser state and numbers, equal on all devices: scalars,
      and arrays over a leaf's matrices by its path; with [stages] in front
      where they differ by stage.
    """

  def follow_first_replica(
    self, params: Any, opt_state: Any
  ) -> tuple[Any, Any]:
    """Both, with the first replica's values of what all should hold alike."""

  def loss(self, params: Any, batch: np.ndarray) -> jax.Array:
    """The mean loss over the replicas on such rows."""

  def compile_step(
    self, params: Any, opt_state: Any, batch_size: int
  ) -> jax.stages.Compiled:
    """Compiles the step, without a collective, also for later calls of it."""

  def compile_loss(self, params: Any, batch_size: int) -> None:
    """The same for the loss."""

  def rows(self, batch_size: int) -> slice:
    """Which of a batch's rows are for this process's devices."""


def make(
  config: ConfigDict,
  model: GPT2Config,
  tx: optax.GradientTransformation,
  mesh: Mesh,
) -> Parallel:
  """The backend of `mesh.backend`; compiles nothing yet."""
  if config.mesh.backend == "pmap":
    return Pmap(model, tx, mesh)
  return OnMesh(model, tx, mesh, config.pipeline.microbatches)
