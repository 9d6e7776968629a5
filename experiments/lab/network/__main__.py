"""Measures step times on hosts with slow links, compared with PyTorch.

  sudo python -m experiments.lab.network --config=configs/gpt2_10m.py

Creates virtual hosts, each with a shaped uplink (needs Linux, root and
iproute2) and one process per framework, and times training steps. At every link
speed all methods take turns, round after round, so that other load on the
machine hits them all. The hosts are gone when this program ends, however that
may be. The measurements go to --output as JSON, of which `make pages` makes
tables. Layouts that are not measured again stay as they are in that file:

  sudo python -m experiments.lab.network --layout="2 replicas of 4 shards"

Links of other latencies:

  sudo python -m experiments.lab.network --layout="2 replicas" --rate=100 \\
    --round_trip=0 --round_trip=20 --output=runs/far.json

Each host keeps the programs and states of all rows, some 0.4 GB for each row of
10.8M parameters: on 4 hosts 14 rows took more than 24 GB.
"""

import contextlib
import os
import pathlib
import platform
import shlex
import sys
from collections.abc import Sequence
from importlib import metadata

from absl import app, flags
from ml_collections import config_flags

from experiments.lab.network import virtual_hosts
from experiments.lab.network.benchmark import Benchmark
from experiments.lab.network.results import FILE, LAYOUTS, ROWS, Layout, Results
from experiments.trainer.runs.run_folder import environment
from experiments.trainer.runtime.refusals import refusals, require_pattern

_CONFIG = config_flags.DEFINE_config_file(
  "config", "configs/gpt2_10m.py", "A file in configs/."
)
_LAYOUTS = flags.DEFINE_multi_string(
  "layout",
  list(LAYOUTS),
  "A layout: N replicas, N stages of N replicas, N replicas of N shards.",
)
_RATES = flags.DEFINE_multi_float(
  "rate",
  None,
  "A speed of the uplinks in Mbit/s; default: those of results/network.md.",
  lower_bound=1e-3,
  upper_bound=1e6,
)
_ROUND_TRIPS = flags.DEFINE_multi_float(
  "round_trip",
  [0.0],
  "A time from one host to another and back, in ms, in addition to the kernel's"
  " 0.1; every rate is measured with each.",
  lower_bound=0.0,
  upper_bound=6e4,
)
_ROWS = flags.DEFINE_multi_enum("row", list(ROWS), list(ROWS), "A row.")
_ADVISED = flags.DEFINE_string(
  "advised",
  "",
  "A regular expression: also the methods that advise.py chooses from whose"
  " names match, and its advice, which is of all methods; empty for neither.",
)
_MOST_STEPS = flags.DEFINE_integer(
  "most_steps", 1, "Local steps of these methods, at most.", lower_bound=1
)
_ROUNDS = flags.DEFINE_integer(
  "rounds", 3, "Number of timed rounds.", lower_bound=1
)
_PEER = flags.DEFINE_bool("peer", True, "Also PyTorch, if it is installed.")
_OUTPUT = flags.DEFINE_string("output", str(FILE), "The JSON file.")
_FOLDER = flags.DEFINE_string("folder", "runs/network", "The folder of logs.")


def main(argv: Sequence[str]) -> None:
  """Measures all layouts and writes the JSON file."""
  del argv
  virtual_hosts.exit_unless_possible(_ROUND_TRIPS.value)
  here, config = environment(), _CONFIG.value
  versions = here["versions"]
  with contextlib.suppress(metadata.PackageNotFoundError):
    versions["torch"] = metadata.version("torch")
  run = {
    "command": shlex.join(
      ["python", "-m", "experiments.lab.network", *sys.argv[1:]]
    ),
    "rounds": _ROUNDS.value,
    "commit": here["commit"],
    "machine": _processor(),
    "cores": len(os.sched_getaffinity(0)),
    "versions": ", ".join(f"{k} {v}" for k, v in versions.items()),
  }
  with refusals():
    require_pattern("advised", _ADVISED.value)
    if config.task != "gpt2":
      raise ValueError(
        f"`--config` must have the task gpt2, got {config.task!r}; give another"
        " file."
      )
    layouts = [Layout.of(name) for name in _LAYOUTS.value]
    for layout in layouts:
      virtual_hosts.VirtualHosts(layout.hosts)  # refuses a wrong number
    model = {
      "config": config.name,
      "tokens": config.batch_size // config.mesh.data * config.model.context,
    }
    results = Results(pathlib.Path(_OUTPUT.value), model, run)
  benchmark = Benchmark(
    config, _ROWS.value, _ADVISED.value, _MOST_STEPS.value, _ROUNDS.value,
    _PEER.value and "torch" in versions,
    pathlib.Path(_FOLDER.value), results,
  )  # fmt: skip
  for layout in layouts:
    rates = _RATES.value or LAYOUTS.get(layout.name, (100,))
    benchmark.measure(layout, rates, _ROUND_TRIPS.value)


def _processor() -> str:
  """Returns the name of the processor, which all hosts share."""
  for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines():
    if line.startswith("model name"):
      return line.split(":", 1)[1].strip()
  return platform.machine()


if __name__ == "__main__":
  app.run(main)
