"""The numbers of a run's steps: fetched, summed, shown and written."""

import sys
import time
from typing import Any

import jax
import numpy as np
import tqdm
from ml_collections import ConfigDict

from experiments.optimizer import make_schedule
from experiments.run_folder import RunFolder

# Numbers that differ per pipeline stage are lists, one entry a stage.
_PER_STAGE = ("entropy", "rank", "rung", "wire_bytes", "dense_bytes",
              "relative_error", "predicted_error", "residual_norm")  # fmt: skip


class RunLog:
  """Keeps each step's numbers on the devices until a line is due.

  A line holds the numbers of its step, and for the loss the mean since the
  line before. On a terminal a progress bar shows them, elsewhere plain lines.

  Attributes:
    wire_bytes: Sum over all steps so far, per replica, for each stage.
    rank_history: [step, [rank per stage]] at the first step of each rank.
  """

  def __init__(self, folder: RunFolder):
    """Starts the clock of the run whose folder this is."""
    config = ConfigDict(folder.config)
    self.wire_bytes: list[float] = []
    self.rank_history: list[Any] = []
    self._folder = folder
    self._steps = config.steps
    self._tokens = config.batch_size * config.model.context
    self._learning_rate = make_schedule(config)
    self._pending: list[dict[str, jax.Array]] = []
    self._started = time.monotonic()
    self._compiled = self._started  # when the first step was done
    self._is_terminal = sys.stderr.isatty()
    self._bar = tqdm.tqdm(
      total=self._steps, disable=not self._is_terminal, unit="step"
    )

  def add(self, numbers: dict[str, jax.Array]) -> None:
    """Takes a step's numbers without waiting for them."""
    self._pending.append(numbers)

  def fetch(self, step: int) -> dict[str, Any]:
    """The line of `step`, which is the newest; waits for the devices."""
    steps = [_by_stage(numbers) for numbers in jax.device_get(self._pending)]
    self._pending = []
    for number, values in enumerate(steps, step - len(steps) + 1):
      self.wire_bytes = [
        total + sent
        for total, sent in zip(
          self.wire_bytes or [0.0] * len(values["rank"]),
          values["wire_bytes"],
          strict=True,
        )
      ]
      rank = values["rank"]
      if not self.rank_history or self.rank_history[-1][1] != rank:
        self.rank_history.append([number, rank])
    if step == 1:
      self._compiled = time.monotonic()
    line = dict(steps[-1], step=step)
    line["loss"] = float(np.mean([s["loss"] for s in steps]))
    line["learning_rate"] = float(self._learning_rate(step - 1))
    line["dense_bytes"] = sum(line["dense_bytes"])
    sent = sum(self.wire_bytes)
    # None yet where the first step was skipped.
    line["compression_ratio"] = (
      line["dense_bytes"] * step / sent if sent else 1.0
    )
    line["seconds"] = self.seconds()
    line["tokens_per_second"] = self._tokens * self._speed(step)
    return line

  def write(self, line: dict[str, Any]) -> None:
    """Shows a line and adds it to the run folder."""
    step = line["step"]
    shown = {
      "loss": f"{line['loss']:.3f}",
      "rank": "/".join(str(rank or "dense") for rank in line["rank"]),
      "ratio": f"{line['compression_ratio']:.2f}",
    }
    if "val_loss" in line:
      shown["val_loss"] = f"{line['val_loss']:.4f}"
    self._bar.set_postfix(shown, refresh=False)
    self._bar.update(step - self._bar.n)
    if not self._is_terminal:
      text = "  ".join(f"{name} {value}" for name, value in shown.items())
      left = (self._steps - step) / self._speed(step)
      left = f"  {left:.0f} s left" if step > 1 else ""
      print(f"step {step}/{self._steps}  {text}{left}", flush=True)
    self._folder.log(line)

  def close(self) -> None:
    """Ends the progress bar."""
    self._bar.close()

  def seconds(self) -> float:
    """Since the run started, compilation included."""
    return time.monotonic() - self._started

  def _speed(self, step: int) -> float:
    """Steps a second, compilation (the first step) left out."""
    if step == 1:
      return 1.0 / self.seconds()
    return (step - 1) / (time.monotonic() - self._compiled)


def _by_stage(numbers: dict[str, np.ndarray]) -> dict[str, Any]:
  """Plain numbers, and lists of them where they differ by stage."""
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
