"""A budget of fixed ranks that change at given steps."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from edgc_jax.budget.base import Budget


@dataclasses.dataclass(frozen=True)
class FixedBudget(Budget):
  """Ranks by step, {first step: rank}; 0 is dense.

  Attributes:
    schedule: The ranks; one starts at step 0.
    window: Steps between two allocations; None if all matrices have the rank.
  """

  schedule: Mapping[int, int] = dataclasses.field(
    default_factory=lambda: {0: 0}
  )
  window: int | None = None

  @functools.cached_property
  def ladder(self) -> tuple[int, ...]:
    """The ranks of the schedule, rising."""
    return tuple(sorted(set(self.schedule.values())))

  @property
  def first_level(self) -> int:
    return self.ladder.index(self.schedule[0])

  def levels(self, state: Any, count: jax.Array) -> tuple[Any, Any]:
    del state
    starts = sorted(self.schedule)
    levels = [self.ladder.index(self.schedule[start]) for start in starts]
    passed = jnp.sum(count >= np.array(starts[1:], np.int32))
    level = jnp.array(levels, jnp.int32)[passed]
    return level, level
