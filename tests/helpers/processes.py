"""The training command in processes of their own."""

import functools
import subprocess
import time

from helpers import environments, soak
from helpers.local_processes import free_port

SECONDS = 150  # time limit of a process


def start(folder, *arguments, steps=60, output=None, file_bytes=None):
  """Starts the training command.

  Files have at most `file_bytes`, as on a disk that is nearly full.
  """
  settings = {"steps": steps, "run_dir": folder, **soak.SETTINGS}
  # Runs on other meshes differ by the order of sums, which codes magnify.
  settings |= {"checkpoint.every": 10, "powersgd.wire_dtype": "float32"}
  command = soak.command_of("gpt2_tiny", "powersgd", settings)
  environment = environments.of_users() | environments.QUICK
  environment |= environments.cache
  if file_bytes:
    # What it kept for others might be cut off: it reads alone.
    environment["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "1000000"
    limited = f'ulimit -f {file_bytes // 512} && exec "$@"'
    command = ["sh", "-c", limited, "sh", *command]
  popen = functools.partial(
    subprocess.Popen, [*command, *arguments], stderr=subprocess.STDOUT,
    text=True, env=environment,
  )  # fmt: skip
  if output is None:
    return popen(stdout=subprocess.PIPE)
  with open(output, "w") as file:
    return popen(stdout=file)


def start_two(folder, texts, *arguments):
  """Starts two processes of one run, which print to the files `texts`."""
  address = f"--coordinator_address=127.0.0.1:{free_port()}"
  return [
    start(
      folder, *arguments, address, "--num_processes=2", f"--process_id={i}",
      "--heartbeat_timeout=10", output=text,
    )
    for i, text in enumerate(texts)
  ]  # fmt: skip


def codes_of(processes):
  """Waits for processes, and returns their exit codes."""
  try:
    return [process.wait(timeout=SECONDS) for process in processes]
  finally:
    for process in processes:
      process.kill()


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
