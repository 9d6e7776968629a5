"""Stops a run that more steps cannot help, and warns of residuals that grow."""

import sys
from collections.abc import Mapping
from typing import Any

from ml_collections import ConfigDict

from edgc_jax.state.growth import DIVERGING, WINDOW
from experiments.trainer.runtime import hosts


class TrainingStopped(RuntimeError):
  """Raised if a run cannot continue; the message gives the reason."""


class ProgressCheck:
  """Looks at each logged line of a run."""

  def __init__(
    self,
    config: ConfigDict,
    line: Mapping[str, Any] | None = None,
    replicas: int | None = None,
  ):
    """Begins a run, or goes on after a line.

    Args:
      config: Of the run.
      line: The newest one, if there is one.
      replicas: The number of replicas that it is of.
    """
    self._config, line = config, line or {}
    self._has_warned = False
    # Skipped steps by then, and the last step at which some replica had not
    # skipped all of its own since the line before. Other replicas have other
    # counts, which their first line tells.
    is_resized = replicas not in (None, config.mesh.data)
    skipped = None if is_resized else line.get("skipped_inner_steps", 0)
    self._useful = skipped, line.get("step", 0)

  def check(self, line: Mapping[str, Any]) -> None:
    """Raises `TrainingStopped` unless more steps can help."""
    config = self._config
    windows = line.get("new_diverging_windows", 0)
    if windows >= DIVERGING and not self._has_warned and hosts.is_first():
      self._has_warned = True
      print(
        f"warning: by step {line['step']} the residual has grown for {windows}"
        f" windows of {WINDOW} steps, and is larger than all gradients so far"
        " together: error feedback diverges. Use more bits, a larger rank or"
        " density, or a residual_decay below 1.",
        file=sys.stderr,
      )
    if line["identical_gradients"] and config.mesh.data > 1:
      raise TrainingStopped(
        "All replicas had the same gradients in the first steps, so averaging"
        " them changes nothing; give every replica its own part of the batch."
      )
    skips = line.get("consecutive_skips", 0)
    if "skipped_inner_steps" in line:
      skips = self._skipped_by_all(line)
    if skips >= config.optimizer.max_consecutive_skips:
      raise TrainingStopped(
        f"{skips} steps in a row up to step {line['step']} had"
        " non-finite gradients; lower optimizer.lr or check the data."
      )

  def _skipped_by_all(self, line: Mapping[str, Any]) -> int:
    """Returns the steps since the last line with a step that was not skipped.

    Under local steps each replica skips its own.
    """
    skipped, step = line["skipped_inner_steps"], line["step"]
    before, since = self._useful
    steps = self._config.mesh.data * (step - since)
    if before is None or skipped - before < steps:
      self._useful = skipped, step
    return step - self._useful[1]
