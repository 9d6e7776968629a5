"""The rounds of a run at one of several sites, which share a bucket."""

import collections
import os
import zlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from ml_collections import ConfigDict

import edgc_jax
from experiments.trainer.parallel.backend import Backend
from experiments.trainer.runtime import hosts
from experiments.trainer.tasks.base import Task
from experiments.trainer.training.optimizer import at_step

_KEY = "EDGC_SITE_KEY"  # environment variable: a configuration is written down


def seed_of(config: ConfigDict) -> int:
  """Returns the seed of a run's batches: each site has an order of its own."""
  return config.seed + zlib.crc32(config.site.name.encode())


def _moved(opt_state: Any, step: int, reached: int) -> Any:
  """Returns a state whose schedule skips as many steps as the run has."""
  return at_step(opt_state, reached) if reached > step else opt_state


class SiteRounds:
  """A site that exchanges what a run's parameters have moved.

  Attributes:
    numbers: Of the rounds so far, for the log.
  """

  def __init__(self, config: ConfigDict, task: Task, parallel: Backend):
    """Reads nothing yet.

    Raises:
      ValueError: if an option of the section `site` is out of range.
    """
    options = config.site.to_dict()
    self._every, self._steps = options["every"], config.steps
    key = os.environ.get(_KEY)
    self._site = edgc_jax.Site(**options, key=key.encode() if key else None)
    self._parallel = parallel
    self._units = config.batch_size * task.units_per_row
    self._since = 0  # steps of this round
    self._late: collections.Counter[str] = collections.Counter()
    self._last: Any = None  # common parameters of a run that has all its rounds
    self.numbers: dict[str, float] = {}

  def state(self) -> dict[str, Any]:
    """Returns the numbers so far, for a checkpoint."""
    return {"numbers": dict(self.numbers), "late": dict(self._late)}

  def join(
    self, step: int, params: Any, opt_state: Any, before: Mapping[str, Any]
  ) -> tuple[Any, Any, int]:
    """Joins the run; takes and returns what `after` does.

    Args:
      step: The step that is done, from 1 on.
      params, opt_state: Of the run.
      before: From `state` before a resume; else empty.
    """
    self.numbers = dict(before.get("numbers", {}))
    self._late.update(before.get("late", {}))
    stored, _ = self._parallel.to_stored((params, opt_state))
    params = self._parallel.of_stored(self._site.join(stored))
    if (self._every or 0) * self._site.round >= self._steps:
      self._last = jax.tree.map(jnp.copy, params)
    reached = self._reached(step)
    text = f"site {self._site.name} begins with round {self._site.round}"
    if reached > step:
      text += f", at step {reached + 1}; its optimiser has done {step} steps"
    hosts.say(text)
    return params, _moved(opt_state, step, reached), reached

  def after(
    self, step: int, params: Any, opt_state: Any
  ) -> tuple[Any, Any, int]:
    """Exchanges if a round ends, as it does after the last step.

    Args:
      step: The step that is done, from 1 on.
      params, opt_state: Of the run.

    Returns:
      The parameters, the optimiser's state, and the step at which the run is:
      where a site was away, that of the round which the others have reached, to
      which the schedule of the learning rate moves.
    """
    if self._last is not None:  # the step was for the log alone
      return self._last, opt_state, step
    self._since += 1
    if not self._site.is_due(step - 1) and step != self._steps:
      return params, opt_state, step
    stored, _ = self._parallel.to_stored((params, opt_state))
    stored = self._site.exchange(stored, self._since * self._units)
    found = self._site.last
    if found is None or self._site.name in found.members:
      self._since = 0
    self._count()
    reached = self._reached(step)
    opt_state = _moved(opt_state, step, reached)
    return self._parallel.of_stored(stored), opt_state, reached

  def _reached(self, step: int) -> int:
    """Returns the step of the run; one is left to end with."""
    reached = (self._every or 0) * self._site.round
    return max(step, min(reached, self._steps - 1))

  def leave(self) -> None:
    """Tells the other sites that this one has ended."""
    self._site.leave()

  def summary(self) -> dict[str, Any]:
    """Returns the numbers over all rounds, and how often who was late."""
    return {**self.numbers, "site_late": dict(self._late)}

  def _count(self) -> None:
    """Adds a round to the numbers, and says what happened in it."""
    found = self._site.last
    if found is None:  # not the first process
      return
    self._late.update(found.late)
    before = self.numbers
    self.numbers = {
      "site_rounds": before.get("site_rounds", 0) + 1,
      "site_members": len(found.members),
      "site_sent": before.get("site_sent", 0) + found.sent,
      "site_received": before.get("site_received", 0) + found.received,
      "site_waited": before.get("site_waited", 0.0) + found.waited,
    }
    hosts.say(str(found))
