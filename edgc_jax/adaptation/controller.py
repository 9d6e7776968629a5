"""Chooses the rung of every window from entropy samples.

The controller sees entropies, not gradients. Rung 0 is dense and rung i is the
i-th rank of the ladder. Window k is the steps [k window, (k + 1) window):

  | warm-up ... warm-up | rank_max | rule(H) | rule(H) | ...
    dense, or a rank      first      H = mean entropy of the window before
              H_ref = mean of the last window of warm-up, kept permanently

The warm-up takes at least one window, and continues while the model expects
rank_min to lose more now than rank_max would have lost in the first window.

The state is small and equal on all replicas; each pipeline stage has its own.
Stage 0 is on the critical path. At the end of a window it broadcasts its rung,
and each stage takes the rung that fits into its slack (`alignment`), or keeps
its own choice if stages are not aligned. Shards of the leaves have one rung: at
the end of a window they average their entropies and ln G, and take the rung of
the first shard.

If the loss's scale or the batch size changes, so do all entropies. `rescaled`
shifts the references by a known factor, `mark_rebase` by the next whole window.
"""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from edgc_jax.adaptation import alignment, error_model, rank_rule
from edgc_jax.adaptation.entropy import EntropySample, has_jumped
from edgc_jax.adaptation.rank_rule import RankRule
from edgc_jax.comm import collectives
from edgc_jax.plan.plan import Plan

# Bits of `rebase`. MARKED: the batch size changed in the running window, whose
# mean is used only if all its samples are from before the change. DUE: the next
# whole window shifts the references. Both are set if the batch size changes
# again before that window has ended.
MARKED, DUE = 1, 2


class ControllerState(NamedTuple):
  """Window state; entropies in nats, all equal over the data axis.

  Each pipeline stage and each shard has its own, except for `lead_rung`.
  """

  lead_rung: jax.Array  # int32 [], rung of stage 0 or the first shard
  rung: jax.Array  # int32 []
  is_warm: jax.Array  # bool [], whether the warm-up is over
  num_windows: jax.Array  # int32 [], whole windows so far, with a sample
  entropy: jax.Array  # float32 [], newest sample
  entropy_sum: jax.Array  # float32 [], over the samples of this window
  entropies: jax.Array  # float32 [K], of each matrix, newest sample
  variance_sum: jax.Array  # float32 [K], over the samples of this window
  num_samples: jax.Array  # float32 [], in this window
  window_entropy: jax.Array  # float32 [], mean of the last whole window
  first_entropy: jax.Array  # float32 [], mean of the first whole window
  first_change: jax.Array  # float32 [], mean of the second less the first
  reference_entropy: jax.Array  # float32 [], H_ref
  reference_variance: jax.Array  # float32 [K], in the window of H_ref
  window_variance: jax.Array  # float32 [K], in the last whole window
  rebase: jax.Array  # int32 [], bits MARKED and DUE
  num_before: jax.Array  # float32 [], samples of this window before its mark
  scale_jumps: jax.Array  # int32 [], windows with a jump (`has_jumped`)


def first_state(warmup_rung: int, num_matrices: int) -> ControllerState:
  """Returns the state before the first step, without measurements."""
  # A new array for every field: an array used twice cannot be donated.
  zero = functools.partial(jnp.zeros, (), jnp.float32)
  integer = functools.partial(jnp.full, (), dtype=jnp.int32)
  per_matrix = functools.partial(jnp.zeros, num_matrices, jnp.float32)
  return ControllerState(
    lead_rung=integer(warmup_rung),
    rung=integer(warmup_rung),
    is_warm=jnp.zeros((), bool),
    num_windows=integer(0),
    entropy=zero(),
    entropy_sum=zero(),
    entropies=per_matrix(),
    variance_sum=per_matrix(),
    num_samples=zero(),
    window_entropy=zero(),
    first_entropy=zero(),
    first_change=zero(),
    reference_entropy=zero(),
    reference_variance=per_matrix(),
    window_variance=per_matrix(),
    rebase=integer(0),
    num_before=zero(),
    scale_jumps=integer(0),
  )


def rescaled(state: ControllerState, factor: float) -> ControllerState:
  """Returns the state as if all past gradients were `factor` times as large."""
  shift, squared = math.log(factor), factor**2
  return state._replace(
    entropy=state.entropy + shift,
    entropy_sum=state.entropy_sum + shift * state.num_samples,
    entropies=state.entropies + shift,
    variance_sum=state.variance_sum * squared,
    window_entropy=state.window_entropy + shift,
    first_entropy=state.first_entropy + shift,
    reference_entropy=state.reference_entropy + shift,
    reference_variance=state.reference_variance * squared,
    window_variance=state.window_variance * squared,
  )


def mark_rebase(state: ControllerState) -> ControllerState:
  """Marks that gradients have another batch size from the next step on.

  Works on a state of one device, stacked by pmap, global, or of NumPy arrays.
  """
  is_marked = (state.rebase & MARKED) > 0
  before = state.num_before * is_marked + state.num_samples * ~is_marked
  return state._replace(rebase=state.rebase | MARKED, num_before=before)


def rebased(
  state: ControllerState, entropy: jax.Array, has_sample: jax.Array
) -> ControllerState:
  """Shifts the references, if due, to make the last window's mean `entropy`."""
  is_due = (state.rebase & DUE > 0) & has_sample
  shift = jnp.where(
    is_due & (state.num_windows > 0), entropy - state.window_entropy, 0.0
  )
  return state._replace(
    window_entropy=state.window_entropy + shift,
    first_entropy=state.first_entropy + shift,
    reference_entropy=state.reference_entropy + shift,
    rebase=jnp.where(is_due, state.rebase & ~DUE, state.rebase),
  )


@dataclasses.dataclass(frozen=True)
class Controller:
  """Chooses the rung of each window; `edgc` documents the options."""

  ranks: tuple[int, ...]
  window: int
  warmup_steps: int
  rule: RankRule
  warmup_rung: int  # 0 for dense
  max_rank_step: int
  sizes: np.ndarray  # float32 [K], from Plan.sizes
  table: np.ndarray  # float32 [K, rank_max + 1], from error_model.loss_table
  stage_axis: str | None = None
  # float64 [num_rungs], modelled seconds of each; None if stages are not
  # aligned, and each follows its own entropy.
  rung_seconds: np.ndarray | None = None
  backward_seconds: float = 0.0  # of one microbatch
  shards: tuple[str, ...] = ()  # axes over which leaves are sharded

  @classmethod
  def for_plan(cls, plan: Plan, rule: RankRule, **options: Any) -> "Controller":
    """Returns a controller with the ladder and the model tables of a plan.

    Raises:
      ValueError: if the ladder does not fit the rule.
    """
    ranks = tuple(rank for rank in plan.ladder if rank > 0)
    return cls(
      ranks=ranks,
      rule=rule,
      warmup_rung=rule.warmup_rung(ranks),
      max_rank_step=rule.rank_step(ranks),
      sizes=plan.sizes,
      table=error_model.loss_table(plan),
      **options,
    )

  def init(self) -> ControllerState:
    """Returns the state before the first step, without measurements."""
    return first_state(self.warmup_rung, len(self.sizes))

  def observe(
    self, state: ControllerState, sample: EntropySample
  ) -> ControllerState:
    """Adds a sample to the running window; weight 0 adds nothing."""
    weight = sample.weight
    return state._replace(
      entropy=jnp.where(weight > 0, sample.entropy, state.entropy),
      entropies=jnp.where(weight > 0, sample.entropies, state.entropies),
      entropy_sum=state.entropy_sum + weight * sample.entropy,
      variance_sum=state.variance_sum + weight * sample.variance,
      num_samples=state.num_samples + weight,
    )

  def closes_window(self, count: jax.Array) -> jax.Array:
    """Returns whether a window ends before step `count`; bool []."""
    return (count > 0) & (count % self.window == 0)

  @property
  def stage_bytes(self) -> int:
    """Bytes sent over the stages at the end of a window."""
    if self.stage_axis is None:
      return 0
    return 4 if self.rung_seconds is None else 8

  def predicted_error(self, state: ControllerState) -> jax.Array:
    """Predicts the share of energy that the rung loses; float32 [], in [0, 1].

    The model assumes independent entries: correlated gradients lose less.
    """
    errors = self._log_error(state.reference_variance)
    ranks = jnp.array((0, *self.ranks), jnp.int32)
    # G(r) / G(0)
    lost = jnp.exp(errors[ranks[state.rung]] - errors[0])
    return jnp.where(state.rung > 0, lost, 0.0)

  def predicted_errors(self, state: ControllerState) -> jax.Array:
    """Predicts the same share for each matrix; float32 [K]."""
    ranks = jnp.array((0, *self.ranks), jnp.int32)
    lost = jnp.exp(jnp.asarray(self.table)[:, ranks[state.rung]])
    return jnp.where(state.rung > 0, lost, 0.0)

  def _log_error(self, variance: jax.Array) -> jax.Array:
    return error_model.log_error(self.table, self.sizes, variance)

  def close_window(
    self, state: ControllerState, count: jax.Array
  ) -> ControllerState:
    """Chooses the rung of the window that begins with step `count`.

    A window without a usable sample keeps the rung. Replicas that round
    differently may choose different rungs, so one of them decides for all
    (`policy`).

    Args:
      state: The state after step count - 1, the last one of a window.
      count: int32 [], steps done.

    Returns:
      The state to use in step `count`.
    """
    num_closed = count // self.window
    variance = state.variance_sum / jnp.maximum(state.num_samples, 1.0)
    errors = [self._log_error(v) for v in (variance, state.reference_variance)]
    entropy_sum, num_samples, (error, reference_error) = self._pooled(
      (state.entropy_sum, state.num_samples, errors)
    )
    # A mean over entropies from before and after a mark has no meaning.
    is_marked = state.rebase & MARKED > 0
    is_mixed = is_marked & (state.num_samples > state.num_before)
    has_sample = (num_samples > 0) & ~is_mixed
    entropy = entropy_sum / jnp.maximum(num_samples, 1.0)
    state = rebased(state, entropy, has_sample)
    before = state.num_windows
    jumped = (
      state.is_warm & ~is_marked & has_jumped(variance, state.window_variance)
    )
    first = jnp.where(before == 0, entropy, state.first_entropy)
    change = jnp.where(before == 1, entropy - first, state.first_change)
    ends_warmup = self._ends_warmup(
      state, has_sample, num_closed, entropy, first, error
    )
    closed = state._replace(
      num_windows=before + 1,
      first_entropy=first,
      first_change=change,
      scale_jumps=state.scale_jumps + jumped.astype(jnp.int32),
    )
    target = self._target_rank(closed, entropy, reference_error)
    top = jnp.int32(len(self.ranks))
    next_rung = 1 + rank_rule.round_to_ladder(
      target, state.rung - 1, self.ranks, self.max_rank_step
    )
    closed = closed._replace(
      rung=jnp.where(
        state.is_warm, next_rung, jnp.where(ends_warmup, top, self.warmup_rung)
      ),
      window_entropy=entropy,
      window_variance=variance,
      reference_entropy=jnp.where(
        ends_warmup, entropy, state.reference_entropy
      ),
      reference_variance=jnp.where(
        ends_warmup, variance, state.reference_variance
      ),
    )
    closed = jax.tree.map(
      lambda new, old: jnp.where(has_sample, new, old), closed, state
    )
    return self._align(closed)._replace(
      is_warm=state.is_warm | ends_warmup,
      entropy_sum=jnp.zeros_like(state.entropy_sum),
      variance_sum=jnp.zeros_like(state.variance_sum),
      num_samples=jnp.zeros_like(state.num_samples),
      rebase=jnp.where(is_marked, DUE, state.rebase),
    )

  def _pooled(self, tree: Any) -> Any:
    """Returns the means of numbers over the shards, the same on each."""
    if not self.shards:
      return tree
    tree = collectives.as_varying(tree, self.shards)
    return collectives.mean(tree, self.shards)

  def _align(self, state: ControllerState) -> ControllerState:
    """Broadcasts the rung of stage 0, and aligns each stage's rung with it.

    All shards take the rung of the first.
    """
    if self.shards:
      rung = collectives.as_varying(state.rung, self.shards)
      lead_rung = collectives.from_first(rung, self.shards)
      return state._replace(
        lead_rung=lead_rung,
        rung=collectives.as_varying(lead_rung, self.shards),
      )
    if self.stage_axis is None:
      return state._replace(lead_rung=state.rung)
    lead_rung = collectives.from_first(state.rung, self.stage_axis)
    state = state._replace(lead_rung=lead_rung)
    if self.rung_seconds is None:
      return state
    num_stages = collectives.num_devices(self.stage_axis, "stage_axis")
    table = alignment.aligned_rungs(
      self.rung_seconds, num_stages, self.backward_seconds
    )
    stage = collectives.device_index(self.stage_axis)
    return state._replace(rung=jnp.asarray(table)[stage, lead_rung])

  def _ends_warmup(
    self,
    state: ControllerState,
    has_sample: jax.Array,
    num_closed: jax.Array,
    entropy: jax.Array,
    first_entropy: jax.Array,
    errors: jax.Array,
  ) -> jax.Array:
    """Returns whether the warm-up ends with this window.

    The window must have a sample. If stages are aligned, stage 0 decides.
    """
    may_end = self._may_end_warmup(num_closed, entropy, first_entropy, errors)
    ends = ~state.is_warm & may_end & has_sample
    if self.rung_seconds is None:
      return ends
    return collectives.from_first(ends.astype(jnp.int32), self.stage_axis) > 0

  def _may_end_warmup(
    self,
    num_closed: jax.Array,
    entropy: jax.Array,
    first_entropy: jax.Array,
    errors: jax.Array,
  ) -> jax.Array:
    """Returns whether the warm-up may, or must, end with this window.

    It may from its least length on, if with exponent k and this window's G

      e^(k H) G(rank_min) <= e^(k H_first) G(rank_max)
    """
    least = max(1, math.ceil(self.warmup_steps / self.window))
    most = self.rule.max_warmup_steps
    most = 2 * self.warmup_steps if most is None else most
    most = max(least, math.ceil(most / self.window))
    exponent = self.rule.exponent
    loss_now = exponent * entropy + errors[self.ranks[0]]
    loss_then = exponent * first_entropy + errors[self.ranks[-1]]
    return ((num_closed >= least) & (loss_now <= loss_then)) | (
      num_closed >= most
    )

  def _target_rank(
    self,
    state: ControllerState,
    entropy: jax.Array,
    reference_error: jax.Array,
  ) -> jax.Array:
    """Returns the rank that the rule asks for, a real number."""
    if self.rule.name == "linear":
      return rank_rule.linear_rank(
        self.ranks[0],
        self.ranks[-1],
        entropy,
        state.window_entropy,
        state.first_change,
      )
    return rank_rule.cqm_rank(
      reference_error,
      self.ranks[-1],
      entropy,
      state.reference_entropy,
      self.rule.exponent,
    )
