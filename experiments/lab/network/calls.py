"""Calls from the benchmark to its processes on the hosts.

A call goes to all hosts at once, because their collectives need all of them.
"""

import contextlib
import pathlib
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import Any

from experiments.trainer.runtime import heap


class HostError(RuntimeError):
  """Raised if a process on a host has failed, is silent or has ended."""


def serve(host_of: Callable[[int, int, str], Any]) -> None:
  """Answers calls of the benchmark until it ends.

  The arguments of the command are those that `Hosts` gives.

  Args:
    host_of: Returns the object whose methods are called, from the index of the
      host, the number of hosts and the address of the first.
  """
  heap.share_one_heap()
  pipe, index, count, address = sys.argv[1:]
  host = host_of(int(index), int(count), address)
  host.built = heap.keep_freed_memory  # called once all is compiled
  calls = Connection(int(pipe))
  with contextlib.suppress(EOFError):  # the benchmark has ended
    while True:
      function, arguments = calls.recv()
      try:
        answer = getattr(host, function)(**arguments)
      except Exception as error:
        traceback.print_exc()
        answer = HostError(f"{type(error).__name__}: {error}")
      calls.send(answer)


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

  def __init__(
    self,
    name: str,
    commands: Sequence[Sequence[str]],
    address: str,
    environment: Mapping[str, str],
    logs: pathlib.Path,
  ):
    """Starts the processes.

    Args:
      name: A name for messages and logs.
      commands: The command on each host; arguments for `serve` are appended.
      address: The address of the first host, with a port.
      environment: All environment variables.
      logs: The folder of their logs, NAME-INDEX.log.
    """
    self.name, self._pipes, self._processes = name, [], []
    self._logs = logs
    self.is_broken = False  # if a host did not answer, none can be called
    logs.mkdir(parents=True, exist_ok=True)
    for index, command in enumerate(commands):
      own, theirs = Pipe()
      arguments = (theirs.fileno(), index, len(commands), address)
      with theirs, (logs / f"{name}-{index}.log").open("w") as log:
        process = subprocess.Popen(
          [*command, *map(str, arguments)],
          stdin=subprocess.DEVNULL, stdout=log, stderr=log,
          env=dict(environment), pass_fds=[theirs.fileno()],
        )  # fmt: skip
      self._pipes.append(own)
      self._processes.append(process)

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
    answers: dict[int, Any] = {}
    waiting = {pipe: index for index, pipe in enumerate(self._pipes)}
    try:
      for pipe, index in waiting.items():  # noqa: B007
        pipe.send((function, arguments))
      deadline = time.monotonic() + timeout
      while waiting:
        ready = wait(waiting, max(0.0, deadline - time.monotonic()))
        if not ready:
          silent = ", ".join(map(str, waiting.values()))
          raise HostError(
            f"{self.name} on host {silent} did not answer in {timeout:g} s."
            + self._failures(answers)
          )
        for pipe in ready:
          index = waiting.pop(pipe)
          answers[index] = pipe.recv()
    except (EOFError, OSError) as error:
      raise HostError(
        f"{self.name} on host {index} has ended; see"
        f" {self._logs}/{self.name}-{index}.log." + self._failures(answers)
      ) from error
    self.is_broken = False
    if failures := self._failures(answers):
      raise HostError(failures.strip())
    return [answers[index] for index in range(len(self._pipes))]

  def close(self) -> None:
    """Kills the processes."""
    for process, pipe in zip(self._processes, self._pipes, strict=True):
      process.kill()
      process.wait()
      pipe.close()

  def _failures(self, answers: Mapping[int, Any]) -> str:
    """Formats the errors among the answers, each after a space."""
    return "".join(
      f" {self.name} on host {index} failed: {answer}"
      for index, answer in answers.items()
      if isinstance(answer, HostError)
    )
