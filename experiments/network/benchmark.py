"""Measures step times on virtual hosts, row by row and round by round."""

import dataclasses
import json
import os
import pathlib
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from importlib import metadata
from typing import Any

from ml_collections import ConfigDict

from experiments.network import virtual_hosts
from experiments.network.calls import HostError, Hosts
from experiments.network.results import ADVISED, NO_EXCHANGE, ROWS, Layout, Row
from experiments.network.virtual_hosts import VirtualHosts
from experiments.runs.run_folder import environment

_TIMEOUT, _RUN_TIMEOUT = 900.0, 180.0  # seconds for a call
# Seconds. Shorter steps are timed several at a time. Longer ones mostly wait
# and vary little, so they are timed twice, and their communication once.
_LONG, _SEVERAL = 1.5, 3
_FIRST_STEPS = 3  # PyTorch's PowerSGD hook starts dense


@dataclasses.dataclass(frozen=True)
class Options:
  """Options of the benchmark.

  Attributes:
    rows: Names of the rows to measure; all if empty.
    rounds: Number of timed rounds.
    threads: Threads per host; 0 for its share of the cores.
    has_peer: Whether to measure PyTorch, too, if it is installed.
    has_advice: Whether to compare the predictions of `advise`.
    keeps: Whether to keep the layouts of an older output that are not
      measured.
    folder: The folder of the hosts' logs.
  """

  rows: Sequence[str]
  rounds: int
  threads: int
  has_peer: bool
  has_advice: bool
  keeps: bool
  folder: pathlib.Path

  def asks_advice(self, layout: Layout) -> bool:
    """Returns whether to ask for advice and all of its methods are measured."""
    is_compared = not self.rows or set(self.rows) >= ADVISED
    return self.has_advice and layout.has_replicas_only and is_compared


class Benchmark:
  """A benchmark that measures layouts and collects the results in a file."""

  def __init__(
    self,
    config: ConfigDict,
    options: Options,
    output: pathlib.Path,
    command: str,
  ):
    """Measures nothing yet.

    Args:
      config: The configuration of all rows.
      options: What to measure.
      output: The JSON file to write.
      command: The command that started this run.

    Raises:
      ValueError: if the output to keep is of another configuration.
    """
    self._config, self._options, self._output = config, options, output
    self._start = time.monotonic()
    about = environment()
    versions = about["versions"] | _peer_version()
    self._run: dict[str, Any] = {
      "command": command, "layouts": [],
      "rounds": self._options.rounds, "commit": about["commit"],
      "machine": virtual_hosts.processor(),
      "cores": len(os.sched_getaffinity(0)),
      "versions": ", ".join(f"{k} {v}" for k, v in versions.items()),
    }  # fmt: skip
    model = {
      "config": config.name,
      "tokens": config.batch_size // config.mesh.data * config.model.context,
    }
    self._found: dict[str, Any] = model | {
      "runs": [], "rows": [], "advice": [], "failures": [],
    }  # fmt: skip
    if options.keeps and output.exists():
      self._found = json.loads(output.read_text())
      older = {key: self._found[key] for key in model}
      if older != model or "runs" not in self._found:
        raise ValueError(
          "`--keep` needs an output of this version and of the same"
          f" configuration, {model}, got {output} of {older}; choose another"
          " `--output`."
        )
    self._found["runs"].append(self._run)

  def measure(self, layout: Layout, rates: Sequence[float]) -> None:
    """Measures all rows on a layout, at all link speeds in Mbit/s."""
    print(f"--- {layout.name}", flush=True)
    self._forget(layout.name)
    self._run["layouts"].append(layout.name)
    with VirtualHosts(layout.hosts) as network:
      has_peer = self._options.has_peer and bool(_peer_version())
      frameworks = ["jax"]
      if has_peer and layout.has_replicas_only:
        frameworks.append("torch")
      processes = {
        framework: self._start_hosts(network, framework, layout)
        for framework in frameworks
      }
      has_advice = self._options.asks_advice(layout)
      try:
        rows = list(self._build(processes, layout))
        if has_advice:
          config = self._config_of(layout).to_dict()
          has_advice = self._call(
            processes, layout, "advice", "measure_costs", config=config
          )
        for hosts in processes.values():
          hosts.call("built", timeout=_TIMEOUT)
        for rate in rates:
          network.shape(rate * 1e6)
          self._rounds(network, layout, rate, processes, rows)
          if has_advice:
            self._advise(layout, rate, processes)
          self._write()
      finally:
        for hosts in processes.values():
          hosts.close()
        self._write()

  def _start_hosts(
    self, network: VirtualHosts, framework: str, layout: Layout
  ) -> Hosts:
    folder = self._options.folder
    folder.mkdir(parents=True, exist_ok=True)
    threads = str(self._threads(layout))
    port, own = {
      "jax": (
        12345,
        {
          "JAX_PLATFORMS": "cpu", "NPROC": threads,
          "JAX_NUM_CPU_DEVICES": str(layout.shards),
        },
      ),
      "torch": (
        12346, {"OMP_NUM_THREADS": threads, "GLOO_SOCKET_IFNAME": "eth0"},
      ),
    }[framework]  # fmt: skip
    module = f"experiments.network.{framework}_host"
    processes = [
      network.start(
        index,
        [
          sys.executable, "-m", module, str(index), str(layout.hosts),
          f"{virtual_hosts.address(0)}:{port}",
        ],
        os.environ | own,
        folder / f"{framework}-{layout.name.replace(' ', '-')}-{index}.log",
      )
      for index in range(layout.hosts)
    ]  # fmt: skip
    return Hosts(framework, processes)

  def _build(
    self, processes: dict[str, Hosts], layout: Layout
  ) -> Iterator[Row]:
    """Compiles every row, and yields the rows that can run."""
    for row in ROWS:
      is_wanted = not self._options.rows or row.name in self._options.rows
      if layout.stages > 1:
        is_wanted &= row.is_for_stages
      if row.framework not in processes or not is_wanted:
        continue
      config = self._config_of(layout)
      arguments = {}
      if row.framework == "jax":
        config.update_from_flattened_dict(dict(row.settings))
      else:
        arguments = dict(row.settings)
      start = time.monotonic()
      about = self._call(
        processes, layout, row, "build", name=row.name,
        config=config.to_dict(), **arguments,
      )  # fmt: skip
      parts = _parts(row, layout)
      if about and all(
        self._call(processes, layout, row, "run", name=row.name, part=part,
                   count=1 if part != "step" else _FIRST_STEPS)
        for part in parts
      ):  # fmt: skip
        built = f"built in {time.monotonic() - start:.0f} s"
        print(f"{row.framework}, {row.name}: {built}", flush=True)
        params = self._found.setdefault("params", about[0]["params"])
        if params != about[0]["params"]:
          raise RuntimeError(f"{row} has another model than the other rows.")
        yield row

  def _rounds(
    self,
    network: VirtualHosts,
    layout: Layout,
    rate: float,
    processes: dict[str, Hosts],
    rows: Sequence[Row],
  ) -> None:
    """Times all rows in turn; each round starts with another row."""
    found: dict[tuple[str, str, str], dict[str, Any]] = {}
    for number in range(self._options.rounds):
      first = number * len(rows) // self._options.rounds
      for row in (*rows[first:], *rows[:first]):
        for part in _parts(row, layout):
          entry = found.setdefault(
            (row.framework, row.name, part),
            {
              "layout": layout.name, "hosts": layout.hosts,
              "threads": self._threads(layout),
              "replicas": layout.hosts // layout.stages,
              "shards": layout.shards, "rate": rate,
              "framework": row.framework, "row": row.name, "part": part,
              "seconds": [], "sent_bytes": [],
            },
          )  # fmt: skip
          longest = max(entry["seconds"], default=_LONG)
          if longest > _LONG and number >= (1 if part == "communicate" else 2):
            continue
          count = 1 if longest >= _LONG else _SEVERAL
          before = network.sent_bytes(0)
          answers = self._call(
            processes, layout, row, "run", name=row.name, part=part,
            count=count,
          )  # fmt: skip
          if not answers:
            break
          sent = network.sent_bytes(0) - before
          # A host that waits for no other may finish earlier.
          seconds = [answer["seconds"] for answer in answers]
          entry["seconds"] += map(max, zip(*seconds, strict=True))
          entry["sent_bytes"].append(sent / count)
          if "wire_bytes" in answers[0]:
            entry["wire_bytes"] = answers[0]["wire_bytes"]
    for key, entry in found.items():
      if entry["seconds"]:
        middle = statistics.median(entry["seconds"])
        print(f"{rate:g} Mbit/s, {', '.join(key)}: {middle:.3f} s", flush=True)
        self._found["rows"].append(entry)

  def _advise(
    self, layout: Layout, rate: float, processes: dict[str, Hosts]
  ) -> None:
    """Records the advice that a user would get on these links."""
    config = self._config_of(layout).to_dict()
    answers = self._call(processes, layout, "advice", "advise", config=config)
    if answers:
      print(f"{rate:g} Mbit/s: advice is {answers[0]['choice']}", flush=True)
      about = {"layout": layout.name, "rate": rate}
      self._found["advice"].append(about | answers[0])

  def _call(
    self,
    processes: dict[str, Hosts],
    layout: Layout,
    row: Row | str,
    function: str,
    **arguments: Any,
  ) -> list[Any]:
    """Calls a function on all hosts.

    A failure is recorded, and hosts that can no longer be called are removed
    from `processes`.

    Returns:
      The answers of all hosts; empty after a failure.
    """
    name, framework = (row, "jax") if row == "advice" else (
      row.name, row.framework
    )  # fmt: skip
    if framework not in processes:
      return []
    hosts = processes[framework]
    is_short = function in ("run", "advise")
    timeout = _RUN_TIMEOUT if is_short else _TIMEOUT
    try:
      return hosts.call(function, timeout=timeout, **arguments)
    except HostError as error:
      print(f"{framework}, {name}: {error}", flush=True)
      self._found["failures"].append(
        {"layout": layout.name, "framework": framework, "row": name,
         "error": str(error)}
      )  # fmt: skip
      if hosts.is_broken:
        processes.pop(framework).close()
      return []

  def _threads(self, layout: Layout) -> int:
    """Returns the number of threads of a host's process."""
    share = len(os.sched_getaffinity(0)) // layout.hosts
    # Devices that wait for each other need two each: see cpu_backend.
    least = 2 * layout.shards if layout.shards > 1 else 1
    return self._options.threads or max(least, share)

  def _config_of(self, layout: Layout) -> ConfigDict:
    """Returns the configuration on a layout; the batch per replica is kept."""
    config = self._config.copy_and_resolve_references()
    rows_each = config.batch_size // config.mesh.data
    config.mesh.stage = layout.stages
    config.mesh.data = layout.hosts // layout.stages
    config.mesh.fsdp = layout.shards
    config.mesh.backend = "pmap" if layout.has_replicas_only else "jit"
    config.pipeline.align = "none"  # each row has one rank for all stages
    config.batch_size = rows_each * config.mesh.data
    return config

  def _forget(self, layout: str) -> None:
    """Drops the older measurements of a layout, and runs that had no other."""
    found = self._found
    for key in ("rows", "advice", "failures"):
      found[key] = [each for each in found[key] if each["layout"] != layout]
    for run in found["runs"]:
      run["layouts"] = [name for name in run["layouts"] if name != layout]
    found["runs"] = [
      run for run in found["runs"] if run["layouts"] or run is self._run
    ]

  def _write(self) -> None:
    self._run["minutes"] = (time.monotonic() - self._start) / 60
    self._output.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(self._found, indent=1, allow_nan=False)
    self._output.write_text(text + "\n")


def _parts(row: Row, layout: Layout) -> Sequence[str]:
  """Returns the parts of a row to time: the step, and if possible its parts."""
  has_parts = row.framework == "jax" and layout.has_replicas_only
  if not has_parts or row.name == NO_EXCHANGE:
    return ("step",)
  return ("step", "compress", "communicate")


def _peer_version() -> dict[str, str]:
  try:
    return {"torch": metadata.version("torch")}
  except metadata.PackageNotFoundError:
    return {}
