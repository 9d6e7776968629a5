"""Real processes and signals: killed, on a full disk, then asked to stop."""

import errno
import os
import signal

from helpers import soak
from helpers.processes import finish, lines_written, start, wait_for

from experiments.trainer.runs.checkpoints import Checkpoints


def test_killed_stopped_and_finished(whole):
  folder = whole.parent / "killed"
  process = start(folder)
  wait_for(lambda: lines_written(folder) >= 4, process)
  process.kill()
  finish(process, -signal.SIGKILL)
  steps = Checkpoints(folder / "checkpoints", 2).steps()

  # A full disk: an error; older checkpoints stay, and there is no partial one.
  text = finish(start(folder, file_bytes=20_000), 1)
  # Among messages of orbax's threads, and of Python as it ends.
  errors = [line for line in text.splitlines() if line.startswith("error: ")]
  assert len(errors) == 1, text
  said = errors[0]
  assert said.startswith("error: The checkpoint of step")
  assert "could not be written to" in said and "Free some space" in said
  assert os.strerror(errno.EFBIG) in said
  assert Checkpoints(folder / "checkpoints", 2).steps() == steps

  process, before = start(folder), lines_written(folder)
  wait_for(lambda: lines_written(folder) > before, process)
  process.send_signal(signal.SIGTERM)
  text = finish(process, 128 + signal.SIGTERM)
  assert "SIGTERM: ending the step, then saving" in text
  assert "saved. Resume with the same command" in text
  assert f"--config.run_dir={folder}" in text

  process, before = start(folder), lines_written(folder)
  wait_for(lambda: lines_written(folder) > before, process)
  process.send_signal(signal.SIGINT)
  finish(process, 128 + signal.SIGINT)

  assert "resuming after step" in finish(start(folder))
  assert not soak.difference(whole, folder)
  assert "compression ratio" in finish(start(folder))  # the table, at once


def test_processes_that_cannot_be_found(tmp_path):
  process = start(tmp_path / "run", "--cluster_detection_method=slurm")
  assert "must be a way by which JAX finds" in finish(process, 1)
