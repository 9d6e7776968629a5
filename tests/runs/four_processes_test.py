"""Four processes on loopback train as one process with four devices."""

import json
import os
import pathlib
import subprocess
import sys
import time

import pytest
from helpers import four_processes_worker as worker
from helpers.local_processes import free_port, wait

from experiments.training.trainer import Trainer

PROCESSES = 4
SECONDS = 165  # for all processes; they take half of it on an idle machine


def read(folder):
  """Returns the lines and the summary of a run."""
  text = (folder / "metrics.jsonl").read_text()
  summary = json.loads((folder / "summary.json").read_text())
  return [json.loads(line) for line in text.splitlines()], summary


def start(folder, port, index):
  """Starts a process with this one's XLA flags, its output in a file."""
  foreign = ("JAX_", "NPROC", "PYTHONWARNINGS")
  environment = {
    k: v for k, v in os.environ.items() if not k.startswith(foreign)
  }
  arguments = map(str, (folder, port, index, PROCESSES, SECONDS - 10))
  with open(folder / f"output_{index}.txt", "w") as output:
    return subprocess.Popen(
      [sys.executable, "-W", "error", worker.__file__, *arguments],
      stdout=output,
      stderr=subprocess.STDOUT,
      stdin=subprocess.DEVNULL,
      env=environment | {"JAX_PLATFORMS": "cpu"},
    )


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
  """Returns the runs of four processes, and the run of one process."""
  folder = tmp_path_factory.mktemp("runs")
  worker.write_text(folder)
  port, deadline = free_port(), time.monotonic() + SECONDS
  processes = []
  try:
    processes += [start(folder, port, i) for i in range(PROCESSES)]
    Trainer(worker.pipeline_run(folder, "alone")).run()
    wait(processes, folder, deadline)
  finally:
    for process in processes:
      process.kill()
      process.wait()
  paths = [pathlib.Path(folder, f"process_{i}") for i in range(PROCESSES)]
  return [read(path) for path in paths], read(folder / "alone")


def without_clock(line):
  clock = ("seconds", "tokens_per_second")
  return {name: x for name, x in line.items() if name not in clock}


def test_all_processes_report_the_same(runs):
  """All numbers of all steps are equal, bit for bit."""
  (first, summary), *others = runs[0]
  for lines, other in others:
    assert list(map(without_clock, lines)) == list(map(without_clock, first))
    for name in (
      "train_loss", "val_loss", "rank_history", "wire_bytes_per_step",
      "params", "traces",
    ):  # fmt: skip
      assert other[name] == summary[name]


def test_ranks_change_and_differ_by_stage(runs):
  for _, summary in (*runs[0], runs[1]):
    assert summary["rank_history"] == [[1, [0, 0]], [3, [8, 0]]]
    assert summary["traces"] == 1


def test_same_as_one_process(runs):
  """Sums over two replicas do not depend on how values are sent."""
  (lines, summary), (alone, other) = runs[0][0], runs[1]
  assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
  assert alone[-1]["loss"] < alone[0]["loss"] - 0.5, "something is learned"
  for line, expected in zip(lines, alone, strict=True):
    assert without_clock(line) == without_clock(expected)
  for name in ("val_loss", "wire_bytes_per_step", "dense_bytes_per_step"):
    assert summary[name] == other[name]
