"""Step times on hosts with real, slow links, beside PyTorch's.

  sudo python experiments/bench_network.py --config=configs/gpt2_10m.py

Brings up virtual hosts with a shaped uplink each (Linux, root, iproute2), one
process a host and framework, and times training steps: at every link speed all
methods in turn, round after round, so that whatever else the machine does hits
them alike. Everything is removed at the end, also after Ctrl-C. All that was
measured goes to --output as JSON; `network_page` makes the page of it.
"""

import pathlib
import sys

# `experiments` lies in the repository, and is not installed.
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

import dataclasses
import json
import os
import signal
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from absl import app, flags
from ml_collections import ConfigDict, config_flags

from experiments.network import virtual_hosts
from experiments.network.calls import HostError, Hosts
from experiments.network.virtual_hosts import VirtualHosts

_CONFIG = config_flags.DEFINE_config_file(
  "config", "configs/gpt2_10m.py", "A file in configs/."
)
_HOSTS = flags.DEFINE_list("hosts", ["2", "4"], "How many hosts.")
_STAGES = flags.DEFINE_bool("stages", True, "Also 2 stages of 2 replicas.")
_RATES = flags.DEFINE_list(
  "rates", ["50", "100", "300", "1000"], "Mbit/s of an uplink."
)
_ROUNDS = flags.DEFINE_integer("rounds", 3, "How often each row is timed.")
_PEER = flags.DEFINE_bool("peer", True, "PyTorch, too, where it is installed.")
_ROWS = flags.DEFINE_list("rows", [], "Only these rows; else all.")
_OUTPUT = flags.DEFINE_string("output", "docs/network.json", "The JSON file.")
_FOLDER = flags.DEFINE_string("folder", "runs/network", "For logs.")

_HERE = pathlib.Path(__file__).resolve().parent / "network"
_PATIENCE = 900.0  # seconds for a call
_LONG = 1.5  # seconds; shorter steps are timed several at a time
_SEVERAL = 3


@dataclasses.dataclass(frozen=True)
class Row:
  """A way to train, of one framework."""

  name: str
  framework: str  # jax or torch
  settings: Mapping[str, Any]  # of the configuration, or arguments of `build`


ROWS = (
  Row("no exchange", "jax", {"reducer": "none"}),
  Row("dense", "jax", {"reducer": "allreduce"}),
  Row(
    "dense, bf16", "jax",
    {"reducer": "allreduce", "allreduce.wire_dtype": "bfloat16"},
  ),
  Row("powersgd 32", "jax", {"reducer": "powersgd", "powersgd.rank": 32.0}),
  Row("powersgd 8", "jax", {"reducer": "powersgd", "powersgd.rank": 8.0}),
  Row(
    "edgc 32", "jax",
    {"reducer": "edgc", "edgc.rank_max": 32, "edgc.rank_min": 32},
  ),
  Row(
    "edgc 8", "jax",
    {"reducer": "edgc", "edgc.rank_max": 8, "edgc.rank_min": 8},
  ),
  Row("no exchange", "torch", {"hook": "none"}),
  Row("dense", "torch", {"hook": "dense"}),
  Row("dense, bf16", "torch", {"hook": "bf16"}),
  Row("powersgd 32", "torch", {"hook": "powersgd", "rank": 32}),
  Row("powersgd 8", "torch", {"hook": "powersgd", "rank": 8}),
)  # fmt: skip
_PARTS = ("step", "compress", "communicate")


@dataclasses.dataclass(frozen=True)
class Layout:
  """Which hosts there are, and what they are for each other."""

  hosts: int
  stages: int = 1

  @property
  def name(self) -> str:
    if self.stages == 1:
      return f"{self.hosts} replicas"
    return f"{self.stages} stages of {self.hosts // self.stages} replicas"


class Benchmark:
  """Measures one layout after the other."""

  def __init__(self, config: ConfigDict, output: pathlib.Path):
    """Args: the configuration, and the file for what is measured."""
    self._config, self._output = config, output
    self._found: dict[str, Any] = {
      "cores": len(os.sched_getaffinity(0)), "rows": [], "failures": [],
    }  # fmt: skip

  def measure(self, layout: Layout, rates: Sequence[float]) -> None:
    """All rows on a layout at all link speeds."""
    print(f"--- {layout.name}", flush=True)
    with VirtualHosts(layout.hosts) as network:
      frameworks = ["jax"]
      if _PEER.value and layout.stages == 1:
        frameworks.append("torch")
      processes = {
        framework: self._start(network, framework, layout)
        for framework in frameworks
      }
      try:
        rows = list(self._build(processes, layout))
        for rate in rates:
          network.shape(rate * 1e6)
          self._rounds(network, layout, rate, processes, rows)
          self._write()
      finally:
        for hosts in processes.values():
          hosts.close()

  def _start(
    self, network: VirtualHosts, framework: str, layout: Layout
  ) -> Hosts:
    folder = pathlib.Path(_FOLDER.value)
    folder.mkdir(parents=True, exist_ok=True)
    threads = str(self._found["cores"])
    environment = os.environ | {
      "JAX_PLATFORMS": "cpu",
      "NPROC": threads,
      "OMP_NUM_THREADS": threads,
      "GLOO_SOCKET_IFNAME": "eth0",
    }
    port = {"jax": 12345, "torch": 12346}[framework]
    script = str(_HERE / f"{framework}_host.py")
    processes = [
      network.start(
        index,
        [
          sys.executable, script, str(index), str(layout.hosts),
          f"{virtual_hosts.address(0)}:{port}",
        ],
        environment,
        folder / f"{framework}-{layout.name.replace(' ', '-')}-{index}.log",
      )
      for index in range(layout.hosts)
    ]  # fmt: skip
    return Hosts(framework, processes)

  def _build(
    self, processes: Mapping[str, Hosts], layout: Layout
  ) -> Iterator[tuple[Row, dict[str, Any]]]:
    """Compiles every row, and yields what can be run."""
    for row in ROWS:
      is_wanted = not _ROWS.value or row.name in _ROWS.value
      if row.framework not in processes or not is_wanted:
        continue
      config = self._config.copy_and_resolve_references()
      config.mesh.stage = layout.stages
      config.mesh.data = layout.hosts // layout.stages
      config.mesh.backend = "shard_map" if layout.stages > 1 else "pmap"
      rows_each = self._config.batch_size // self._config.mesh.data
      config.batch_size = rows_each * config.mesh.data
      arguments = {}
      if row.framework == "jax":
        config.update_from_flattened_dict(dict(row.settings))
      else:
        arguments = dict(row.settings)
      hosts, start = processes[row.framework], time.monotonic()
      try:
        about = hosts.call(
          "build", timeout=_PATIENCE, name=row.name, config=config.to_dict(),
          **arguments,
        )[0]  # fmt: skip
        hosts.call(
          "run", timeout=_PATIENCE, name=row.name, part="step", count=3
        )
      except HostError as error:
        print(f"{row.framework}, {row.name}: {error}", flush=True)
        self._found["failures"].append(
          {"layout": layout.name, "framework": row.framework,
           "row": row.name, "error": str(error)}
        )  # fmt: skip
        continue
      seconds = time.monotonic() - start
      print(f"{row.framework}, {row.name}: built in {seconds:.0f} s")
      yield row, about

  def _rounds(
    self,
    network: VirtualHosts,
    layout: Layout,
    rate: float,
    processes: Mapping[str, Hosts],
    rows: Sequence[tuple[Row, dict[str, Any]]],
  ) -> None:
    """Times all rows in turn."""
    found: dict[tuple[str, str, str], dict[str, Any]] = {}
    for _ in range(_ROUNDS.value):
      for row, about in rows:
        has_parts = row.framework == "jax" and layout.stages == 1
        for part in _PARTS if has_parts else _PARTS[:1]:
          if part != "step" and row.name == "no exchange":
            continue
          entry = found.setdefault(
            (row.framework, row.name, part),
            {
              "layout": layout.name, "hosts": layout.hosts,
              "replicas": layout.hosts // layout.stages, "rate": rate,
              "framework": row.framework, "row": row.name, "part": part,
              "params": about["params"], "seconds": [], "sent_bytes": [],
            },
          )  # fmt: skip
          is_long = max(entry["seconds"], default=_LONG) >= _LONG
          count = 1 if is_long else _SEVERAL
          before = network.sent_bytes(0)
          answers = processes[row.framework].call(
            "run", timeout=_PATIENCE, name=row.name, part=part, count=count
          )
          sent = network.sent_bytes(0) - before
          entry["seconds"] += answers[0]["seconds"]
          entry["sent_bytes"].append(sent / count)
          if "wire_bytes" in answers[0]:
            entry["wire_bytes"] = answers[0]["wire_bytes"]
    for key, entry in found.items():
      middle = statistics.median(entry["seconds"])
      print(f"{rate:g} Mbit/s, {', '.join(key)}: {middle:.3f} s", flush=True)
    self._found["rows"] += found.values()

  def _write(self) -> None:
    self._output.parent.mkdir(parents=True, exist_ok=True)
    self._output.write_text(json.dumps(self._found, indent=1) + "\n")


def main(argv: Sequence[str]) -> None:
  """Measures, and writes the JSON file."""
  del argv
  # An exception, so that `with` cleans up.
  signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
  reason = virtual_hosts.why_not()
  if reason:
    sys.exit(f"error: there can be no virtual hosts here: {reason}.")
  benchmark = Benchmark(_CONFIG.value, pathlib.Path(_OUTPUT.value))
  rates = [float(rate) for rate in _RATES.value]
  layouts = [Layout(int(count)) for count in _HOSTS.value]
  if _STAGES.value:
    layouts.append(Layout(4, 2))
  for layout in layouts:
    benchmark.measure(layout, rates)


if __name__ == "__main__":
  app.run(main)
