"""Fetches, accumulates, shows and writes the metrics of a run's steps."""

import copy
import math
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import tqdm
from ml_collections import ConfigDict

from edgc_jax.state.growth import DIVERGING
from experiments.trainer.runs.run_folder import RunFolder
from experiments.trainer.runtime import hosts
from experiments.trainer.tasks.base import Task
from experiments.trainer.training.optimizer import make_schedule, rank_name

# Metrics that differ by pipeline stage are lists with an entry per stage.
_PER_STAGE = ("entropy", "rank", "wire_bytes", "dense_bytes",
              "relative_error", "predicted_error", "residual_norm",
              "diverging_windows")  # fmt: skip
_TIMED = 1000  # newest log intervals, over which the median time is taken
# What a checkpoint keeps of a log.
_NEW = {
  "step": 0,
  "away": 0,  # steps of those that were left to other sites
  "wire_bytes": [],  # sum over all steps so far, per replica, for each stage
  "peak_wire_bytes": 0.0,  # the most of any step, per replica, over all stages
  "rank_history": [],  # [step, [rank per stage]] at each rank's first step
  "means": {},  # values since the last line, of which it has the means
  "diverged_steps": 0,
  "most_diverging_windows": 0,
  "noticed": [],
  "seconds": 0.0,
  "step_seconds": [],  # by log interval, without the host's work in between
}


class RunLog:
  """A log that keeps each step's metrics on the devices until a line is due.

  A line holds the metrics of its step; loss and metrics of the task are means
  since the previous line, over the steps at which they are finite. A terminal
  shows them in a progress bar, other outputs as plain lines.

  Attributes:
    new_diverged_steps: Steps since the previous line at which a check found
      that replicas had diverged.
  """

  def __init__(
    self,
    folder: RunFolder,
    config: ConfigDict,
    task: Task,
    state: Mapping[str, Any] | None = None,
    fetch: Callable[[Sequence[Any]], Sequence[Any]] = jax.device_get,
  ):
    """Starts the clock of a run.

    Args:
      folder: The run's folder, to write lines to.
      config: The whole configuration, with a chosen reducer.
      task: Its task.
      state: From `state()`, to resume a run; None for a new one.
      fetch: From the metrics of steps to metrics on the host.
    """
    self._kept = copy.deepcopy({**_NEW, **(state or {})})
    self.new_diverged_steps: list[int] = []
    self._first = self._done
    self._folder = folder
    self._steps = config.steps
    self._every = config.log_every, config.evaluation.every
    self._reducer = config.reducer
    self._units = config.batch_size * task.units_per_row
    self.speed_name = f"{task.unit}_per_second"
    self._averaged = tuple(task.metrics)
    self._learning_rate = make_schedule(config)
    self._pending: list[Mapping[str, Any]] = []
    self._diverging = 0  # windows, the most since the previous line
    self._fetch = fetch
    self._began = time.monotonic()
    self._started = self._began - self._kept["seconds"]
    # Step and time of the first fetch; the time before it is compilation.
    self._timed: tuple[int, float] | None = None
    self._interval: float | None = None  # start of the current log interval
    self._is_shown = hosts.is_first()
    self._is_terminal = sys.stderr.isatty()
    self._bar = tqdm.tqdm(
      total=self._steps,
      initial=self._kept["step"],
      disable=not (self._is_terminal and self._is_shown),
      unit="step",
    )

  def has_evaluation(self, step: int) -> bool:
    """Returns whether the line of a step has metrics of held-out data."""
    _, every = self._every
    return step == self._steps or bool(every and step % every == 0)

  def has_line(self, step: int) -> bool:
    """Returns whether a line is due after a step."""
    every, _ = self._every
    return step == 1 or step % every == 0 or self.has_evaluation(step)

  def begin_step(self) -> None:
    """Restarts the clock, if evaluation or a checkpoint has stopped it."""
    if self._interval is None:
      self._interval = time.monotonic()

  def add(self, numbers: Mapping[str, Any]) -> None:
    """Adds a step's metrics without waiting for them."""
    self._pending.append(numbers)

  def skip_to(self, step: int) -> None:
    """Goes on as if so many steps were done; nothing if they are."""
    if step > self._kept["step"] + len(self._pending):
      self._drain()
      self._kept["away"] += step - self._kept["step"]
      self._kept["step"] = step

  @property
  def _done(self) -> int:
    """Steps that this run has done itself."""
    return self._kept["step"] - self._kept["away"]

  def state(self) -> dict[str, Any]:
    """Returns the state of the log, for JSON; waits for the devices."""
    self._drain()
    return copy.deepcopy(self._kept) | {"seconds": self.seconds()}

  def summary(self) -> dict[str, Any]:
    """Returns the numbers over all steps, for the run's summary.

    `step_seconds` is the median over log intervals of the seconds per step
    between two fetches, each of which waits for all devices. It leaves out
    compilation, evaluation and checkpoints, and is missing if no interval
    remains.
    """
    kept = self._kept
    numbers = {
      "wire_bytes_per_step": [x / self._done for x in kept["wire_bytes"]],
      "peak_wire_bytes_per_step": kept["peak_wire_bytes"],
      "rank_history": kept["rank_history"],
      "seconds": self.seconds(),
    }
    if kept["most_diverging_windows"] >= DIVERGING:
      numbers["most_diverging_windows"] = kept["most_diverging_windows"]
    if kept["step_seconds"]:
      numbers["step_seconds"] = statistics.median(kept["step_seconds"])
    return numbers

  def fetch(self) -> dict[str, Any]:
    """Returns the line of the newest step; waits for the devices."""
    self._drain()
    kept, step = self._kept, self._kept["step"]
    self.new_diverged_steps, kept["noticed"] = kept["noticed"], []
    line = dict(self._newest, step=step)
    line |= {k: _mean(each) for k, each in kept["means"].items()}
    kept["means"] = {}
    # Skipped steps leave the schedule where it is, under `skip_nonfinite`.
    skipped = line["skipped_steps"] if "consecutive_skips" in line else 0
    line["learning_rate"] = float(self._learning_rate(self._done - 1 - skipped))
    line["new_diverging_windows"], self._diverging = self._diverging, 0
    line["dense_bytes"] = sum(line["dense_bytes"])
    line["total_wire_bytes"] = sent = sum(kept["wire_bytes"])
    # Nothing is sent before a first exchange, or if the first step is skipped.
    line["compression_ratio"] = (
      line["dense_bytes"] * self._done / sent if sent else 1.0
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
      if self._timed[0] < self._done:  # until then only compilation was timed
        left = f"  {(self._steps - step) / self._speed():.0f} s left"
      print(f"step {step}/{self._steps}  {text}{left}", flush=True)
    self._folder.log(line)

  def _drain(self) -> None:
    """Fetches the pending metrics from the devices."""
    kept, pending = self._kept, len(self._pending)
    values: Mapping[str, Any] = {}
    for values in self._fetch(self._pending):
      kept["step"] += 1
      for name in self._averaged:
        if name in values:
          value = np.ravel(values[name])[0].item()
          kept["means"].setdefault(name, []).append(value)
      rank, sent, (diverged, *_) = (
        np.ravel(values[name]).tolist()
        for name in ("rank", "wire_bytes", "diverged_steps")
      )
      if diverged > kept["diverged_steps"]:
        kept["noticed"].append(kept["step"])
        kept["diverged_steps"] = diverged
      windows = np.max(values.get("diverging_windows", 0)).item()
      self._diverging = max(self._diverging, windows)
      most = max(kept["most_diverging_windows"], windows)
      kept["most_diverging_windows"] = most
      before = kept["wire_bytes"] or [0.0] * len(rank)
      kept["wire_bytes"] = [
        total + new for total, new in zip(before, sent, strict=True)
      ]
      kept["peak_wire_bytes"] = max(kept["peak_wire_bytes"], sum(sent))
      history = kept["rank_history"]
      if not history or history[-1][1] != rank:
        history.append([kept["step"], rank])
    if values:
      self._newest = _by_stage(values)
    self._pending = []
    now = time.monotonic()
    if self._timed is None:
      self._timed = self._done, now
    elif pending:
      kept["step_seconds"].append((now - self._interval) / pending)
      del kept["step_seconds"][:-_TIMED]
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
    if step == self._done:
      step, since = self._first, self._began
    return (self._done - step) / (now - since)


def _mean(values: Sequence[float]) -> float:
  """Returns the mean of those that are finite: other steps are skipped."""
  finite = [value for value in values if math.isfinite(value)]
  return float(np.mean(finite)) if finite else math.nan


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
