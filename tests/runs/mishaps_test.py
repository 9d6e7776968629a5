"""Mishaps of real processes: a full disk, a death of one of two."""

import errno
import os
import signal

import numpy as np
import pytest
from helpers import soak
from helpers.local_processes import free_port
from helpers.processes import SECONDS, finish, lines_written, start, wait_for

from experiments.runs.checkpoints import Checkpoints


@pytest.mark.parametrize("backend", ["pmap", "jit"])
def test_one_of_two_processes_dies(backend, whole):
  """The other ends with an error; started again, both finish the run."""
  folder = whole.parent / f"two_{backend}"

  def both():
    address = f"--coordinator_address=127.0.0.1:{free_port()}"
    return [
      start(
        folder, f"--config.mesh.backend={backend}", address,
        "--num_processes=2", f"--process_id={i}", "--heartbeat_timeout=10",
        output=folder.parent / f"output_{i}.txt",
      )
      for i in range(2)
    ]  # fmt: skip

  first, second = both()
  try:
    # Steps are faster than checkpoints are written.
    wait_for(lambda: Checkpoints(folder / "checkpoints", 2).steps(), first)
    second.kill()
    second.wait()
    first.wait(timeout=60)
    assert first.returncode not in (0, None)
    text = (folder.parent / "output_0.txt").read_text()
    assert "give the same command on all hosts again" in text
  finally:
    first.kill()

  processes = both()
  try:
    for process in processes:
      process.wait(timeout=SECONDS)
  finally:
    for process in processes:
      process.kill()
  texts = [(folder.parent / f"output_{i}.txt").read_text() for i in range(2)]
  assert [p.returncode for p in processes] == [0, 0], texts
  assert "resuming after step" in texts[0]
  assert "step" not in texts[1], "one process speaks for all"
  losses = [
    [line["loss"] for line in soak.lines_of(path)] for path in (folder, whole)
  ]
  np.testing.assert_allclose(losses[0], losses[1], rtol=1e-4)


def test_a_full_disk(whole):
  """An error; older checkpoints stay, and there is no partial one."""
  folder = whole.parent / "full"
  process = start(folder)
  wait_for(lambda: lines_written(folder) >= 5, process)
  process.kill()
  finish(process, -signal.SIGKILL)
  steps = Checkpoints(folder / "checkpoints", 2).steps()

  text = finish(start(folder, file_bytes=20_000), 1)
  # Among messages of orbax's threads, and of Python as it ends.
  errors = [line for line in text.splitlines() if line.startswith("error: ")]
  assert len(errors) == 1, text
  said = errors[0]
  assert said.startswith("error: The checkpoint of step")
  assert "could not be written to" in said and "Free some space" in said
  assert os.strerror(errno.EFBIG) in said
  assert Checkpoints(folder / "checkpoints", 2).steps() == steps

  finish(start(folder))
  assert not soak.difference(whole, folder)
