"""Exchanges in a thread between two processes, of two replicas each."""

import json
import sys

import numpy as np
from helpers import environments
from helpers import split_local_steps_worker as worker
from helpers.local_processes import free_port, run_together

SECONDS = 240


def test_two_processes_exchange_beside_their_steps(tmp_path):
  """In plain jit and under pmap, with the results of one program."""
  count, port = worker.PROCESSES, free_port()
  program = sys.executable, worker.__file__, port
  commands = [[*program, i, SECONDS - 10] for i in range(count)]
  environment = environments.of_users() | environments.QUICK
  run_together(tmp_path, commands, [environment] * count, SECONDS)
  lines = [
    next(x for x in file.read_text().splitlines() if x.startswith("{"))
    for file in (tmp_path / f"output_{i}.txt" for i in range(count))
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
