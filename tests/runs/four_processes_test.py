"""Four processes on loopback train as one process with four devices."""

import json
import os
import subprocess
import sys
import time

import pytest
from helpers import four_processes_worker as worker
from helpers.local_processes import free_port, wait

PROCESSES = worker.DEVICES
SECONDS = 165  # for all processes; they take half of it on an idle machine
# Between hosts values are sent in other ways, so the compiler joins other
# operations into one loop. It may then fuse a multiplication and an addition,
# which rounds once in place of twice. Rounding to bfloat16 amplifies a last bit
# to a part in 256, and in the third step errors already differed by 3e-5. x86
# processors up to AVX cannot fuse, so all programs round alike.
NO_FUSED_ADDITIONS = "--xla_cpu_max_isa=AVX"


def read(folder):
  """Returns the lines and the summary of a run."""
  text = (folder / "metrics.jsonl").read_text()
  summary = json.loads((folder / "summary.json").read_text())
  return [json.loads(line) for line in text.splitlines()], summary


def start(folder, port, index, count):
  """Starts process `index` of `count`, its output in a file.

  It has this process's XLA flags, and rounds as all others do.
  """
  foreign = ("JAX_", "NPROC", "PYTHONWARNINGS")
  environment = {
    k: v for k, v in os.environ.items() if not k.startswith(foreign)
  }
  flags = f"{environment.get('XLA_FLAGS', '')} {NO_FUSED_ADDITIONS}".strip()
  arguments = map(str, (folder, port, index, count, SECONDS - 10))
  # The process alone is the last one.
  number = index if count > 1 else PROCESSES
  with open(folder / f"output_{number}.txt", "w") as output:
    return subprocess.Popen(
      [sys.executable, "-W", "error", worker.__file__, *arguments],
      stdout=output,
      stderr=subprocess.STDOUT,
      stdin=subprocess.DEVNULL,
      env=environment | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags},
    )


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
  """Returns the runs of four processes, and the run of one process."""
  folder = tmp_path_factory.mktemp("runs")
  worker.write_text(folder)
  port, deadline = free_port(), time.monotonic() + SECONDS
  processes = []
  try:
    for i in range(PROCESSES):
      processes.append(start(folder, port, i, PROCESSES))
    processes.append(start(folder, port, 0, 1))
    wait(processes, folder, deadline)
  finally:
    for process in processes:
      process.kill()
      process.wait()
  names = [f"process_{i}_of_{PROCESSES}" for i in range(PROCESSES)]
  return [read(folder / name) for name in names], read(
    folder / "process_0_of_1"
  )


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
