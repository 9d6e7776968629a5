"""Compiles a training step for its own mesh, without devices or arrays."""

import time
from typing import NamedTuple

import jax
from ml_collections import ConfigDict

import edgc_jax
from edgc_jax.measure import hlo
from edgc_jax.mesh.sharding import types_on
from experiments.trainer import tasks
from experiments.trainer.parallel import backends, meshes
from experiments.trainer.parallel.meshes import DATA
from experiments.trainer.training import optimizer, times


class Compiled(NamedTuple):
  """A training step, compiled for a mesh.

  Attributes:
    mesh: Devices along each axis.
    params: Parameters of the model.
    device_params: Parameters that one device holds.
    ranks: The ladder, 0 for dense.
    predicted_bytes: What a device sends over the replicas in a step at each
      rank, as `edgc_jax.describe` predicts it.
    program_bytes: What the compiled program sends over them at each rank,
      outside of branches that do not choose a rank (checks, samples).
    argument_bytes: Memory of a device for parameters, optimiser state and
      batch.
    temporary_bytes: Memory of a device for all else, by XLA's CPU backend.
    seconds: Time to trace and to compile.
  """

  mesh: dict[str, int]
  params: int
  device_params: int
  ranks: tuple[int, ...]
  predicted_bytes: tuple[int, ...]
  program_bytes: tuple[int, ...]
  argument_bytes: int
  temporary_bytes: int
  seconds: float


def compile_step(config: ConfigDict) -> Compiled:
  """Compiles the step of a configuration on as many devices as it names.

  Args:
    config: Its backend is jit, and the times that `edgc` needs are given.
  """
  task, mesh = tasks.make(config), meshes.of_config(config)
  given = times.options_of(config, task, mesh)
  tx = optimizer.make_optimizer(config, task, given, mesh=mesh)
  backend = backends.make(config, task, tx, mesh)
  state = types_on(mesh, backend.stored.shapes, backend.stored.specs)
  start = time.monotonic()
  program = backend.compile_step(*state, config.batch_size)
  seconds = time.monotonic() - start
  over_replicas = hlo.over_axes(program.as_text(), mesh, DATA)
  layout = task.layout(mesh.shape)
  (part,) = edgc_jax.describe(
    tx, layout.shapes, mesh=mesh, param_specs=layout.specs
  ).parts
  sent = hlo.wire_bytes_of_step(over_replicas, len(part.ladder))
  memory = program.memory_analysis()
  local = layout.of_one_device(mesh.shape)
  return Compiled(
    dict(mesh.shape),
    backend.num_params,
    sum(leaf.size for leaf in jax.tree.leaves(local)),
    part.ladder,
    part.wire_bytes,
    tuple(sent),
    memory.argument_size_in_bytes,
    memory.temp_size_in_bytes,
    seconds,
  )
