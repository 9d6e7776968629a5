"""Which rung a step is on: fixed, or by the sampled entropy.

The compressor asks a policy for the rung of a step and, when the exchange is
done, tells it whether the step counted. Policies see gradients; the window
mechanism behind `EntropyPolicy` (`controller`) sees entropies only.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from edgc_jax.adaptation import entropy
from edgc_jax.adaptation.allocation import Allocator, AllocatorState
from edgc_jax.adaptation.controller import Controller, ControllerState
from edgc_jax.comm import collectives, dataflow
from edgc_jax.plan.leaves import Measurement
from edgc_jax.plan.plan import Plan


class PolicyState(NamedTuple):
  """The policy's part of the state; empty where it has none."""

  controller: ControllerState | tuple[()]
  allocator: AllocatorState | tuple[()]


class Choice(NamedTuple):
  """What a policy says of one step."""

  state: PolicyState
  rung: jax.Array  # int32 [], index into the ladder, equal on all replicas
  lead_rung: jax.Array  # int32 [], that of stage 0, equal on all stages
  ranks: jax.Array | None  # int32 [K], where matrices have ranks of their own
  sample: entropy.EntropySample | None
  wire_bytes: jax.Array  # float32 [], what choosing took
  last: Any  # of that, which what comes next waits for


class Report(NamedTuple):
  """What a policy knows beside its choice; None where it measures nothing."""

  entropy: jax.Array | None = None  # float32 [], newest, nats
  predicted_error: jax.Array | None = None  # float32 [], share of the energy
  matrix_entropy: jax.Array | None = None  # float32 [K]
  matrix_predicted_error: jax.Array | None = None  # float32 [K]
  scale_jumps: jax.Array | None = None  # int32 [], windows with one


class Policy(Protocol):
  """How a reducer chooses its rung."""

  def init(self) -> PolicyState:
    """The state before the first step."""

  def choose(
    self,
    state: PolicyState,
    gradients: Sequence[jax.Array],
    count: jax.Array,
    earlier: Any,
  ) -> Choice:
    """Chooses the rung of step `count` from its local gradients.

    What it sends waits for `earlier` (`ordering.in_turn`).
    """

  def settle(
    self, choice: Choice, measured: Measurement, is_finite: jax.Array
  ) -> PolicyState:
    """The state after the step; one that was not finite leaves no trace."""

  def report(self, state: PolicyState) -> Report:
    """What is known after the step."""


@dataclasses.dataclass(frozen=True)
class FixedPolicy:
  """Rungs that change at given steps: {first step: rung}."""

  rungs: Mapping[int, int]

  def init(self) -> PolicyState:
    return PolicyState((), ())

  def choose(
    self,
    state: PolicyState,
    gradients: Sequence[jax.Array],
    count: jax.Array,
    earlier: Any,
  ) -> Choice:
    del gradients
    starts = np.array(sorted(self.rungs), np.int32)
    rungs = jnp.array([self.rungs[int(start)] for start in starts], jnp.int32)
    rung = rungs[jnp.sum(count >= starts[1:])]
    nothing = jnp.zeros((), jnp.float32)
    return Choice(state, rung, rung, None, None, nothing, earlier)

  def settle(
    self, choice: Choice, measured: Measurement, is_finite: jax.Array
  ) -> PolicyState:
    del measured, is_finite
    return choice.state

  def report(self, state: PolicyState) -> Report:
    del state
    return Report()


@dataclasses.dataclass(frozen=True)
class EntropyPolicy:
  """Samples the entropy of the compressible leaves; the controller decides.

  A step that is not sampled pays nothing: the estimate and its collectives
  are a branch that is not taken.
  """

  plan: Plan
  controller: Controller
  allocator: Allocator | None  # None: all matrices have the rank of the rung
  axis_name: str
  sampling: entropy.Sampling

  def init(self) -> PolicyState:
    allocator = ()
    if self.allocator is not None:
      allocator = self.allocator.init(self.controller.warmup_rung)
    return PolicyState(self.controller.init(), allocator)

  def choose(
    self,
    state: PolicyState,
    gradients: Sequence[jax.Array],
    count: jax.Array,
    earlier: Any,
  ) -> Choice:
    is_closed = self.controller.closes_window(count)
    state = jax.lax.cond(
      dataflow.in_turn(is_closed, earlier),
      lambda s: self._close_window(s, count),
      lambda s: s,
      state,
    )
    control, allocator = state
    wire_bytes = jnp.where(is_closed, float(self.window_bytes()), 0.0)
    is_sampled = dataflow.in_turn(count % self.sampling.period == 0, state)
    sample, sampled_bytes = self._sample(gradients, count, is_sampled)
    return Choice(
      state,
      control.rung,
      control.lead_rung,
      allocator.ranks if self.allocator is not None else None,
      sample,
      wire_bytes + sampled_bytes,
      (earlier, state, sample.weight),
    )

  def window_bytes(self) -> int:
    """Bytes that a window's end sends, over the replicas and the stages."""
    sent = self.controller.stage_bytes
    if collectives.num_devices(self.axis_name) > 1:
      told = jax.eval_shape(lambda: self._told(self.init()))
      sent += 4 * sum(leaf.size for leaf in jax.tree.leaves(told))
    return sent

  def _close_window(self, state: PolicyState, count: jax.Array) -> PolicyState:
    """The state of the window that begins, as the first replica has it.

    All replicas compute it from numbers that all have received; but a rank or
    a rung is discrete, and one ulp more or less would be another branch of the
    program, with collectives of another size.
    """
    control = self.controller.close_window(state.controller, count)
    allocator = state.allocator
    if self.allocator is not None:
      allocator = self.allocator.share_out(
        allocator,
        (state.controller.rung, control.rung),
        control.window_variance,
      )
    state = PolicyState(control, allocator)
    # On stages the rung of the lead was sent before.
    told = dataflow.in_turn(self._told(state), control.lead_rung)
    told = collectives.from_first(told, self.axis_name)
    if told.controller.lead_rung is None:
      lead = told.controller._replace(lead_rung=told.controller.rung)
      told = told._replace(controller=lead)
    return jax.tree.map(
      lambda own, first: own if first is None else first,
      state,
      told,
      is_leaf=lambda x: x is None,
    )

  def settle(
    self, choice: Choice, measured: Measurement, is_finite: jax.Array
  ) -> PolicyState:
    weight = jnp.where(is_finite, choice.sample.weight, 0.0)
    sample = choice.sample._replace(weight=weight)
    state = choice.state
    allocator = state.allocator
    if self.allocator is not None:
      allocator = self.allocator.observe(allocator, measured, is_finite)
    return PolicyState(
      self.controller.observe(state.controller, sample), allocator
    )

  def report(self, state: PolicyState) -> Report:
    control, allocator = state
    if self.allocator is None:
      error = self.controller.predicted_error(control)
      errors = self.controller.predicted_errors(control)
    else:
      error, errors = allocator.predicted_error, allocator.predicted_errors
    return Report(
      control.entropy, error, control.entropies, errors, control.scale_jumps
    )

  def _told(self, state: PolicyState) -> PolicyState:
    """What the first replica tells the others at a window's end.

    All but sums over the window, which begin at zero; None stands for them, and
    for the rung of the lead where there are no stages.
    """
    controller, allocator = state
    controller = controller._replace(
      entropy_sum=None, variance_sum=None, num_samples=None
    )
    if self.controller.stage_axis is None:
      controller = controller._replace(lead_rung=None)
    if allocator:
      nothing = jax.tree.map(lambda _: None, allocator.sums)
      allocator = allocator._replace(sums=nothing, num_steps=None)
    return PolicyState(controller, allocator)

  def _sample(
    self,
    gradients: Sequence[jax.Array],
    count: jax.Array,
    is_sampled: jax.Array,
  ) -> tuple[entropy.EntropySample, jax.Array]:
    """A sample if there is to be one, and the bytes it takes."""
    members = self.plan.compressible
    num = len(self.plan.matrices)
    if not members:
      return entropy.no_sample(num), jnp.zeros((), jnp.float32)
    views = [self.plan.leaves[i].view for i in members]

    def estimate() -> entropy.EntropySample:
      return entropy.estimate(
        [
          gradients[i].reshape(view)
          for i, view in zip(members, views, strict=True)
        ],
        count // self.sampling.period,
        self.axis_name,
        self.sampling,
      )

    types = jax.eval_shape(estimate)
    sample = jax.lax.cond(
      is_sampled,
      estimate,
      lambda: jax.tree.map(collectives.zeros_like_type, types),
    )
    size = entropy.sample_bytes(num, self.sampling)
    return sample, jnp.where(is_sampled, float(size), 0.0)
