"""Real processes and real signals: runs that are killed, alone and together."""

import errno
import functools
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import soak
from four_processes_test import free_port

from experiments.checkpoints import Checkpoints

SECONDS = 150  # for anything a process does


def start(folder, *arguments, steps=60, output=None, file_bytes=None):
  """The training command, with everything it compiles kept for the next.

  Files may have `file_bytes` at most, as on a disk that is nearly full.
  """
  settings = {"steps": steps, "run_dir": folder, **soak.SETTINGS}
  settings["checkpoint.every"] = 10
  command = [
    sys.executable,
    str(soak.ROOT / "experiments" / "train_gpt2.py"),
    f"--config={soak.ROOT}/configs/gpt2_tiny.py:powersgd",
    *(f"--config.{key}={value}" for key, value in settings.items()),
    *arguments,
  ]
  foreign = ("XLA_FLAGS", "NPROC", "JAX_", "PYTHONWARNINGS")
  environment = {
    k: v for k, v in os.environ.items() if not k.startswith(foreign)
  }
  environment |= {
    "JAX_PLATFORMS": "cpu",
    "JAX_COMPILATION_CACHE_DIR": str(folder.parent / "compiled"),
    "XLA_FLAGS": "--xla_cpu_use_fusion_emitters=false",
  }
  if file_bytes:
    blocks = str(file_bytes // 512)
    limited = 'ulimit -f "$0" && exec "$@"'
    command = ["sh", "-c", limited, blocks, *command]
  popen = functools.partial(
    subprocess.Popen, command, stderr=subprocess.STDOUT, text=True,
    env=environment,
  )  # fmt: skip
  if output is None:
    return popen(stdout=subprocess.PIPE)
  with open(output, "w") as file:
    return popen(stdout=file)


def finish(process, code=0):
  """What the process printed, once it has ended with that code."""
  text, _ = process.communicate(timeout=SECONDS)
  assert process.returncode == code, text
  return text


def wait_for(condition, process):
  deadline = time.monotonic() + SECONDS
  while not condition():
    assert process.poll() is None, process.communicate()[0]
    assert time.monotonic() < deadline
    time.sleep(0.02)


def lines_written(folder):
  file = folder / "metrics.jsonl"
  return file.read_text().count("\n") if file.exists() else 0


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
  """A run that nothing happened to."""
  folder = tmp_path_factory.mktemp("killed") / "whole"
  finish(start(folder))
  return folder


def test_killed_told_to_stop_and_finished(whole):
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
  assert "saved. Go on with the same command" in text
  assert f"--config.run_dir={folder}" in text

  process = start(folder)
  wait_for(lambda: lines_written(folder) >= 9, process)
  process.send_signal(signal.SIGINT)
  finish(process, 128 + signal.SIGINT)

  assert "going on after step" in finish(start(folder))
  assert soak.is_same(whole, folder)
  assert "compression ratio" in finish(start(folder))  # the table, at once


def test_a_disk_that_is_full(whole):
  """An error, what was there before left whole, and no half checkpoint."""
  folder = whole.parent / "full"
  process = start(folder)
  wait_for(lambda: lines_written(folder) >= 5, process)
  process.kill()
  finish(process, -signal.SIGKILL)
  steps = Checkpoints(folder / "checkpoints", 2).steps()

  text = finish(start(folder, file_bytes=20_000), 1)
  said = text.splitlines()[-1]  # below what threads of orbax may have said
  assert said.startswith("error: The checkpoint of step")
  assert "could not be written to" in said and "Make room" in said
  assert os.strerror(errno.EFBIG) in said
  assert Checkpoints(folder / "checkpoints", 2).steps() == steps

  finish(start(folder))
  assert soak.is_same(whole, folder)


def test_one_of_two_processes_dies(whole):
  """The other ends with an error; both again go on to the same end."""
  folder = whole.parent / "two"

  def both():
    address = f"--coordinator_address=127.0.0.1:{free_port()}"
    return [
      start(
        folder, "--config.mesh.backend=shard_map", address,
        "--num_processes=2", f"--process_id={i}", "--heartbeat_timeout=10",
        output=folder.parent / f"output_{i}.txt",
      )
      for i in range(2)
    ]  # fmt: skip

  first, second = both()
  try:
    wait_for(lambda: lines_written(folder) >= 4, first)
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
  assert "going on after step" in texts[0]
  assert "step" not in texts[1], "one process speaks for all"
  losses = [
    [line["loss"] for line in soak.lines_of(path)] for path in (folder, whole)
  ]
  np.testing.assert_allclose(losses[0], losses[1], rtol=1e-4)


def test_half_the_flags(tmp_path):
  process = start(tmp_path / "run", "--num_processes=2")
  assert "must be given together" in finish(process, 1)
