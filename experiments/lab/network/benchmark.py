"""Measures step times on virtual hosts, row by row and round by round."""

import dataclasses
import itertools
import os
import pathlib
import re
import statistics
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from ml_collections import ConfigDict

from experiments.lab.network.calls import HostError, Hosts
from experiments.lab.network.results import (
  NO_EXCHANGE,
  ROWS,
  STAGED,
  Layout,
  Results,
  link_name,
)
from experiments.lab.network.virtual_hosts import VirtualHosts

_TIMEOUT, _RUN_TIMEOUT = 900.0, 180.0  # seconds for a call
# Seconds. Shorter steps are timed several at a time. Longer ones mostly wait
# and vary little, so they are timed twice, and their communication once.
_LONG, _SEVERAL = 1.5, 3
# Round trips that a part of a transfer lasts, so that TCP learns the speed, if
# the most bytes allow it; the most transfers.
_ROUND_TRIPS, _MOST_BYTES, _MOST_TRANSFERS = 10, 2**26, 10
_FIRST_STEPS = 3  # PyTorch's PowerSGD hook starts dense
_PORTS = {"jax": 12345, "torch": 12346}


@dataclasses.dataclass
class Benchmark:
  """A benchmark that measures layouts one after the other.

  Attributes:
    config: The configuration of all rows.
    rows: Names of the rows to measure.
    advised: A regular expression. Of the methods that `advise` chooses from,
      those that match are measured, and its advice is kept, where each host is
      a replica; empty for none.
    most_steps: Local steps of such a method, at most.
    rounds: Number of timed rounds.
    has_peer: Whether to measure PyTorch, too.
    logs: The folder of the hosts' logs.
    results: Where the measurements go.
  """

  config: ConfigDict
  rows: Collection[str]
  advised: str
  most_steps: int
  rounds: int
  has_peer: bool
  logs: pathlib.Path
  results: Results

  def measure(
    self, layout: Layout, rates: Sequence[float], round_trips: Sequence[float]
  ) -> None:
    """Measures all rows on a layout, over all links.

    Args:
      layout: The layout.
      rates: Speeds of the uplinks in Mbit/s.
      round_trips: Round-trip times in ms, each of which all speeds have.
    """
    print(f"--- {layout.name}", flush=True)
    self.results.begin(layout.name)
    self._layout, self._hosts, self._slowest = layout, {}, 0.0
    self._rows = {name: ROWS[name] for name in ROWS if name in self.rows}
    frameworks = ["jax"]
    if self.has_peer and layout.has_replicas_only:
      frameworks.append("torch")
    with VirtualHosts(layout.hosts) as network:
      try:
        for framework in frameworks:
          self._hosts[framework] = self._start(network, framework)
        config = self._config().to_dict()
        has_advice = bool(self.advised) and layout.has_replicas_only
        if has_advice:
          candidates, *_ = self._call(
            "jax",
            "advice",
            "candidates",
            config=config,
            most_steps=self.most_steps,
          ) or [{}]
          plain = {NO_EXCHANGE: ROWS[NO_EXCHANGE]}  # where advice starts from
          found = {
            name: {"jax": own}
            for name, own in candidates.items()
            if re.search(self.advised, name)
          }
          self._rows = plain | found | self._rows
        rows = [
          (framework, name)
          for framework in frameworks
          for name, row in self._rows.items()
          if framework in row
          and (name in STAGED or layout.stages == 1)
          and self._is_built(framework, name)
        ]
        has_advice = has_advice and self._call(
          "jax", "advice", "measure_costs", config=config
        )
        for hosts in self._hosts.values():
          hosts.call("built", timeout=_TIMEOUT)
        for round_trip, rate in itertools.product(round_trips, rates):
          network.shape(rate * 1e6, round_trip / 1e3)
          # At least a dense exchange, and twice one of two hosts; round trips.
          bits = 64 * self.results.found.get("params", 0)
          self._slowest = bits / rate / 1e6 + round_trip * layout.hosts / 100
          link = {"rate": rate, "round_trip": round_trip}
          self._settle(**link)
          self._time(network, link, rows)
          advice = has_advice and self._call(
            "jax", "advice", "advise", config=config
          )
          if advice:
            choice = advice[0]["choice"]
            print(f"{link_name(**link)}: advice is {choice}", flush=True)
            self.results.add("advice", **link, **advice[0])
          self.results.write()
      finally:
        for hosts in self._hosts.values():
          hosts.close()

  def _start(self, network: VirtualHosts, framework: str) -> Hosts:
    layout, threads = self._layout, str(self._threads())
    own = {
      "jax": {
        "JAX_PLATFORMS": "cpu", "NPROC": threads,
        "JAX_NUM_CPU_DEVICES": str(layout.shards),
      },
      "torch": {"OMP_NUM_THREADS": threads},
    }[framework]  # fmt: skip
    logs = self.logs / layout.name.replace(" ", "-")
    return network.start(framework, own, logs, _PORTS[framework])

  def _is_built(self, framework: str, name: str) -> bool:
    """Compiles a row, runs it, and returns whether it can run."""
    config = self._config()
    arguments = self._rows[name][framework]
    if framework == "jax":
      config.update_from_flattened_dict(dict(arguments))
      arguments = {}
    start = time.monotonic()
    about = self._call(
      framework, name, "build", name=name, config=config.to_dict(), **arguments
    )
    if not about or not all(
      self._call(framework, name, "run", name=name, part=part,
                 count=_FIRST_STEPS if part == "step" else 1)
      for part in self._parts(framework, name)
    ):  # fmt: skip
      return False
    print(
      f"{framework}, {name}: built in {time.monotonic() - start:.0f} s",
      flush=True,
    )
    params = about[0]["params"]
    if params != self.results.found.setdefault("params", params):
      sys.exit(
        f"error: `--output` must be of this model, of {params:,} parameters,"
        f" got {self.results.found['params']:,} in the file or in an earlier"
        " row; give another file."
      )
    return True

  def _settle(self, rate: float, round_trip: float) -> None:
    """Sends until the connections have adapted to a link that has changed.

    TCP learns the speed of a link from transfers that last for several round
    trips. Those of a small model do not: they would go on at the speed of the
    link before, lose packets or wait for many steps. Without a round trip TCP
    adapts at once.

    Args:
      rate: Speed of the uplinks in Mbit/s.
      round_trip: Time of a round trip in ms.
    """
    if not round_trip:
      return
    link_bytes = rate * 1e6 / 8 * round_trip / 1e3  # of a round trip
    parts = self._layout.replicas  # of an all-reduce
    size = int(min(_MOST_BYTES, _ROUND_TRIPS * parts * link_bytes))
    for framework in list(self._hosts):
      seconds: list[float] = []
      while len(seconds) < _MOST_TRANSFERS and (
        len(seconds) < 3 or min(seconds[-2:]) < 0.9 * min(seconds[:-2])
      ):
        answers = self._call(framework, "settle", "settle", num_bytes=size)
        if not answers:
          break
        seconds.append(max(answers))

  def _time(
    self,
    network: VirtualHosts,
    link: Mapping[str, float],
    rows: Sequence[tuple[str, str]],
  ) -> None:
    """Times all rows in turn; each round starts with another row."""
    found: dict[tuple[str, str, str], dict[str, Any]] = {}
    for number in range(self.rounds):
      first = number * len(rows) // self.rounds
      for framework, name in (*rows[first:], *rows[:first]):
        for part in self._parts(framework, name):
          entry = found.setdefault(
            (framework, name, part), {"seconds": [], "sent_bytes": []}
          )
          # Of a run: with local steps a whole round.
          longest = self._steps(name) * max(entry["seconds"], default=_LONG)
          if longest > _LONG and number >= (1 if part == "communicate" else 2):
            continue
          count = 1 if longest >= _LONG else _SEVERAL
          before = network.sent_bytes(0)
          answers = self._call(
            framework, name, "run", name=name, part=part, count=count
          )
          if not answers:
            break
          sent = network.sent_bytes(0) - before
          # A host that waits for no other may finish earlier.
          seconds = [answer.pop("seconds") for answer in answers]
          entry["seconds"] += map(max, zip(*seconds, strict=True))
          entry["sent_bytes"].append(sent / count / self._steps(name))
          entry |= answers[0]
    for key, entry in found.items():
      if entry["seconds"]:
        middle = statistics.median(entry["seconds"])
        print(
          f"{link_name(**link)}, {', '.join(key)}: {middle:.3f} s", flush=True
        )
        names = dict(zip(("framework", "row", "part"), key, strict=True))
        threads = self._threads()
        self.results.add("rows", threads=threads, **link, **names, **entry)

  def _call(
    self, framework: str, row: str, function: str, **arguments: Any
  ) -> list[Any]:
    """Calls a function on all hosts.

    A failure is recorded, and hosts that can no longer be called are left out.

    Returns:
      The answers of all hosts; empty after a failure.
    """
    if framework not in self._hosts:
      return []
    hosts = self._hosts[framework]
    is_short = function in ("run", "advise")
    timeout = _RUN_TIMEOUT if is_short else _TIMEOUT
    if function == "run":
      timeout *= self._steps(row)
      timeout += arguments["count"] * self._slowest
    try:
      return hosts.call(function, timeout=timeout, **arguments)
    except HostError as error:
      print(f"{framework}, {row}: {error}", flush=True)
      self.results.add(
        "failures", framework=framework, row=row, error=str(error)
      )
      if hosts.is_broken:
        self._hosts.pop(framework).close()
      return []

  def _parts(self, framework: str, name: str) -> Sequence[str]:
    """Returns the parts of a row to time: the step, and if possible others."""
    has_parts = framework == "jax" and self._layout.has_replicas_only
    if not has_parts or name == NO_EXCHANGE or self._steps(name) > 1:
      return ("step",)
    return ("step", "compress", "communicate")

  def _steps(self, name: str) -> int:
    """Returns the steps of a run of a row: those of a round."""
    return self._rows[name].get("jax", {}).get("local.every", 1)

  def _threads(self) -> int:
    """Returns the number of threads of a host's process: its share of cores."""
    shards = self._layout.shards
    # Devices that wait for each other need two each: see cpu_backend.
    least = 2 * shards if shards > 1 else 1
    return max(least, len(os.sched_getaffinity(0)) // self._layout.hosts)

  def _config(self) -> ConfigDict:
    """Returns the configuration on the layout; a replica keeps its batch."""
    config, layout = self.config.copy_and_resolve_references(), self._layout
    config.batch_size = config.batch_size // config.mesh.data * layout.replicas
    config.mesh.update(
      data=layout.replicas, stage=layout.stages, fsdp=layout.shards, tensor=1,
      backend="pmap" if layout.has_replicas_only else "jit",
    )  # fmt: skip
    config.pipeline.align = "none"  # each row has one rank for all stages
    return config
