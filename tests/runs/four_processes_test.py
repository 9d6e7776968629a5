"""Four processes on loopback train as one process with four devices."""

import json
import os
import sys

from helpers import environments, soak
from helpers import four_processes_worker as worker
from helpers.local_processes import free_port, run_together

PROCESSES = worker.DEVICES
SECONDS = 165  # for all processes; they take half of it on an idle machine
# Between hosts values are sent in other ways, so the compiler joins other
# operations into one loop. It may then fuse a multiplication and an addition,
# which rounds once in place of twice. Rounding to bfloat16 amplifies a last bit
# to a part in 256, and in the third step errors already differed by 3e-5. x86
# processors up to AVX cannot fuse, so all programs round alike.
NO_FUSED_ADDITIONS = "--xla_cpu_max_isa=AVX"


def read(folder):
  """Returns the lines without times, and the summary of a run."""
  summary = json.loads((folder / "summary.json").read_text())
  return soak.lines_of(folder), summary


def train(folder):
  """Returns the runs of four processes, and the run of one process.

  They have this process's XLA flags, and round as all others do.
  """
  worker.write_text(folder)
  flags = f"{os.environ.get('XLA_FLAGS', '')} {NO_FUSED_ADDITIONS}".strip()
  environment = environments.of_users() | {
    "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags,
  }  # fmt: skip
  which = [(i, PROCESSES) for i in range(PROCESSES)] + [(0, 1)]
  program = sys.executable, "-W", "error", worker.__file__, folder, free_port()
  commands = [[*program, *one, SECONDS - 10] for one in which]
  run_together(folder, commands, [environment] * len(which), SECONDS)
  runs = [read(folder / f"process_{i}_of_{count}") for i, count in which]
  return runs[:-1], runs[-1]


def test_same_as_one_process(tmp_path):
  """All numbers of all steps are equal, bit for bit.

  Sums over two replicas do not depend on how values are sent.
  """
  ((lines, summary), *others), (alone, alone_summary) = train(tmp_path)
  for other_lines, other in others:
    assert other_lines == lines
    for name in ("train_loss", "rank_history", "params", "traces"):
      assert other[name] == summary[name]
  for _, other in (*others, (alone, alone_summary)):
    for name in ("val_loss", "wire_bytes_per_step", "dense_bytes_per_step"):
      assert other[name] == summary[name]
    # Ranks change, and differ by stage.
    assert other["rank_history"] == [[1, [0, 0]], [3, [8, 0]]]
    assert other["traces"] == 1
  assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
  assert alone[-1]["loss"] < alone[0]["loss"] - 0.5, "something is learned"
  assert lines == alone
