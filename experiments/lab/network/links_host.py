"""A host of `links` that times its packets and its collectives."""

import socket
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import edgc_jax
from edgc_jax.wire import collectives
from experiments.lab.network import calls

_AXIS, _PORT = "data", 12347
# From [n], what is sent; N hosts share n values.
_COLLECTIVES: dict[str, Callable[[jax.Array, int], Any]] = {
  "all-reduce": lambda x, hosts: collectives.mean(x, _AXIS),
  "exchange": lambda x, hosts: collectives.exchange_parts(
    x[: x.size // hosts * hosts].reshape(hosts, -1), _AXIS
  ),
  "gather": lambda x, hosts: collectives.gather(x[: x.size // hosts], _AXIS),
}


class LinksHost:
  """The functions that the benchmark calls."""

  def __init__(self, index: int, count: int, address: str):
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    first = (address.split(":")[0], _PORT)
    server = socket.create_server(first) if index == 0 else None
    jax.distributed.initialize(address, count, index)  # waits for all hosts
    self._index, self._count = index, count
    self._mesh = jax.make_mesh((count,), (_AXIS,), axis_types=(AxisType.Auto,))
    self._calls: dict[tuple[str, int], Callable[[], Any]] = {}
    if server:
      with server:
        self._peer, _ = server.accept()
    elif index == 1:
      self._peer = socket.create_connection(first)
    if index < 2:
      self._peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

  def ping(self, count: int) -> list[float]:
    """Returns the seconds of `count` round trips of a byte; only on host 1."""
    seconds = []
    for _ in range(count if self._index < 2 else 0):
      start = time.perf_counter()
      if self._index:
        self._peer.sendall(b"?")
      self._peer.recv(1)
      if self._index:
        seconds.append(time.perf_counter() - start)
      else:
        self._peer.sendall(b"!")
    return seconds

  def send(self, num_bytes: int) -> float:
    """Sends from host 1 to host 0; returns the seconds until the answer."""
    block, left = bytearray(2**20), num_bytes
    start = time.perf_counter()
    while left and self._index < 2:
      part = memoryview(block)[: min(left, len(block))]
      left -= (
        self._peer.send(part) if self._index else self._peer.recv_into(part)
      )
    if self._index == 0:
      self._peer.sendall(b"!")
    elif self._index == 1:
      self._peer.recv(1)
    return time.perf_counter() - start

  def build(self, kind: str, num_bytes: int) -> None:
    """Compiles a collective of float32 values, and runs it."""
    spec = P(_AXIS)
    placed = NamedSharding(self._mesh, spec)
    shape = (self._count * (num_bytes // 4),)
    values = jax.jit(lambda: jnp.ones(shape), out_shardings=placed)()
    run = jax.shard_map(
      lambda x: _COLLECTIVES[kind](x, self._count).ravel()[:1],
      mesh=self._mesh, in_specs=spec, out_specs=spec, check_vma=False,
    )  # fmt: skip
    call = jax.jit(run)
    self._calls[kind, num_bytes] = lambda: call(values)
    self.run(kind, num_bytes, 1)

  def run(self, kind: str, num_bytes: int, count: int) -> list[float]:
    """Returns the seconds of each of `count` runs of a collective."""
    call = self._calls[kind, num_bytes]
    return calls.seconds_of(lambda: jax.block_until_ready(call()), count)[0]

  def measure_link(self) -> tuple[float, float]:
    """Returns latency and bandwidth as `edgc_jax.measure_link` finds them."""
    link = edgc_jax.measure_link(self._mesh, _AXIS)
    return link.latency, link.bandwidth


if __name__ == "__main__":
  calls.serve(LinksHost)
