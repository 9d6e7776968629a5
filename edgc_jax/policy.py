"""Which rung a step is on: fixed, or by the sampled entropy.

The compressor asks a policy for the rung of a step and, when the exchange is
done, tells it whether the step counted. Policies see gradients; the window
mechanism behind `EntropyPolicy` (`controller`) sees entropies only.
"""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp

from edgc_jax import collectives, entropy
from edgc_jax.comm_cost import Plan
from edgc_jax.controller import Controller, ControllerState


class Choice(NamedTuple):
  """What a policy says of one step."""

  state: ControllerState | tuple[()]
  rung: jax.Array  # int32 [], index into the ladder, equal on all replicas
  lead_rung: jax.Array  # int32 [], that of stage 0, equal on all stages
  sample: entropy.EntropySample | None
  wire_bytes: jax.Array  # float32 [], what choosing took


class Policy(Protocol):
  """How a reducer chooses its rung."""

  def init(self) -> ControllerState | tuple[()]:
    """The policy's part of the state."""

  def choose(
    self,
    state: ControllerState | tuple[()],
    gradients: Sequence[jax.Array],
    count: jax.Array,
  ) -> Choice:
    """Chooses the rung of step `count` from its local gradients."""

  def settle(
    self, choice: Choice, is_finite: jax.Array
  ) -> ControllerState | tuple[()]:
    """The state after the step; one that was not finite leaves no sample."""

  def report(
    self, state: ControllerState | tuple[()]
  ) -> tuple[jax.Array | None, jax.Array | None]:
    """The newest entropy and the predicted error, None if not measured."""


@dataclasses.dataclass(frozen=True)
class FixedPolicy:
  """Rung 0 for the first steps, then rung 1; or the only rung there is."""

  num_rungs: int
  warmup_steps: int

  def init(self) -> tuple[()]:
    return ()

  def choose(
    self, state: tuple[()], gradients: Sequence[jax.Array], count: jax.Array
  ) -> Choice:
    del gradients
    past = count >= self.warmup_steps
    rung = past.astype(jnp.int32) * (self.num_rungs - 1)
    return Choice(state, rung, rung, None, jnp.zeros((), jnp.float32))

  def settle(self, choice: Choice, is_finite: jax.Array) -> tuple[()]:
    del is_finite
    return choice.state

  def report(self, state: tuple[()]) -> tuple[None, None]:
    del state
    return None, None


@dataclasses.dataclass(frozen=True)
class EntropyPolicy:
  """Samples the entropy of the compressible leaves; the controller decides.

  A step that is not sampled pays nothing: the estimate and its collectives
  are a branch that is not taken.
  """

  plan: Plan
  controller: Controller
  axis_name: str
  period: int  # steps from one sample to the next
  entry_rate: float
  estimator: str
  bins: int

  def init(self) -> ControllerState:
    return self.controller.init()

  def choose(
    self,
    state: ControllerState,
    gradients: Sequence[jax.Array],
    count: jax.Array,
  ) -> Choice:
    state = self.controller.advance(state, count)
    aligned = self.controller.closes_window(count)
    wire_bytes = jnp.where(aligned, float(self.controller.window_bytes), 0.0)
    members = self.plan.compressible
    nothing = entropy.no_sample(len(self.plan.matrix_shapes))
    if not members:
      return Choice(state, state.rung, state.lead_rung, nothing, wire_bytes)
    is_sampled = count % self.period == 0

    def estimate() -> entropy.EntropySample:
      return entropy.estimate(
        [gradients[i] for i in members],
        [self.plan.shape_index(self.plan.leaves[i]) for i in members],
        count // self.period,
        self.axis_name,
        entry_rate=self.entry_rate,
        estimator=self.estimator,
        bins=self.bins,
      )

    types = jax.eval_shape(estimate)
    sample = jax.lax.cond(
      is_sampled,
      estimate,
      lambda: jax.tree.map(collectives.zeros_like_type, types),
    )
    size = entropy.sample_bytes(len(members), self.estimator, self.bins)
    wire_bytes += jnp.where(is_sampled, float(size), 0.0)
    return Choice(state, state.rung, state.lead_rung, sample, wire_bytes)

  def settle(self, choice: Choice, is_finite: jax.Array) -> ControllerState:
    weight = jnp.where(is_finite, choice.sample.weight, 0.0)
    sample = choice.sample._replace(weight=weight)
    return self.controller.observe(choice.state, sample)

  def report(self, state: ControllerState) -> tuple[jax.Array, jax.Array]:
    return state.entropy, self.controller.predicted_error(state)
