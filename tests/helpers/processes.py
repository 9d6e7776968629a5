"""The training command in processes of their own."""

import functools
import subprocess
import sys
import time

from helpers import environments, soak

SECONDS = 150  # time limit of a process


def start(folder, *arguments, steps=60, output=None, file_bytes=None):
  """Starts the training command.

  Files have at most `file_bytes`, as on a disk that is nearly full.
  """
  settings = {"steps": steps, "run_dir": folder, **soak.SETTINGS}
  # Runs on other meshes differ by the order of sums, which codes magnify.
  settings |= {"checkpoint.every": 10, "powersgd.wire_dtype": "float32"}
  command = [
    sys.executable,
    str(soak.ROOT / "experiments" / "train_gpt2.py"),
    f"--config={soak.ROOT}/configs/gpt2_tiny.py:powersgd",
    *(f"--config.{key}={value}" for key, value in settings.items()),
    *arguments,
  ]
  environment = environments.of_users() | environments.QUICK
  if not file_bytes:  # or what is kept for others might be cut off
    environment |= environments.cache
  else:
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
  """Waits for the process, checks its exit code and returns its output."""
  text, _ = process.communicate(timeout=SECONDS)
  assert process.returncode == code, text
  return text


def wait_for(condition, process, every=0.02):
  deadline = time.monotonic() + SECONDS
  while not condition():
    assert process.poll() is None, process.communicate()[0]
    assert time.monotonic() < deadline
    time.sleep(every)


def lines_written(folder):
  file = folder / "metrics.jsonl"
  return file.read_text().count("\n") if file.exists() else 0
