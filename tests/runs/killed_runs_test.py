"""Real processes and signals: killed, then asked to stop."""

import signal

from helpers import soak
from helpers.processes import finish, lines_written, start, wait_for


def test_killed_stopped_and_finished(whole):
  folder = whole.parent / "killed"
  process = start(folder)
  wait_for(lambda: lines_written(folder) >= 4, process)
  process.kill()
  finish(process, -signal.SIGKILL)

  process = start(folder)
  wait_for(lambda: lines_written(folder) >= 6, process)
  process.send_signal(signal.SIGTERM)
  text = finish(process, 128 + signal.SIGTERM)
  assert "SIGTERM: ending the step, then saving" in text
  assert "saved. Resume with the same command" in text
  assert f"--config.run_dir={folder}" in text

  process = start(folder)
  wait_for(lambda: lines_written(folder) >= 9, process)
  process.send_signal(signal.SIGINT)
  finish(process, 128 + signal.SIGINT)

  assert "resuming after step" in finish(start(folder))
  assert not soak.difference(whole, folder)
  assert "compression ratio" in finish(start(folder))  # the table, at once


def test_processes_that_cannot_be_found(tmp_path):
  process = start(tmp_path / "run", "--cluster_detection_method=slurm")
  assert "must be a way by which JAX finds" in finish(process, 1)
