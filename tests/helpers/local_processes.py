"""Processes that work together on loopback."""

import socket
import time

import pytest


def free_port():
  with socket.socket() as server:
    server.bind(("127.0.0.1", 0))
    return server.getsockname()[1]


def wait(processes, folder, deadline):
  """Waits for all processes; a failed one or the deadline fails the test.

  Process i prints to output_i.txt.
  """
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
