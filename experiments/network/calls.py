"""Calls from the benchmark to its processes on the hosts, as lines of JSON.

A call goes to all hosts at once, since what they do they do together.
"""

import json
import os
import select
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any


class HostError(RuntimeError):
  """A process on a host that failed, went silent or ended."""


def serve(functions: Mapping[str, Callable[..., Any]]) -> None:
  """Answers calls on standard input until it is closed.

  Args:
    functions: By name; arguments and results go through JSON.
  """
  # Libraries print: what is not an answer goes to standard error.
  answers = os.fdopen(os.dup(1), "w")
  os.dup2(2, 1)
  for line in sys.stdin:
    call = json.loads(line)
    try:
      result = functions[call["name"]](**call["arguments"])
      answer = {"result": result}
    except Exception as error:
      traceback.print_exc()
      answer = {"error": f"{type(error).__name__}: {error}"}
    print(json.dumps(answer), file=answers, flush=True)


class Hosts:
  """The processes of one framework, one on each host."""

  def __init__(self, name: str, processes: Sequence[subprocess.Popen]):
    """Args: a name for messages, and the processes in the order of hosts."""
    self.name, self._processes = name, list(processes)

  def call(
    self, function: str, *, timeout: float, **arguments: Any
  ) -> list[Any]:
    """Calls a function on all hosts.

    Args:
      function: Its name.
      timeout: Seconds for all of them.
      **arguments: The same for all.

    Returns:
      What each of them gave back.

    Raises:
      HostError: if one of them did not.
    """
    line = json.dumps({"name": function, "arguments": arguments}) + "\n"
    for index, process in enumerate(self._processes):
      try:
        process.stdin.write(line)
        process.stdin.flush()
      except OSError as error:
        raise self._error(index, "is gone") from error
    deadline = time.monotonic() + timeout
    return [
      self._answer(index, process, deadline)
      for index, process in enumerate(self._processes)
    ]

  def close(self) -> None:
    """Ends the processes."""
    for process in self._processes:
      process.kill()
      process.wait()
      process.stdin.close()
      process.stdout.close()

  def _answer(
    self, index: int, process: subprocess.Popen, deadline: float
  ) -> Any:
    left = max(0.0, deadline - time.monotonic())
    # One call, one line: nothing is left in the buffer of the pipe.
    if not select.select([process.stdout], [], [], left)[0]:
      raise self._error(index, "did not answer in time")
    line = process.stdout.readline()
    if not line:
      raise self._error(index, "has ended")
    answer = json.loads(line)
    if "error" in answer:
      raise self._error(index, f"failed: {answer['error']}")
    return answer["result"]

  def _error(self, index: int, what: str) -> HostError:
    return HostError(f"{self.name} on host {index} {what}.")
