"""Fetches, accumulates, shows and writes the metrics of a run's steps."""

import collections
import statistics
import sys
import time
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
import tqdm
from ml_collections import ConfigDict

from experiments.runs.run_folder import RunFolder
from experiments.runtime import hosts
from experiments.tasks.base import Task
from experiments.training.optimizer import make_schedule, rank_name

# Metrics that differ by pipeline stage are lists with an entry per stage.
_PER_STAGE = ("entropy", "rank", "wire_bytes", "dense_bytes",
              "relative_error", "predicted_error", "residual_norm")  # fmt: skip
_TIMED = 1000  # newest log intervals, over which the median time is taken
_NEW = {
  "step": 0, "wire_bytes": [], "peak_wire_bytes": 0.0, "rank_history": [],
  "means": {}, "seconds": 0.0, "step_seconds": [], "diverged_steps": 0,
  "noticed": [],
}  # fmt: skip


class RunLog:
  """A log that keeps each step's metrics on the devices until a line is due.

  A line holds the metrics of its step; loss and metrics of the task are means
  since the previous line. A terminal shows them in a progress bar, other
  outputs as plain lines.

  Attributes:
    wire_bytes: Sum over all steps so far, per replica, for each stage.
    peak_wire_bytes: The most of any step so far, per replica, over all stages.
    rank_history: [step, [rank per stage]] at the first step of each rank.
    new_diverged_steps: Steps since the previous line at which a check found
      that replicas had diverged.
  """

  def __init__(
    self,
    folder: RunFolder,
    config: ConfigDict,
    task: Task,
    state: Mapping[str, Any] | None = None,
  ):
    """Starts the clock of a run.

    Args:
      folder: The run's folder, to write lines to.
      config: The whole configuration, with a chosen reducer.
      task: Its task.
      state: From `state()`, to resume a run; None for a new one.
    """
    state = {**_NEW, **(state or {})}
    self.wire_bytes: list[float] = list(state["wire_bytes"])
    self.peak_wire_bytes: float = state["peak_wire_bytes"]
    self.rank_history: list[Any] = list(state["rank_history"])
    self.new_diverged_steps: list[int] = []
    self._noticed: list[int] = list(state["noticed"])
    self._diverged_steps: int = state["diverged_steps"]
    # Values since the last line, of which it has the means.
    self._means: dict[str, list[float]] = dict(state["means"])
    self._first = self._step = state["step"]
    self._folder = folder
    self._steps = config.steps
    self._reducer = config.reducer
    self._units = config.batch_size * task.units_per_row
    self.speed_name = f"{task.unit}_per_second"
    self._averaged = tuple(task.metrics)
    self._learning_rate = make_schedule(config)
    self._pending: list[dict[str, jax.Array]] = []
    self._began = time.monotonic()
    self._started = self._began - state["seconds"]
    # Step and time of the first fetch; the time before it is compilation.
    self._timed: tuple[int, float] | None = None
    # Seconds per step by log interval, without the host's work in between.
    self._step_seconds = collections.deque(state["step_seconds"], _TIMED)
    self._interval: float | None = None  # start of the current log interval
    self._is_shown = hosts.is_first()
    self._is_terminal = sys.stderr.isatty()
    self._bar = tqdm.tqdm(
      total=self._steps,
      initial=self._first,
      disable=not (self._is_terminal and self._is_shown),
      unit="step",
    )

  def begin_step(self) -> None:
    """Restarts the clock, if evaluation or a checkpoint has stopped it."""
    if self._interval is None:
      self._interval = time.monotonic()

  def add(self, numbers: dict[str, jax.Array]) -> None:
    """Adds a step's metrics without waiting for them."""
    self._pending.append(numbers)

  def state(self) -> dict[str, Any]:
    """Returns the state of the log, for JSON; waits for the devices."""
    self._drain()
    return {
      "step": self._step,
      "wire_bytes": self.wire_bytes,
      "peak_wire_bytes": self.peak_wire_bytes,
      "rank_history": self.rank_history,
      "means": self._means,
      "diverged_steps": self._diverged_steps,
      "noticed": list(self._noticed),
      "seconds": self.seconds(),
      "step_seconds": list(self._step_seconds),
    }

  def summary(self) -> dict[str, Any]:
    """Returns the numbers over all steps, for the run's summary.

    `step_seconds` is the median over log intervals of the seconds per step
    between two fetches, each of which waits for all devices. It leaves out
    compilation, evaluation and checkpoints, and is missing if no interval
    remains.
    """
    numbers = {
      "wire_bytes_per_step": [sent / self._step for sent in self.wire_bytes],
      "peak_wire_bytes_per_step": self.peak_wire_bytes,
      "rank_history": self.rank_history,
      "seconds": self.seconds(),
    }
    if self._step_seconds:
      numbers["step_seconds"] = statistics.median(self._step_seconds)
    return numbers

  def fetch(self) -> dict[str, Any]:
    """Returns the line of the newest step; waits for the devices."""
    self._drain()
    self.new_diverged_steps, self._noticed = self._noticed, []
    step = self._step
    line = dict(self._newest, step=step)
    line |= {k: float(np.mean(each)) for k, each in self._means.items()}
    self._means = {}
    line["learning_rate"] = float(self._learning_rate(step - 1))
    line["dense_bytes"] = sum(line["dense_bytes"])
    line["total_wire_bytes"] = sent = sum(self.wire_bytes)
    # Nothing is sent before a first exchange, or if the first step is skipped.
    line["compression_ratio"] = (
      line["dense_bytes"] * step / sent if sent else 1.0
    )
    line["seconds"] = self.seconds()
    line[self.speed_name] = self._units * self._speed()
    return line

  def write(self, line: dict[str, Any]) -> None:
    """Shows a line and adds it to the run folder."""
    step = line["step"]
    shown = {
      "loss": f"{line['loss']:.3f}",
      "rank": "/".join(rank_name(self._reducer, r) for r in line["rank"]),
      "ratio": f"{line['compression_ratio']:.2f}",
    }
    shown |= {k: f"{v:.4f}" for k, v in line.items() if k.startswith("val_")}
    self._bar.set_postfix(shown, refresh=False)
    self._bar.update(step - self._bar.n)
    if self._is_shown and not self._is_terminal:
      text = "  ".join(f"{name} {value}" for name, value in shown.items())
      left = ""
      if self._timed[0] < step:  # until then only compilation was timed
        left = f"  {(self._steps - step) / self._speed():.0f} s left"
      print(f"step {step}/{self._steps}  {text}{left}", flush=True)
    self._folder.log(line)

  def _drain(self) -> None:
    """Fetches the pending metrics from the devices."""
    pending = len(self._pending)
    hosts.wait_for_devices(self._pending)
    values: Mapping[str, Any] = {}
    for values in jax.device_get(self._pending):
      self._step += 1
      for name in self._averaged:
        if name in values:
          value = np.ravel(values[name])[0].item()
          self._means.setdefault(name, []).append(value)
      rank, sent, (diverged, *_) = (
        np.ravel(values[name]).tolist()
        for name in ("rank", "wire_bytes", "diverged_steps")
      )
      if diverged > self._diverged_steps:
        self._noticed.append(self._step)
        self._diverged_steps = diverged
      before = self.wire_bytes or [0.0] * len(rank)
      self.wire_bytes = [
        total + new for total, new in zip(before, sent, strict=True)
      ]
      self.peak_wire_bytes = max(self.peak_wire_bytes, sum(sent))
      if not self.rank_history or self.rank_history[-1][1] != rank:
        self.rank_history.append([self._step, rank])
    if values:
      self._newest = _by_stage(values)
    self._pending = []
    now = time.monotonic()
    if self._timed is None:
      self._timed = self._step, now
    elif pending:
      self._step_seconds.append((now - self._interval) / pending)
    self._interval = None

  def close(self) -> None:
    """Ends the progress bar."""
    self._bar.close()

  def seconds(self) -> float:
    """Returns the seconds since the run started, including compilation."""
    return time.monotonic() - self._started

  def _speed(self) -> float:
    """Returns the steps per second since the first fetch.

    If there was only one, it counts from the start, with compilation.
    """
    now, (step, since) = time.monotonic(), self._timed
    if step == self._step:
      step, since = self._first, self._began
    return (self._step - step) / (now - since)


def _by_stage(numbers: dict[str, np.ndarray]) -> dict[str, Any]:
  """Converts metrics to plain numbers, and to lists if they differ by stage."""
  plain = {}
  stages = np.size(numbers["rank"])
  for name, x in numbers.items():
    if isinstance(x, dict):
      plain[name] = {
        path: np.reshape(values, (stages, -1)).tolist()
        for path, values in x.items()
      }
    elif name in _PER_STAGE:
      plain[name] = np.ravel(x).tolist()
    else:
      plain[name] = np.ravel(x)[0].item()
  return plain
