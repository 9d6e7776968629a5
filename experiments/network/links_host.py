"""A host of `links` that times packets and collectives on its links."""

import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import edgc_jax
from edgc_jax.wire import collectives
from experiments.network import calls, virtual_hosts

_AXIS = "data"
_PORT = 12347
_ALL: dict[str, Callable[[Any, str], Any]] = {
  "all-reduce": collectives.mean,
  "parts": collectives.exchange_parts,
  "gather": collectives.gather,
}


class LinksHost:
  """The functions that the benchmark calls."""

  def __init__(self, index: int, count: int, address: str):
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(address, count, index)
    self._index, self._count = index, count
    self._mesh = jax.make_mesh((count,), (_AXIS,), axis_types=(AxisType.Auto,))
    self._calls: dict[tuple[str, int], Callable[[], Any]] = {}

  def build(self, kind: str, num_bytes: int) -> None:
    """Compiles a collective of float32 values, and runs it."""
    count = num_bytes // 4
    if kind == "parts":
      shape = (self._count, count // self._count)
    else:
      shape = (count if kind == "all-reduce" else count // self._count,)
    spec = P(_AXIS)
    whole = (self._count * shape[0], *shape[1:])
    values = jax.jit(
      lambda: jnp.ones(whole, jnp.float32),
      out_shardings=NamedSharding(self._mesh, spec),
    )()

    def run(x: jax.Array) -> jax.Array:
      return _ALL[kind](x, _AXIS).ravel()[:1]  # nothing to copy

    call = jax.jit(
      jax.shard_map(run, mesh=self._mesh, in_specs=spec, out_specs=spec, check_vma=False)
    )
    self._calls[kind, num_bytes] = lambda: call(values)
    jax.block_until_ready(call(values))

  def run(self, kind: str, num_bytes: int, count: int) -> list[float]:
    """Returns the seconds of each of `count` runs of a collective."""
    call = self._calls[kind, num_bytes]
    return calls.seconds_of(lambda: jax.block_until_ready(call()), count)[0]

  def measure_link(self, budget: float) -> tuple[float, float, float]:
    """Returns what `edgc_jax.measure_link` measures."""
    start = time.perf_counter()
    found = edgc_jax.measure_link(self._mesh, _AXIS, budget=budget)
    return found.latency, found.bandwidth, found.r_squared, time.perf_counter() - start


if __name__ == "__main__":
  calls.serve(LinksHost)
