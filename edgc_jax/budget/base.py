"""What all budgets share: a budget chooses the rank of a stage at each step.

The rank sets how many bytes the matrices of a stage may send together. How they
share these bytes is the business of an allocation (`budget.allocation`).
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import jax

from edgc_jax.wire.channel import Channel


class Report(NamedTuple):
  """Diagnostics of a budget or an allocation; None if not measured."""

  entropy: jax.Array | None = None  # float32 [], newest, nats
  entropies: jax.Array | None = None  # float32 [K], of each matrix
  predicted_error: jax.Array | None = None  # float32 [], share of the energy
  predicted_errors: jax.Array | None = None  # float32 [K]


class Budget:
  """Base of the budgets: one that keeps no state and decides nothing.

  Attributes:
    ladder: The ranks that may be used, rising; 0, dense, is the first if it may
      be used. A level is an index into the ladder.
    first_level: The level of the first step.
    window: Steps between two decisions; None if there are none.
    samples: Whether the budget reads entries of gradients.
  """

  if TYPE_CHECKING:  # read-only: subclasses may be frozen, or compute them

    @property
    def ladder(self) -> tuple[int, ...]: ...
    @property
    def first_level(self) -> int: ...
    @property
    def window(self) -> int | None: ...

  samples: ClassVar[bool] = False

  @property
  def stage_bytes(self) -> int:
    """Bytes that a decision sends over the stages."""
    return 0

  def init(self) -> Any:
    """Returns the state before the first step."""
    return ()

  def levels(self, state: Any, count: jax.Array) -> tuple[Any, Any]:
    """Returns the level of step `count`, and the level of stage 0; int32 []."""
    raise NotImplementedError

  def close_window(self, state: Any, count: jax.Array) -> Any:
    """Returns the state after the decision before step `count`."""
    del count
    return state

  def decision(self, state: Any) -> Any:
    """Returns the discrete part of a state, on which replicas must agree."""
    del state

  def decided(self, state: Any, decision: Any) -> Any:
    """Returns the state with the decision of the first replica."""
    del decision
    return state

  def sample(
    self, gradients: Sequence[jax.Array], count: jax.Array, channel: Channel
  ) -> Any:
    """Samples the gradients of step `count`.

    Args:
      gradients: The compressed leaves as stacks of matrices, local.
      count: int32 [], steps done.
      channel: To the other replicas.

    Returns:
      The sample, or None.
    """
    del gradients, count, channel

  def observe(self, state: Any, sample: Any, is_usable: jax.Array) -> Any:
    """Adds a sample to the state, unless the step was not finite."""
    del sample, is_usable
    return state

  def variance(self, state: Any) -> jax.Array | None:
    """Returns the mean square of the entries of each matrix; float32 [K]."""
    del state

  def report(self, state: Any) -> Report:
    """Returns the diagnostics after a step."""
    del state
    return Report()
