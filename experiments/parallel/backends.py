"""Backends that run the training step on many devices: pmap or jit.

The trainer does not need to know how a backend places its arrays.
"""

from collections.abc import Mapping
from typing import Any, Protocol

import jax
import numpy as np
import optax
from jax.sharding import AbstractMesh, Mesh
from ml_collections import ConfigDict

from experiments.models.gpt2 import GPT2Config
from experiments.parallel import layout
from experiments.parallel.mesh_backend import OnMesh, stored_form
from experiments.parallel.pmap_backend import Pmap
from experiments.parallel.stored_state import Stored, StoredForm
from experiments.parallel.vmap_backend import Simulated

BACKENDS = ("pmap", "jit", "vmap")


class Parallel(Protocol):
  """The interface of both backends."""

  traces: int  # number of times JAX has traced the step
  num_params: int
  stored: StoredForm  # of (parameters, optimiser state)

  def init(self, key: jax.Array) -> tuple[Any, Any]:
    """Returns new parameters and optimiser state."""

  def load(
    self,
    trees: Mapping[str, Stored],
    replicas: int,
    before: StoredForm | None = None,
  ) -> tuple[Any, ...]:
    """Restores parameters, optimiser state or both.

    Args:
      trees: As saved by `stored`, by name.
      replicas: Number of replicas of the run that saved them.
      before: The stored form of that run, if it sharded parameters otherwise;
        then both trees are needed.
    """

  def step(
    self, params: Any, opt_state: Any, batch: np.ndarray
  ) -> tuple[Any, Any, dict[str, jax.Array]]:
    """Runs one step on this process's rows [.., context + 1] of a batch.

    Returns:
      Parameters, optimiser state and metrics. Metrics are equal on all devices:
      scalars, and arrays over a leaf's matrices by its path. Those that differ
      by stage have a first axis of stages.
    """

  def follow_first_replica(
    self, params: Any, opt_state: Any
  ) -> tuple[Any, Any]:
    """Copies the first replica's values, where replicas should be equal."""

  def loss(self, params: Any, batch: np.ndarray) -> jax.Array:
    """Returns the loss on rows as of `step`, averaged over the replicas."""

  def compile_step(
    self, params: Any, opt_state: Any, batch_size: int
  ) -> jax.stages.Compiled:
    """Compiles the step for later calls, without running a collective."""

  def compile_loss(self, params: Any, batch_size: int) -> None:
    """Compiles the loss for later calls, without running a collective."""

  def rows(self, batch_size: int) -> slice:
    """Returns the rows of a batch for this process's devices."""


def make(
  config: ConfigDict,
  model: GPT2Config,
  tx: optax.GradientTransformation,
  mesh: Mesh,
) -> Parallel:
  """Makes the backend that `mesh.backend` names; compiles nothing yet."""
  if config.mesh.backend == "pmap":
    return Pmap(model, tx, mesh)
  if config.mesh.backend == "vmap":
    return Simulated(model, tx, mesh)
  return OnMesh(model, tx, mesh, config.pipeline.microbatches)


def form_on(
  model: GPT2Config,
  tx: optax.GradientTransformation,
  mesh: AbstractMesh,
) -> StoredForm:
  """Returns the form in which a run on a mesh stored its state.

  Args:
    model: Sizes of the model.
    tx: The optimiser of that run.
    mesh: Its mesh, without stages.
  """
  return stored_form(layout.of_params(model, mesh.shape), tx, mesh)
