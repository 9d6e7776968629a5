"""Policies that choose the rung of a step: fixed, or by the sampled entropy.

A reducer asks its policy for the rung of a step and, after the exchange,
reports the measured errors and whether the step was finite. Policies see
gradients; the controller and the allocator behind `EntropyPolicy` do not.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from edgc_jax.adaptation import entropy
from edgc_jax.adaptation.allocation import Allocator, AllocatorState
from edgc_jax.adaptation.controller import Controller, ControllerState
from edgc_jax.comm import collectives, dataflow
from edgc_jax.comm.dataflow import AxisName
from edgc_jax.plan.leaves import Measurement
from edgc_jax.plan.plan import Plan


class PolicyState(NamedTuple):
  """State of a policy; a part is empty if the policy does not have it."""

  controller: ControllerState | tuple[()]
  allocator: AllocatorState | tuple[()]


class Choice(NamedTuple):
  """The choice of a policy for one step."""

  state: PolicyState
  rung: jax.Array  # int32 [], index into the ladder, equal on all replicas
  lead_rung: jax.Array  # int32 [], equal on all stages and shards
  ranks: jax.Array | None  # int32 [K]; None if all matrices have the rung's
  sample: entropy.EntropySample | None
  wire_bytes: jax.Array  # float32 [], sent to choose
  last: Any  # results of the last collectives; the next must wait for them


class Report(NamedTuple):
  """Diagnostics of a policy; None if not measured."""

  entropy: jax.Array | None = None  # float32 [], newest, nats
  predicted_error: jax.Array | None = None  # float32 [], share of the energy
  matrix_entropy: jax.Array | None = None  # float32 [K]
  matrix_predicted_error: jax.Array | None = None  # float32 [K]
  scale_jumps: jax.Array | None = None  # int32 [], windows with a jump


class Policy(Protocol):
  """Interface of the policies."""

  samples: bool  # whether it reads entries of gradients

  def init(self) -> PolicyState:
    """Returns the state before the first step."""

  def choose(
    self,
    state: PolicyState,
    gradients: Sequence[jax.Array],
    count: jax.Array,
    earlier: Any,
  ) -> Choice:
    """Chooses the rung of step `count` from its local gradients.

    Args:
      state: The state after the step before.
      gradients: The stage's own leaves, local.
      count: int32 [], steps done.
      earlier: Results of earlier collectives; the collectives of the policy
        wait for them (`dataflow.in_turn`).
    """

  def observe(
    self, choice: Choice, measured: Measurement, is_finite: jax.Array
  ) -> PolicyState:
    """Returns the state after the step; ignores a step that is not finite.

    Args:
      choice: The choice for the step.
      measured: Energies of the exchange, [K].
      is_finite: bool [], whether the gradients were finite.
    """

  def report(self, state: PolicyState) -> Report:
    """Returns the diagnostics after the step."""


@dataclasses.dataclass(frozen=True)
class FixedPolicy:
  """Fixed rungs that change at given steps: {first step: rung}."""

  rungs: Mapping[int, int]
  samples: ClassVar[bool] = False

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

  def observe(
    self, choice: Choice, measured: Measurement, is_finite: jax.Array
  ) -> PolicyState:
    del measured, is_finite
    return choice.state

  def report(self, state: PolicyState) -> Report:
    del state
    return Report()


@dataclasses.dataclass(frozen=True)
class EntropyPolicy:
  """Samples the entropy of the compressible leaves for the controller.

  Steps that are not sampled have no cost: the estimate and its collectives are
  in a branch. The end of a window sends `window_bytes`, a sample sends
  `entropy.sample_bytes`.
  """

  plan: Plan
  controller: Controller
  allocator: Allocator | None  # None if all matrices have the rung's rank
  axis_name: AxisName
  sampling: entropy.Sampling
  samples: ClassVar[bool] = True

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
      control.lead_rung if self.controller.shards else control.rung,
      control.lead_rung,
      allocator.ranks if self.allocator is not None else None,
      sample,
      wire_bytes + sampled_bytes,
      (earlier, state, sample.weight),
    )

  def window_bytes(self) -> int:
    """Returns the bytes sent at a window's end, over replicas and stages."""
    sent = self.controller.stage_bytes
    if collectives.num_devices(self.axis_name) > 1:
      shared = jax.eval_shape(lambda: self._shared_fields(self.init()))
      sent += 4 * sum(leaf.size for leaf in jax.tree.leaves(shared))
    return sent

  def _close_window(self, state: PolicyState, count: jax.Array) -> PolicyState:
    """Returns the state of the next window, as the first replica computes it.

    All replicas compute it from equal inputs. But rungs and ranks are discrete,
    and a replica that rounds differently by one ulp might take another branch
    of the program, with collectives of another size.
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
    # Must follow the broadcast of stage 0's rung over the stages.
    shared = dataflow.in_turn(self._shared_fields(state), control.lead_rung)
    shared = collectives.from_first(shared, self.axis_name)
    if shared.controller.lead_rung is None:
      lead = shared.controller._replace(lead_rung=shared.controller.rung)
      shared = shared._replace(controller=lead)
    return jax.tree.map(
      lambda own, first: own if first is None else first,
      state,
      shared,
      is_leaf=lambda x: x is None,
    )

  def observe(
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

  def _shared_fields(self, state: PolicyState) -> PolicyState:
    """Keeps the fields that the first replica broadcasts at a window's end.

    Replaces the others by None: the sums over a window, which start at zero,
    and, without stages and shards, `lead_rung`, which is `rung`.
    """
    controller, allocator = state
    controller = controller._replace(
      entropy_sum=None, variance_sum=None, num_samples=None
    )
    if self.controller.stage_axis is None and not self.controller.shards:
      controller = controller._replace(lead_rung=None)
    if allocator:
      no_sums = jax.tree.map(lambda _: None, allocator.sums)
      allocator = allocator._replace(sums=no_sums, num_steps=None)
    return PolicyState(controller, allocator)

  def _sample(
    self,
    gradients: Sequence[jax.Array],
    count: jax.Array,
    is_sampled: jax.Array,
  ) -> tuple[entropy.EntropySample, jax.Array]:
    """Returns a sample if `is_sampled`, else zeros, and the bytes sent."""
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
