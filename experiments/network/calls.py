"""Calls from the benchmark to its processes on the hosts, as lines of JSON.

A call goes to all hosts at once, because their collectives need all of them.
"""

import contextlib
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
  """Raised if a process on a host has failed, is silent or has ended."""


def serve(functions: Mapping[str, Callable[..., Any]]) -> None:
  """Answers calls on standard input until it is closed.

  Args:
    functions: Functions by name; arguments and results go through JSON.
  """
  # Libraries print, too: send anything but answers to standard error.
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


def seconds_of(call: Callable[[], Any], count: int) -> tuple[list[float], Any]:
  """Returns the seconds of each of `count` calls, and the last result."""
  seconds, result = [], None
  for _ in range(count):
    start = time.perf_counter()
    result = call()
    seconds.append(time.perf_counter() - start)
  return seconds, result


class Hosts:
  """The processes of one framework, one on each host."""

  def __init__(self, name: str, processes: Sequence[subprocess.Popen]):
    """Calls nothing yet.

    Args:
      name: A name for messages.
      processes: The processes, in the order of hosts.
    """
    self.name, self._processes = name, list(processes)
    self.is_broken = False  # if a host did not answer, none can be called

  def call(
    self, function: str, *, timeout: float, **arguments: Any
  ) -> list[Any]:
    """Calls a function on all hosts.

    Args:
      function: Its name.
      timeout: Seconds until all hosts have to answer.
      **arguments: Arguments, the same on all hosts.

    Returns:
      The result of each host.

    Raises:
      HostError: if a host fails. Calls remain possible if all hosts have
        answered, even with errors; otherwise none are.
    """
    if self.is_broken:
      raise HostError(f"{self.name} on some host has failed before.")
    self.is_broken = True  # until all have answered
    line = json.dumps({"name": function, "arguments": arguments}) + "\n"
    for index, process in enumerate(self._processes):
      try:
        process.stdin.write(line)
        process.stdin.flush()
      except OSError as error:
        raise HostError(f"{self.name} on host {index} is gone.") from error
    answers = self._answers(timeout)
    self.is_broken = False
    for index, answer in enumerate(answers):
      if "error" in answer:
        raise HostError(
          f"{self.name} on host {index} failed: {answer['error']}"
        )
    return [answer["result"] for answer in answers]

  def close(self) -> None:
    """Kills the processes."""
    for process in self._processes:
      process.kill()
      process.wait()
      for pipe in (process.stdin, process.stdout):
        with contextlib.suppress(OSError):  # unread data in the pipe
          pipe.close()

  def _answers(self, timeout: float) -> list[dict[str, Any]]:
    """Reads one line from each host, in the order of arrival."""
    deadline = time.monotonic() + timeout
    answers: dict[int, dict[str, Any]] = {}
    pipes = {p.stdout: i for i, p in enumerate(self._processes)}
    while pipes:
      left = deadline - time.monotonic()
      # An answer is one line, so no data is left in a buffer.
      ready = select.select(list(pipes), [], [], max(0.0, left))[0]
      if not ready:
        silent = ", ".join(map(str, pipes.values()))
        raise HostError(
          f"{self.name} on host {silent} did not answer in {timeout:g} s."
          + _failures(self.name, answers)
        )
      for pipe in ready:
        index = pipes.pop(pipe)
        line = pipe.readline()
        if not line:
          raise HostError(
            f"{self.name} on host {index} has ended; see its log."
          )
        answers[index] = json.loads(line)
    return [answers[index] for index in range(len(self._processes))]


def _failures(name: str, answers: Mapping[int, dict[str, Any]]) -> str:
  """Formats the errors among the answers."""
  return "".join(
    f" {name} on host {index} failed: {answer['error']}"
    for index, answer in answers.items()
    if "error" in answer
  )
