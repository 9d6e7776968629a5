"""Trains whole runs on hosts with slow links, and times them to a loss.

  sudo python -m experiments.lab.network.whole_runs --arm=dense \\
      --arm="SparseLoCo, every 2" --rate=100 --rate=1000

Times to a loss are steps that simulated replicas have measured, times seconds
of a step that a benchmark has measured (results/network.md). This measures both
at once: it trains judged arms of a study to the end on four virtual hosts, with
their own settings, and --output keeps each run's losses and seconds. Runs that
the file has are not repeated. One takes some 7 to 15 minutes.
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
from experiments.lab.network import virtual_hosts
from experiments.lab.network.results import WHOLE_RUNS
from experiments.lab.network.virtual_hosts import (
  ONE_THREAD,
  VirtualHosts,
  address,
)
from experiments.lab.study import runner, study
from experiments.lab.study.records import Records, name_of, numbers_of
from experiments.lab.study.study import Run, Study
from experiments.trainer.runs import run_folder
from experiments.trainer.runtime.json_files import read_json
from experiments.trainer.runtime.refusals import refusals

_STUDY = flags.DEFINE_string(
  "study", "configs/protocol/rounds.py", "A study's file."
)
_ARMS = flags.DEFINE_multi_string("arm", None, "An arm of the study.")
_RATES = flags.DEFINE_multi_float(
  "rate", [100.0], "A speed of the uplinks in Mbit/s.",
  lower_bound=1e-3, upper_bound=1e6,
)  # fmt: skip
_ROUND_TRIPS = flags.DEFINE_multi_float(
  "round_trip", [0.0], "A round-trip time in ms; every rate has each.",
  lower_bound=0.0, upper_bound=6e4,
)  # fmt: skip
_SEED = flags.DEFINE_integer("seed", 0, "A judged seed.")
_RECORDS = flags.DEFINE_string(
  "records", str(ROOT / "results/records"), "The records."
)
_OUTPUT = flags.DEFINE_string("output", str(WHOLE_RUNS), "The JSON file.")
_FOLDER = flags.DEFINE_string("folder", "runs/whole", "Parent of run folders.")
_PORT = 12345


def main(argv: Sequence[str]) -> None:
  """Trains what the file lacks."""
  del argv
  virtual_hosts.exit_unless_possible(_ROUND_TRIPS.value)
  file = pathlib.Path(_OUTPUT.value)
  with refusals():
    found = study.load(_STUDY.value)
    records = Records(_RECORDS.value)
    runs = [_judged(found, arm, records) for arm in _ARMS.value]
    kept: dict[str, Any] = {"runs": []}
    if file.exists():
      kept |= read_json(file, "--output", "give another file")
  links = itertools.product(_RATES.value, _ROUND_TRIPS.value)
  for (rate, round_trip), run in itertools.product(links, runs):
    link = {"rate": rate, "round_trip": round_trip}
    which = {
      **link, "study": found.name, "arm": run.arm,
      "seed": run.config.seed, "run": name_of(run.config),
    }  # fmt: skip
    if any(which.items() <= each.items() for each in kept["runs"]):
      continue
    print(f"--- {rate:g} Mbit/s, {round_trip:g} ms: {run.arm}", flush=True)
    kept["runs"].append({**which, **_train(found, run, link)})
    file.parent.mkdir(parents=True, exist_ok=True)
    run_folder.write(file, json.dumps(kept, indent=1) + "\n")


def _judged(found: Study, arm: str, records: Records) -> Run:
  """Returns the run of an arm with the settings by which it was judged."""
  if arm not in found.all_arms:
    raise ValueError(
      f"`--arm` must be one of {'; '.join(found.all_arms)}, got {arm!r}; choose"
      " one."
    )
  run, _ = found.judged(arm, _SEED.value, records)
  if run is None:
    raise ValueError(
      f"`--arm` must be tuned, got {arm!r}, whose tuning --records lacks; run"
      " the study first."
    )
  return run


def _train(found: Study, run: Run, link: dict[str, float]) -> dict[str, Any]:
  """Trains on virtual hosts; returns losses and seconds by step.

  Ends the program if a process fails.
  """
  count = run.config.mesh.data
  folder = pathlib.Path(_FOLDER.value).resolve() / (
    f"{name_of(run.config)}-{link['rate']:g}-{link['round_trip']:g}"
  )
  if folder.exists():  # its seconds may be of other code, or of two attempts
    sys.exit(
      f"error: `--folder` must not hold this run yet, got {folder}; remove it."
    )
  folder.parent.mkdir(parents=True, exist_ok=True)
  logs = [folder.with_name(f"{folder.name}.host_{i}.txt") for i in range(count)]
  command = [
    *runner.command_of(found, run, folder),
    "--config.mesh.backend=pmap",
    f"--coordinator_address={address(0)}:{_PORT}",
    f"--num_processes={count}",
  ]
  with VirtualHosts(count) as network:
    network.shape(link["rate"] * 1e6, link["round_trip"] / 1e3)
    commands = [[*command, f"--process_id={i}"] for i in range(count)]
    codes = network.run(commands, ONE_THREAD, logs)
  if any(codes):
    sys.exit(f"error: hosts ended with {codes}; {folder}.host_*.txt say why.")
  numbers = numbers_of(folder)
  if "error" in numbers:
    sys.exit(f"error: {run.arm} did not end: {numbers['error']}.")
  summary, lines = numbers["summary"], numbers["lines"]
  here = summary["environment"]
  return {
    "loss": summary["val_loss"],
    "lines": {key: lines[key] for key in ("step", "seconds", "val_loss")},
    "commit": here["commit"],
    "cores": len(os.sched_getaffinity(0)),
    "versions": here["versions"],
  }


if __name__ == "__main__":
  flags.mark_flag_as_required("arm")
  app.run(main)
