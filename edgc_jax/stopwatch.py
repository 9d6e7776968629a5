"""Times of calls, the same for all processes.

Compiled calls are timed from outside, in alternation, so that what else the
machine does hits all alike; medians count, and first runs do not. The number
of calls is fixed beforehand: all processes have to make the same ones.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from edgc_jax.comm import collectives


def medians(calls: Sequence[Callable[[], Any]], repeats: int) -> np.ndarray:
  """Median seconds of each call, float64 [len(calls)], made in turn."""
  for call in 2 * list(calls):  # compiles, and warms up
    jax.block_until_ready(call())
  seconds = np.empty((repeats, len(calls)))
  for row in seconds:
    for i, call in enumerate(calls):
      start = time.perf_counter()
      jax.block_until_ready(call())
      row[i] = time.perf_counter() - start
  return np.median(seconds, axis=0)


def agree(mesh: Mesh, measured: np.ndarray) -> np.ndarray:
  """The mean over all devices of what their processes measured.

  Times are compiled in; processes that compile different ones would hang.

  Args:
    mesh: Devices of all the processes, which call this at the same point.
    measured: [k], this process's numbers.

  Returns:
    float64 [k] of float32 precision, equal on all processes.
  """
  axes = tuple(mesh.axis_names)
  rows = np.tile(np.asarray(measured, np.float32), (mesh.devices.size, 1))
  spec = P(axes)
  own = jax.make_array_from_callback(
    rows.shape, NamedSharding(mesh, spec), lambda index: rows[index]
  )
  mean = lambda rows: collectives.mean(rows[0], axes)  # noqa: E731
  run = jax.jit(jax.shard_map(mean, mesh=mesh, in_specs=spec, out_specs=P()))
  return np.asarray(run(own), np.float64)
