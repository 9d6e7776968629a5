"""SIGTERM and Ctrl-C as a wish to stop after the step."""

import os
import shlex
import signal
import sys
from types import FrameType

import jax
from jax.experimental import multihost_utils


class TrainingInterrupted(RuntimeError):
  """A run that was told to stop, and was saved.

  Attributes:
    signal: What told it.
  """

  def __init__(self, received: signal.Signals, step: int):
    super().__init__(f"{received.name} after step {step}: saved.")
    self.signal = received


class StopSignals:
  """Notes the first signal; a second one ends the process at once.

  Among several processes the runtime passes a SIGTERM of one on to all, and
  names a step that none of them has done yet.
  """

  def __init__(self) -> None:
    """Changes nothing yet."""
    self.received: signal.Signals | None = None
    self._before: dict[signal.Signals, object] = {}

  def __enter__(self) -> "StopSignals":
    # JAX's own handler of SIGTERM stays where it speaks to other processes.
    handled = [signal.SIGINT]
    if jax.process_count() == 1:
      handled.append(signal.SIGTERM)
    for number in handled:
      self._before[number] = signal.signal(number, self._note)
    return self

  def __exit__(self, *error: object) -> None:
    for number, handler in self._before.items():
      signal.signal(number, handler)

  def _note(self, number: int, frame: FrameType | None) -> None:
    del frame
    if self.received is not None:
      signal.signal(number, signal.SIG_DFL)
      os.kill(os.getpid(), number)
    self.received = signal.Signals(number)
    # Not print: the signal may have come in the midst of one.
    said = f"{self.received.name}: ending the step, then saving.\n"
    os.write(1, said.encode())
    if jax.process_count() > 1:
      os.kill(os.getpid(), signal.SIGTERM)  # the runtime tells the others

  def wants_stop(self, step: int) -> bool:
    """Whether to stop after `step`; the same answer in all processes."""
    if jax.process_count() > 1:
      if multihost_utils.reached_preemption_sync_point(step):
        self.received = self.received or signal.SIGTERM
        return True
      return False
    return self.received is not None


def exit_code(received: signal.Signals) -> int:
  """As shells report a process that a signal ended: 128 and its number."""
  return 128 + received


def command() -> str:
  """The command that this process was started by."""
  return shlex.join([sys.executable, *sys.argv])
