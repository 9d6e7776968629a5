"""SIGTERM and Ctrl-C as requests to stop after the current step."""

import os
import signal
from types import FrameType

import jax
from jax.experimental import multihost_utils


class TrainingInterrupted(RuntimeError):
  """Raised after a signal, once the run has been saved.

  Attributes:
    signal: The signal received.
  """

  def __init__(self, received: signal.Signals, step: int):
    super().__init__(f"{received.name} after step {step}: saved.")
    self.signal = received


class StopSignals:
  """A context that records a signal; a second one ends the process at once.

  Among several processes the runtime forwards a SIGTERM from one process to
  all, and chooses a step to stop at that none of them has reached yet. There a
  second SIGTERM has no effect: a process may get its first one late.
  """

  def __init__(self) -> None:
    """Installs no handlers yet; `with` does."""
    self.received: signal.Signals | None = None
    self._before: dict[signal.Signals, object] = {}

  def __enter__(self) -> "StopSignals":
    # With several processes JAX's own handler of SIGTERM has to stay.
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
    # Not `print`: the signal may have interrupted one.
    message = f"{self.received.name}: ending the step, then saving.\n"
    os.write(1, message.encode())
    if jax.process_count() > 1:
      os.kill(os.getpid(), signal.SIGTERM)  # the runtime notifies the others

  def wants_stop(self, step: int) -> bool:
    """Returns whether to stop after `step`; the same in all processes."""
    if jax.process_count() > 1:
      if multihost_utils.reached_preemption_sync_point(step):
        self.received = self.received or signal.SIGTERM
        return True
      return False
    return self.received is not None
