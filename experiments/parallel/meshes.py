"""Meshes of stages and replicas, and each process's rows of a batch."""

from collections.abc import Callable

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from experiments.models import gpt2_stages

DATA, STAGE = "data", gpt2_stages.AXIS


def make_mesh(replicas: int, stages: int) -> Mesh:
  """Makes a mesh of the first devices, without a stage axis for one stage."""
  shape = {STAGE: stages, DATA: replicas} if stages > 1 else {DATA: replicas}
  return jax.make_mesh(
    tuple(shape.values()),
    tuple(shape),
    axis_types=(AxisType.Auto,) * len(shape),
    devices=jax.devices()[: stages * replicas],
  )


def blank_rows(
  rows: Callable[[int], slice], context: int, batch_size: int
) -> np.ndarray:
  """Returns zeros in the shape of this process's rows of a batch."""
  rows = range(batch_size)[rows(batch_size)]
  return np.zeros((len(rows), context + 1), np.int32)


def rows_of(mesh: Mesh, batch_size: int) -> slice:
  """Returns the rows of the replicas that have a device of this process."""
  sharding = NamedSharding(mesh, PartitionSpec(DATA))
  own = sharding.addressable_devices_indices_map((batch_size,)).values()
  bounds = [index.indices(batch_size) for (index,) in own]
  return slice(min(b[0] for b in bounds), max(b[1] for b in bounds))
