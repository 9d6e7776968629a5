"""Measures the links of virtual hosts, and collectives over them.

  sudo python -m experiments.lab.network.links --hosts=2 --rate=100

Prints one table of packets between two hosts, and one of collectives between
all of them next to the model

  seconds = k round trips + bytes of a ring / rate

with k = 2 (N - 1) for an all-reduce over N hosts, and half of that for each of
its halves, an exchange of parts and a gathering (`edgc_jax.wire.averages`).
"""

import itertools
import pathlib
import statistics
from collections.abc import Sequence

import numpy as np
from absl import app, flags

from edgc_jax.wire.link_model import ring_bytes
from experiments.lab.network import virtual_hosts
from experiments.lab.network.calls import Hosts
from experiments.lab.network.virtual_hosts import ONE_THREAD, VirtualHosts

_HOSTS = flags.DEFINE_integer(
  "hosts", 2, "Number of hosts.", lower_bound=2, upper_bound=200
)
_ROUND_TRIPS = flags.DEFINE_multi_float(
  "round_trip", [1.0, 20.0, 100.0], "Round-trip time in ms.", lower_bound=0.0,
  upper_bound=6e4,
)  # fmt: skip
_RATES = flags.DEFINE_multi_float(
  "rate", [100.0, float("inf")], "Speed of the uplinks in Mbit/s.",
  lower_bound=1e-3,
)  # fmt: skip
_KINDS = flags.DEFINE_multi_enum(
  "kind", ["all-reduce"], ["all-reduce", "exchange", "gather"], "A collective."
)
_SIZES = flags.DEFINE_multi_integer(
  "size", [4, 2**16, 2**20, 2**23], "Bytes of the whole array.", lower_bound=4
)
_RUNS = flags.DEFINE_integer("runs", 7, "Number of runs.", lower_bound=2)
_FOLDER = flags.DEFINE_string("folder", "runs/links", "The folder of logs.")
_TIMEOUT = 300.0
_FASTEST = 2e9  # bits per second: how much is sent over a link without limit
_SECONDS = 3.0  # of sending


def main(argv: Sequence[str]) -> None:
  """Measures all links and prints the tables."""
  del argv
  virtual_hosts.exit_unless_possible(_ROUND_TRIPS.value)
  count = _HOSTS.value
  # Fewer bytes cannot be shared.
  cases = [
    (kind, size)
    for kind, size in itertools.product(_KINDS.value, _SIZES.value)
    if kind == "all-reduce" or size >= 4 * count
  ]
  with VirtualHosts(count) as network:
    logs = pathlib.Path(_FOLDER.value)
    hosts = network.start("links", ONE_THREAD, logs)
    try:
      for kind, size in cases:
        hosts.call("build", timeout=_TIMEOUT, kind=kind, num_bytes=size)
      hosts.call("built", timeout=_TIMEOUT)
      for trip, rate in itertools.product(_ROUND_TRIPS.value, _RATES.value):
        network.shape(rate * 1e6, trip / 1e3)
        print(f"--- {count} hosts, {trip:g} ms, {rate:g} Mbit/s")
        print(_packets(hosts, rate * 1e6))
        for kind, size in cases:
          print(_collective(hosts, kind, size, trip / 1e3, rate * 1e6))
        latency, bandwidth = hosts.call("measure_link", timeout=_TIMEOUT)[0]
        print(
          f"measure_link: {1e3 * latency:.1f} ms, {bandwidth / 1e6:.2f} MB/s",
          flush=True,
        )
    finally:
      hosts.close()


def _packets(hosts: Hosts, rate: float) -> str:
  """Returns times of single packets, and the speed of many."""
  pings = hosts.call("ping", timeout=_TIMEOUT, count=200)[1]
  middle, high = 1e3 * np.quantile(pings, [0.5, 0.99])
  total = int(min(rate, _FASTEST) / 8 * _SECONDS)
  # The first call is TCP's slow start.
  *_, seconds = (
    hosts.call("send", timeout=_TIMEOUT, num_bytes=total)[1] for _ in range(2)
  )
  return (
    f"ping: median {middle:.2f} ms, 99th percentile {high:.2f};"
    f" {total * 8 / seconds / 1e6:.1f} Mbit/s in {total / 1e6:.0f} MB"
  )


def _collective(
  hosts: Hosts, kind: str, size: int, trip: float, rate: float
) -> str:
  """Returns the time of a collective, and what the model says."""
  answers = hosts.call(
    "run", timeout=_TIMEOUT, kind=kind, num_bytes=size, count=_RUNS.value
  )
  seconds = [max(each) for each in zip(*answers, strict=True)]
  middle = statistics.median(seconds)
  count = len(answers)
  whole = 2 * (count - 1) * trip + ring_bytes(size, count) / (rate / 8)
  model = whole if kind == "all-reduce" else whole / 2
  return (
    f"{kind}, {size} bytes: {1e3 * middle:.1f} ms ({1e3 * min(seconds):.1f} to"
    f" {1e3 * max(seconds):.1f}), model {1e3 * model:.1f}"
  )


if __name__ == "__main__":
  app.run(main)
