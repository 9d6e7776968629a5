"""Exchanges in a thread between two processes, of two replicas each."""

import json
import subprocess
import sys
import time

import numpy as np
from helpers import environments
from helpers import split_local_steps_worker as worker
from helpers.local_processes import free_port, wait

SECONDS = 240


def test_two_processes_exchange_beside_their_steps(tmp_path):
  """In plain jit and under pmap, with the results of one program."""
  environment = environments.of_users() | environments.QUICK
  port, deadline, processes = free_port(), time.monotonic() + SECONDS, []
  files = [tmp_path / f"output_{i}.txt" for i in range(worker.PROCESSES)]
  try:
    for i, file in enumerate(files):
      command = [sys.executable, worker.__file__, port, i, SECONDS - 10]
      with file.open("w") as output:
        processes.append(
          subprocess.Popen(
            list(map(str, command)), stdout=output, stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL, env=environment,
          )
        )  # fmt: skip
    wait(processes, tmp_path, deadline)
  finally:
    for process in processes:
      process.kill()
      process.wait()
  lines = [
    next(x for x in file.read_text().splitlines() if x.startswith("{"))
    for file in files
  ]
  # The common parameters of both processes agree to the bit.
  assert lines[0] == lines[1]
  found = json.loads(lines[0])
  one = np.array(found["one program"])
  np.testing.assert_allclose(found["jit"], one, rtol=1e-6)
  np.testing.assert_allclose(found["pmap"], one, rtol=1e-6)
  # They change at the steps at which an exchange is applied, and at no other.
  changes = np.flatnonzero(np.diff(one) != 0) + 2
  every, overlap = worker.EVERY, worker.OVERLAP
  due = range(every + overlap, worker.STEPS + 1, every)
  assert changes.tolist() == list(due)
  assert np.abs(np.diff(one)[changes - 2]).min() > 1e-3 * one[0]
