"""Step times on hosts with real, slow links, beside PyTorch's.

  sudo python experiments/bench_network.py --config=configs/gpt2_10m.py

Brings up virtual hosts with a shaped uplink each (Linux, root, iproute2), one
process a host and framework, and times training steps: at every link speed all
methods in turn, round after round, so that whatever else the machine does hits
them alike. Everything is removed at the end, also after Ctrl-C. All that was
measured goes to --output as JSON, and to a page with pictures beside it.
"""

import pathlib
import sys

# `experiments` lies in the repository, and is not installed.
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

import json
import os
import platform
import signal
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from typing import Any

from absl import app, flags
from ml_collections import ConfigDict, config_flags

from experiments.network import page, virtual_hosts
from experiments.network.calls import HostError, Hosts
from experiments.network.results import NO_EXCHANGE, load
from experiments.network.rows import ROWS, Layout, Row
from experiments.network.virtual_hosts import VirtualHosts
from experiments.run_folder import environment

_CONFIG = config_flags.DEFINE_config_file(
  "config", "configs/gpt2_10m.py", "A file in configs/."
)
_HOSTS = flags.DEFINE_list("hosts", ["2", "4"], "How many hosts.")
_STAGES = flags.DEFINE_bool("stages", True, "Also 2 stages of 2 replicas.")
_RATES = flags.DEFINE_list(
  "rates", ["50", "100", "300", "1000"], "Mbit/s of an uplink."
)
_ROUNDS = flags.DEFINE_integer(
  "rounds", 3, "How often each row is timed.", lower_bound=1
)
_THREADS = flags.DEFINE_integer(
  "threads", 0, "Of each host; 0 for its share of the cores.", lower_bound=0
)
_PEER = flags.DEFINE_bool("peer", True, "PyTorch, too, where it is installed.")
_ADVISE = flags.DEFINE_bool("advise", True, "Also compare the advice.")
_ROWS = flags.DEFINE_multi_string("row", [], "Only such rows; else all.")
_OUTPUT = flags.DEFINE_string("output", "docs/network.json", "The JSON file.")
_FOLDER = flags.DEFINE_string("folder", "runs/network", "For logs.")

_HERE = pathlib.Path(__file__).resolve().parent / "network"
_PATIENCE = 900.0  # seconds for a call
_LONG = 1.5  # seconds; shorter steps are timed several at a time
_SEVERAL = 3
_PARTS = ("step", "compress", "communicate")


class Benchmark:
  """Measures one layout after the other."""

  def __init__(self, config: ConfigDict, output: pathlib.Path):
    """Args: the configuration, and the file for what is measured."""
    self._config, self._output = config, output
    about = environment()
    versions = about["versions"] | _peer_version()
    self._found: dict[str, Any] = {
      "config": config.name,
      "tokens": config.batch_size // config.mesh.data * config.model.context,
      "rounds": _ROUNDS.value, "commit": about["commit"],
      "machine": _processor(), "cores": len(os.sched_getaffinity(0)),
      "versions": ", ".join(f"{k} {v}" for k, v in versions.items()),
      "rows": [], "advice": [], "failures": [],
    }  # fmt: skip

  def measure(self, layout: Layout, rates: Sequence[float]) -> None:
    """All rows on a layout at all link speeds."""
    print(f"--- {layout.name}", flush=True)
    with VirtualHosts(layout.hosts) as network:
      frameworks = ["jax"]
      if _PEER.value and _peer_version() and layout.stages == 1:
        frameworks.append("torch")
      processes = {
        framework: self._start(network, framework, layout)
        for framework in frameworks
      }
      try:
        rows = list(self._build(processes, layout))
        processes["jax"].call("compiled", timeout=_PATIENCE)
        for rate in rates:
          network.shape(rate * 1e6)
          self._rounds(network, layout, rate, processes, rows)
          if _ADVISE.value and layout.stages == 1:
            self._advise(layout, rate, processes["jax"])
          self._write()
      finally:
        for hosts in processes.values():
          hosts.close()

  def _start(
    self, network: VirtualHosts, framework: str, layout: Layout
  ) -> Hosts:
    folder = pathlib.Path(_FOLDER.value)
    folder.mkdir(parents=True, exist_ok=True)
    threads = str(_threads(layout))
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
  ) -> Iterator[Row]:
    """Compiles every row, and yields what can be run."""
    for row in ROWS:
      is_wanted = not _ROWS.value or row.name in _ROWS.value
      if row.framework not in processes or not is_wanted:
        continue
      config = self._config_of(layout)
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
      self._found["params"] = about["params"]
      yield row

  def _rounds(
    self,
    network: VirtualHosts,
    layout: Layout,
    rate: float,
    processes: Mapping[str, Hosts],
    rows: Sequence[Row],
  ) -> None:
    """Times all rows in turn."""
    found: dict[tuple[str, str, str], dict[str, Any]] = {}
    for _ in range(_ROUNDS.value):
      for row in rows:
        has_parts = row.framework == "jax" and layout.stages == 1
        for part in _PARTS if has_parts else _PARTS[:1]:
          if part != "step" and row.name == NO_EXCHANGE:
            continue
          entry = found.setdefault(
            (row.framework, row.name, part),
            {
              "layout": layout.name, "hosts": layout.hosts,
              "threads": _threads(layout),
              "replicas": layout.hosts // layout.stages, "rate": rate,
              "framework": row.framework, "row": row.name, "part": part,
              "seconds": [], "sent_bytes": [],
            },
          )  # fmt: skip
          is_long = max(entry["seconds"], default=_LONG) >= _LONG
          count = 1 if is_long else _SEVERAL
          before = network.sent_bytes(0)
          answers = processes[row.framework].call(
            "run", timeout=_PATIENCE, name=row.name, part=part, count=count
          )
          sent = network.sent_bytes(0) - before
          # Those who wait for nobody may be done earlier than others.
          seconds = [answer["seconds"] for answer in answers]
          entry["seconds"] += map(max, zip(*seconds, strict=True))
          entry["sent_bytes"].append(sent / count)
          if "wire_bytes" in answers[0]:
            entry["wire_bytes"] = answers[0]["wire_bytes"]
    for key, entry in found.items():
      middle = statistics.median(entry["seconds"])
      print(f"{rate:g} Mbit/s, {', '.join(key)}: {middle:.3f} s", flush=True)
    self._found["rows"] += found.values()

  def _advise(self, layout: Layout, rate: float, hosts: Hosts) -> None:
    """Asks for the advice that a user would get."""
    config = self._config_of(layout)
    answers = hosts.call("advise", timeout=_PATIENCE, config=config.to_dict())
    print(f"{rate:g} Mbit/s: advice is {answers[0]['choice']}", flush=True)
    about = {"layout": layout.name, "rate": rate}
    self._found["advice"].append(about | answers[0])

  def _config_of(self, layout: Layout) -> ConfigDict:
    """The configuration on a layout; a replica's batch is that of the file."""
    config = self._config.copy_and_resolve_references()
    rows_each = config.batch_size // config.mesh.data
    config.mesh.stage = layout.stages
    config.mesh.data = layout.hosts // layout.stages
    config.mesh.backend = "shard_map" if layout.stages > 1 else "pmap"
    config.pipeline.align = "none"  # each row has one rank for all stages
    config.batch_size = rows_each * config.mesh.data
    return config

  def _write(self) -> None:
    self._output.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(self._found, indent=1, allow_nan=False)
    self._output.write_text(text + "\n")


def _threads(layout: Layout) -> int:
  """Of a host's process."""
  cores = len(os.sched_getaffinity(0))
  return _THREADS.value or max(1, cores // layout.hosts)


def _peer_version() -> dict[str, str]:
  try:
    return {"torch": metadata.version("torch")}
  except metadata.PackageNotFoundError:
    return {}


def _processor() -> str:
  """Its name, as Linux gives it."""
  for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines():
    if line.startswith("model name"):
      return line.split(":", 1)[1].strip()
  return platform.machine()


def main(argv: Sequence[str]) -> None:
  """Measures, and writes the JSON file and the page."""
  del argv
  for number in (signal.SIGTERM, signal.SIGHUP):
    if signal.getsignal(number) != signal.SIG_IGN:  # as under nohup
      # An exception, so that `with` cleans up.
      signal.signal(number, lambda number, _: sys.exit(128 + number))
  unknown = set(_ROWS.value) - {row.name for row in ROWS}
  if unknown:
    names = ", ".join(repr(row.name) for row in ROWS if row.framework == "jax")
    sys.exit(f"error: `--row` must be of {names}, got {unknown.pop()!r}.")
  reason = virtual_hosts.why_not()
  if reason:
    sys.exit(f"error: there can be no virtual hosts here: {reason}.")
  output = pathlib.Path(_OUTPUT.value)
  benchmark = Benchmark(_CONFIG.value, output)
  try:
    rates = [float(rate) for rate in _RATES.value]
    layouts = [Layout(int(count)) for count in _HOSTS.value]
    if min(rates) <= 0 or min(layout.hosts for layout in layouts) < 2:
      raise ValueError("a rate must be above 0, and hosts at least 2")
  except ValueError as error:
    sys.exit(
      "error: `--rates` and `--hosts` must be such as 50,100 and 2,4, got"
      f" {_RATES.value} and {_HOSTS.value}: {error}."
    )
  if _STAGES.value:
    layouts.append(Layout(4, 2))
  command = " ".join(["bench_network.py", *sys.argv[1:]])
  for layout in layouts:
    benchmark.measure(layout, rates)
    results = load(output)
    if results.cells:
      page.write(results, output.with_suffix(".md"), command)


if __name__ == "__main__":
  app.run(main)
