"""Meshes of stages, replicas and shards; each process's rows of a batch."""

from collections.abc import Mapping

import jax
from jax.sharding import (
  AbstractMesh,
  AxisType,
  Mesh,
  NamedSharding,
  PartitionSpec,
)
from ml_collections import ConfigDict

from configs import common
from experiments.trainer.models import gpt2_shards, gpt2_stages
from experiments.trainer.runtime import hosts

DATA, STAGE, SHARD = "data", gpt2_stages.AXIS, gpt2_shards.AXIS
TENSOR = gpt2_stages.TENSOR


def shape_of(
  replicas: int, stages: int = 1, shards: int = 1, tensor: int = 1
) -> Mapping[str, int]:
  """Returns the size of each axis of a mesh; arguments as for `make_mesh`."""
  shape = {STAGE: stages, DATA: replicas, SHARD: shards, TENSOR: tensor}
  return {name: n for name, n in shape.items() if n > 1 or name == DATA}


def make_mesh(
  replicas: int, stages: int, shards: int = 1, tensor: int = 1
) -> Mesh:
  """Makes a mesh of the first devices.

  Axes of one device are left out, except for the axis of the replicas.

  Args:
    replicas: Number of replicas.
    stages: Number of pipeline stages.
    shards: Number of devices among which each replica shards its parameters.
    tensor: Number of devices that share each stage.
  """
  mesh = abstract_mesh(replicas, stages, shards, tensor)
  return jax.make_mesh(
    mesh.axis_sizes,
    mesh.axis_names,
    axis_types=mesh.axis_types,
    devices=jax.devices()[: mesh.size],
  )


def fit_replicas(config: ConfigDict) -> None:
  """Sets `mesh.data` to the accelerators that there are, if a file sets none.

  As many replicas as there are devices for, and as divide the batch; of several
  processes all devices, or no change. CPUs stand for as many devices as a
  configuration asks for, and `vmap` needs none.
  """
  mesh = config.mesh
  is_set = mesh.data != common.base(config.reducer).mesh.data
  if is_set or mesh.backend == "vmap" or jax.default_backend() == "cpu":
    return
  most = jax.device_count() // max(1, mesh.stage * mesh.tensor * mesh.fsdp)
  parts = mesh.fsdp * (config.pipeline.microbatches if mesh.stage > 1 else 1)
  rows = config.batch_size // max(1, parts)
  least = most if jax.process_count() > 1 else 1
  fitting = [n for n in range(max(1, least), most + 1) if not rows % n]
  found = max(fitting, default=mesh.data)
  if found != mesh.data:
    hosts.say(f"mesh.data is {found}, for {jax.device_count()} devices")
  mesh.data = found


def of_config(config: ConfigDict) -> Mesh | AbstractMesh:
  """Returns the mesh of a configuration; abstract if `vmap` simulates it."""
  mesh = config.mesh
  if mesh.backend == "vmap":
    return abstract_mesh(mesh.data)
  return make_mesh(mesh.data, mesh.stage, mesh.fsdp, mesh.tensor)


def abstract_mesh(
  replicas: int, stages: int = 1, shards: int = 1, tensor: int = 1
) -> AbstractMesh:
  """Returns a mesh without devices; arguments as for `make_mesh`."""
  shape = shape_of(replicas, stages, shards, tensor)
  types = (AxisType.Auto,) * len(shape)
  return AbstractMesh(tuple(shape.values()), tuple(shape), axis_types=types)


def batch_spec(mesh: Mesh) -> PartitionSpec:
  """Returns the spec of a batch, whose rows replicas and shards divide."""
  return PartitionSpec(tuple(a for a in (DATA, SHARD) if a in mesh.shape))


def rows_of(mesh: Mesh, batch_size: int) -> slice:
  """Returns the rows of this process's devices."""
  sharding = NamedSharding(mesh, batch_spec(mesh))
  own = sharding.addressable_devices_indices_map((batch_size,)).values()
  bounds = [index.indices(batch_size) for (index,) in own]
  return slice(min(b[0] for b in bounds), max(b[1] for b in bounds))
