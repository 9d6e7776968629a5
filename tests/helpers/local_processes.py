"""Processes that work together on loopback."""

import contextlib
import os
import signal
import socket
import subprocess
import time

import pytest


def free_port():
  with socket.socket() as server:
    server.bind(("127.0.0.1", 0))
    return server.getsockname()[1]


def run_together(folder, commands, environments, seconds, cwd=None):
  """Runs commands at once; a failure or the time limit fails the test.

  Process i prints to output_i.txt in `folder`, and none outlives the call.
  """
  deadline, processes = time.monotonic() + seconds, []
  try:
    for i, command in enumerate(commands):
      with open(folder / f"output_{i}.txt", "w") as output:
        process = subprocess.Popen(
          list(map(str, command)), stdin=subprocess.DEVNULL, stdout=output,
          stderr=subprocess.STDOUT, env=environments[i], cwd=cwd,
          start_new_session=True,
        )  # fmt: skip
      processes.append(process)
    _wait(processes, folder, deadline)
  finally:
    for process in processes:
      with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
      process.wait()


def _wait(processes, folder, deadline):
  while True:
    codes = [process.poll() for process in processes]
    if all(code == 0 for code in codes):
      return
    if any(codes) or time.monotonic() > deadline:
      outputs = "\n".join(
        f"--- process {i}, exit code {code}\n"
        + (folder / f"output_{i}.txt").read_text()[-5000:]
        for i, code in enumerate(codes)
      )
      pytest.fail(f"Not all processes ended well.\n{outputs}")
    time.sleep(0.2)
