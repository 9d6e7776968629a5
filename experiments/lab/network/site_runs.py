"""Trains a run by sites, and by `local_steps`, on hosts with slow links.

  sudo python -m experiments.lab.network.site_runs

The same model, steps, rounds and code on the same virtual hosts: once as sites
that share an object store of S3, and once as replicas of one job over Gloo. The
measurements go to --output as JSON, of which `make pages` makes a table.
"""

import itertools
import json
import os
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

from absl import app, flags

from experiments import ROOT
from experiments.lab import benchmarks
from experiments.lab.network import object_store, virtual_hosts
from experiments.lab.network.results import SITE_RUNS
from experiments.lab.network.virtual_hosts import (
  ONE_THREAD,
  VirtualHosts,
  address,
)
from experiments.lab.study.records import numbers_of

_CONFIG = flags.DEFINE_string("config", "configs/gpt2_10m.py", "A file.")
_HOSTS = flags.DEFINE_integer("hosts", 2, "Number of hosts.", lower_bound=2)
_STEPS = flags.DEFINE_integer("steps", 120, "Steps.", lower_bound=1)
_EVERY = flags.DEFINE_integer("every", 30, "Steps of a round.", lower_bound=1)
_ROWS = flags.DEFINE_integer("rows", 4, "Rows of a host's batch.")
_RATES = flags.DEFINE_multi_float("rate", [10.0, 100.0], "Mbit/s of the links.")
_ROUND_TRIPS = flags.DEFINE_multi_float("round_trip", [0.0, 50.0], "ms.")
_OUTPUT = flags.DEFINE_string("output", str(SITE_RUNS), "The JSON file.")
_FOLDER = flags.DEFINE_string("folder", "runs/site_runs", "Of run folders.")
_PORT = 12349
_CODE = {"density": 1 / 64, "residual_decay": 0.95}
WAYS = ("sites", "local steps")


def main(argv: Sequence[str]) -> None:
  """Trains what the file lacks, one way after the other at each link."""
  del argv
  virtual_hosts.exit_unless_possible(_ROUND_TRIPS.value)
  object_store.exit_unless_installed()
  file = pathlib.Path(_OUTPUT.value)
  about = {
    "hosts": _HOSTS.value, "steps": _STEPS.value, "every": _EVERY.value,
    "cores": len(os.sched_getaffinity(0)),
  }  # fmt: skip
  lines: list[dict[str, Any]] = []
  if file.exists():
    kept = json.loads(file.read_text())
    if not about.items() <= kept["about"].items():
      sys.exit(
        f"error: `--output` must be a file of these options, {about}, got"
        f" {file}, whose options are {kept['about']}; give another file."
      )
    lines = kept["lines"]
  links = itertools.product(_ROUND_TRIPS.value, _RATES.value, WAYS)
  for round_trip, rate, way in links:
    line = {"rate": rate, "round_trip": round_trip, "way": way}
    if any(line.items() <= other.items() for other in lines):
      continue
    lines.append({**line, **_train(way, rate, round_trip)})
    print(lines[-1], flush=True)
    benchmarks.write(file, "network.site_runs", lines, **about)


def _train(way: str, rate: float, round_trip: float) -> dict[str, Any]:
  """Trains on virtual hosts; ends the program if a process fails.

  Returns:
    The held-out loss; seconds of the whole run with its start, and of a step
    after the first round, its exchanges included; bytes that the first host
    sent in all, headers included.
  """
  count = _HOSTS.value
  name = f"{way.replace(' ', '-')}-{rate:g}-{round_trip:g}"
  folder = pathlib.Path(_FOLDER.value).resolve() / name
  if folder.exists():
    sys.exit(f"error: `--folder` must not hold this run, got {folder}.")
  folder.mkdir(parents=True)
  with (
    VirtualHosts(count, has_store=True) as network,
    object_store.serving(network, count, folder / "store.log") as clients,
  ):
    network.shape(rate * 1e6, round_trip / 1e3)
    codes = network.run(
      [_command(way, i, folder) for i in range(count)],
      ONE_THREAD | clients,
      [folder / f"host_{i}.txt" for i in range(count)],
    )
    sent = network.sent_bytes(0)
  if any(codes):
    sys.exit(f"error: hosts ended with {codes}; {folder}/host_*.txt say why.")
  numbers = numbers_of(folder / "run_0")
  summary, lines = numbers["summary"], numbers["lines"]
  at = dict(zip(lines["step"], lines["seconds"], strict=True))
  first, last = _EVERY.value, _STEPS.value
  return {
    "loss": summary["val_loss"], "seconds": summary["seconds"],
    "step_seconds": (at[last] - at[first]) / (last - first), "sent": sent,
  }  # fmt: skip


def _command(way: str, index: int, folder: pathlib.Path) -> list[str]:
  """Returns the command of a host."""
  count, reducer = _HOSTS.value, "allreduce" if way == "sites" else "topk"
  own: dict[str, Any] = {
    "steps": _STEPS.value, "checkpoint.every": 0, "log_every": _EVERY.value,
    "evaluation.every": 0,
  }  # fmt: skip
  if way == "sites":
    own |= {
      "run_dir": folder / f"run_{index}", "mesh.data": 1,
      "batch_size": _ROWS.value, "site.name": f"host-{index}",
      "site.url": f"{object_store.BUCKET}/run", "site.every": _EVERY.value,
      "site.patience": 600, "site.least": count,
    } | {f"site.{key}": value for key, value in _CODE.items()}  # fmt: skip
    process = []
  else:
    own |= {
      "run_dir": folder / "run_0", "mesh.data": count, "mesh.backend": "pmap",
      "batch_size": count * _ROWS.value, "local.every": _EVERY.value,
      "topk.chunk": 4096, "topk.bits": 2,
    } | {f"topk.{key}": value for key, value in _CODE.items()}  # fmt: skip
    process = [
      f"--coordinator_address={address(0)}:{_PORT}",
      f"--num_processes={count}", f"--process_id={index}",
    ]  # fmt: skip
  return [
    sys.executable, str(ROOT / "experiments/train_gpt2.py"),
    f"--config={_CONFIG.value}:{reducer}",
    *(f"--config.{key}={value}" for key, value in own.items()), *process,
  ]  # fmt: skip


if __name__ == "__main__":
  app.run(main)
