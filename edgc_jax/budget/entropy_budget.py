"""A budget that follows entropy: chooses the rank of every window.

Window k is the steps [k window, (k + 1) window):

  | warm-up ... warm-up | rank_max | rule(H) | rule(H) | ...
    dense, or a rank      first      H = mean entropy of the window before
              H_ref = mean of the last window of warm-up, kept permanently

The warm-up takes at least one window, and continues while the model expects
rank_min to lose more now than rank_max would have lost in the first window.

The state is small and equal on all replicas, up to rounding; what is discrete
in it (`Decision`) the first replica decides. Each pipeline stage has its own
state. Stage 0 is on the critical path. At the end of a window it broadcasts its
rank, and each stage takes the rank that fits into its slack (`alignment`), or
keeps its own choice if stages are not aligned. The shards of a stage have one
rank: at the end of a window they average their entropies and ln G, and follow
the decision of the first shard.

If the batch size or the scale of the loss changes, so do all entropies:
`restarted` shifts the references by the next whole window.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from edgc_jax.budget import alignment, entropy, error_model, rules
from edgc_jax.budget.base import Budget, Report
from edgc_jax.budget.entropy import EntropySample, Sampling
from edgc_jax.budget.rules import Rule, Window
from edgc_jax.leaves.leaf import Leaf
from edgc_jax.wire import collectives
from edgc_jax.wire.channel import Channel


class Decision(NamedTuple):
  """What the replicas and shards of a stage must agree on to the bit."""

  rank: jax.Array  # int32 []
  is_warm: jax.Array  # bool [], whether the warm-up is over


class EntropyState(NamedTuple):
  """Window state; entropies in nats, K matrices, equal over the data axis.

  Each pipeline stage and each shard has its own, except for `decision`, which
  the shards of a stage share, and `first_rank`.
  """

  decision: Decision
  first_rank: jax.Array  # int32 [], rank of stage 0
  num_windows: jax.Array  # int32 [], whole windows so far, with a sample
  entropy: jax.Array  # float32 [], newest sample
  entropies: jax.Array  # float32 [K], newest sample
  entropy_sum: jax.Array  # float32 [], over the samples of this window
  variance_sum: jax.Array  # float32 [K], over the samples of this window
  num_samples: jax.Array  # float32 [], in this window
  window_entropy: jax.Array  # float32 [], mean of the last whole window
  window_variance: jax.Array  # float32 [K], in the last whole window
  first_entropy: jax.Array  # float32 [], mean of the first whole window
  first_change: jax.Array  # float32 [], mean of the second less the first
  reference_entropy: jax.Array  # float32 [], H_ref
  reference_variance: jax.Array  # float32 [K], in the window of H_ref
  # int32 [], 0, or windows to end before the references have shifted: 2 while
  # the change is in the running window, 1 while the next one is measured
  restarts: jax.Array
  # float32 [], of the last window's mean; after the warm-up, not at a restart
  last_change: jax.Array
  total_steps: jax.Array  # int32 [], constant: steps of the run; 0 if not given


def restarted(state: EntropyState) -> EntropyState:
  """Returns a state whose references shift at the end of the next whole window.

  Works on a state of one device, stacked by pmap, global, or of NumPy arrays.
  The samples of the running window, from before and after the change, are
  dropped when it ends.
  """
  # A leaf of its own kind, such as flax's OptArray, remains one.
  restarts = jax.tree.map(lambda x: x * 0 + 2, state.restarts)
  return state._replace(restarts=restarts)


@dataclasses.dataclass(frozen=True)
class EntropyBudget(Budget):
  """Ranks by window, from entropy samples; `edgc` documents the options.

  Attributes:
    ladder: The ranks that may be used, rising; 0, dense, first if used.
    window: Steps of a window.
    warmup_steps, max_warmup_steps: Least and most steps of the warm-up.
    warmup_rank: Its rank, of the ladder.
    rule: From the statistics of a window to a rank.
    max_rank_step: Largest change of rank from one window to the next.
    sampling: Steps and entries that are sampled.
    matrices: The leaf of each of K matrices.
    total_steps: Steps of the run; 0 if not given.
    stage_axis: The axis of pipeline stages, if any.
    seconds: Modelled seconds of an exchange at each rank of the ladder; None if
      stages are not aligned, and each follows its own entropy.
    backward_seconds: Of one microbatch.
    shards: Axes over which leaves are sharded.
  """

  ladder: tuple[int, ...]
  window: int
  warmup_steps: int
  max_warmup_steps: int
  warmup_rank: int
  rule: Rule
  max_rank_step: int
  sampling: Sampling
  matrices: tuple[Leaf, ...]
  total_steps: int = 0
  stage_axis: str | None = None
  seconds: np.ndarray | None = None
  backward_seconds: float = 0.0
  shards: tuple[str, ...] = ()
  samples: ClassVar[bool] = True

  @functools.cached_property
  def ranks(self) -> tuple[int, ...]:
    """The ladder without dense."""
    return tuple(rank for rank in self.ladder if rank)

  def init(self) -> EntropyState:
    # A new array for every field: an array used twice cannot be donated.
    zero = functools.partial(jnp.zeros, (), jnp.float32)
    per_matrix = functools.partial(jnp.zeros, len(self.matrices), jnp.float32)
    rank = functools.partial(jnp.array, self.warmup_rank, jnp.int32)
    return EntropyState(
      decision=Decision(rank(), jnp.zeros((), bool)),
      first_rank=rank(),
      num_windows=jnp.zeros((), jnp.int32),
      entropy=zero(),
      entropies=per_matrix(),
      entropy_sum=zero(),
      variance_sum=per_matrix(),
      num_samples=zero(),
      window_entropy=zero(),
      window_variance=per_matrix(),
      first_entropy=zero(),
      first_change=zero(),
      reference_entropy=zero(),
      reference_variance=per_matrix(),
      restarts=jnp.zeros((), jnp.int32),
      last_change=zero(),
      total_steps=jnp.array(self.total_steps, jnp.int32),
    )

  def levels(
    self, state: EntropyState, count: jax.Array
  ) -> tuple[jax.Array, jax.Array]:
    del count
    return self._level(state.decision.rank), self._level(state.first_rank)

  def _level(self, rank: jax.Array) -> jax.Array:
    """Returns the index of the nearest rank of the ladder; int32 []."""
    distance = jnp.abs(np.array(self.ladder, np.int32) - rank)
    return jnp.argmin(distance).astype(jnp.int32)

  def observe(
    self, state: EntropyState, sample: EntropySample, is_usable: jax.Array
  ) -> EntropyState:
    weight = jnp.where(is_usable, sample.weight, 0.0)
    return state._replace(
      entropy=jnp.where(weight > 0, sample.entropy, state.entropy),
      entropies=jnp.where(weight > 0, sample.entropies, state.entropies),
      entropy_sum=state.entropy_sum + weight * sample.entropy,
      variance_sum=state.variance_sum + weight * sample.variance,
      num_samples=state.num_samples + weight,
      # A restored state may be of a shorter run.
      total_steps=jnp.full_like(state.total_steps, self.total_steps),
    )

  def sample(
    self, gradients: Sequence[jax.Array], count: jax.Array, channel: Channel
  ) -> EntropySample:
    """Steps that are not sampled cost nothing: the estimate is in a branch."""
    period = self.sampling.period
    return channel.cond(
      count % period == 0,
      lambda: entropy.estimate(
        gradients, count // period, channel, self.sampling
      ),
    )

  def variance(self, state: EntropyState) -> jax.Array:
    return state.window_variance

  def report(self, state: EntropyState) -> Report:
    """Predicts the share of energy that the rank loses, by the model.

    It assumes independent entries: correlated gradients lose less.
    """
    rank = jnp.minimum(state.decision.rank, self.ladder[-1])
    errors = self._log_error(state.reference_variance)
    lost = jnp.exp(errors[rank] - errors[0])  # G(r) / G(0)
    each = jnp.exp(jnp.asarray(self._table)[:, rank])
    return Report(
      state.entropy,
      state.entropies,
      jnp.where(rank > 0, lost, 0.0),
      jnp.where(rank > 0, each, 0.0),
    )

  @property
  def stage_bytes(self) -> int:
    if self.stage_axis is None:
      return 0
    return 4 if self.seconds is None else 8

  @property
  def first_level(self) -> int:
    return self.ladder.index(self.warmup_rank)

  def decision(self, state: EntropyState) -> tuple[Decision, Any]:
    return state.decision, None if self.stage_axis is None else state.first_rank

  def decided(self, state: EntropyState, decision: Any) -> EntropyState:
    own, first = decision
    first = own.rank if first is None else first
    return state._replace(decision=own, first_rank=first)

  def close_window(self, state: EntropyState, count: jax.Array) -> EntropyState:
    """Chooses the rank of the window that begins with step `count`.

    A window without a usable sample keeps the rank.
    """
    variance = state.variance_sum / jnp.maximum(state.num_samples, 1.0)
    errors = [self._log_error(v) for v in (variance, state.reference_variance)]
    entropy_sum, num_samples, (error, reference_error) = self._pooled(
      (state.entropy_sum, state.num_samples, errors)
    )
    has_sample = (num_samples > 0) & (state.restarts < 2)
    mean = entropy_sum / jnp.maximum(num_samples, 1.0)
    state = _shifted(state, mean, has_sample)
    before = state.num_windows
    first = jnp.where(before == 0, mean, state.first_entropy)
    ends = self._ends_warmup(state, has_sample, count, mean, first, error)
    is_warm = state.decision.is_warm
    statistics = Window(
      entropy=mean,
      previous=state.window_entropy,
      reference=state.reference_entropy,
      first=first,
      first_change=jnp.where(before == 1, mean - first, state.first_change),
      errors=reference_error,
      rank_min=self.ranks[0],
      rank_max=self.ranks[-1],
    )
    rank = jnp.where(ends, self.ranks[-1], self.warmup_rank)
    rank = jnp.where(is_warm, self._next_rank(state, statistics), rank)
    closed = state._replace(
      decision=Decision(rank.astype(jnp.int32), is_warm),
      num_windows=before + 1,
      window_entropy=mean,
      window_variance=variance,
      first_entropy=first,
      first_change=statistics.first_change,
      last_change=jnp.where(is_warm, mean - state.window_entropy, 0.0),
      # Until the warm-up ends, which the first replica decides.
      reference_entropy=jnp.where(is_warm, state.reference_entropy, mean),
      reference_variance=jnp.where(is_warm, state.reference_variance, variance),
    )
    closed = jax.tree.map(
      lambda new, old: jnp.where(has_sample, new, old), closed, state
    )
    decision = closed.decision._replace(is_warm=is_warm | ends)
    decision, first_rank = self._agreed(decision)
    return closed._replace(
      decision=decision,
      first_rank=first_rank,
      entropy_sum=jnp.zeros_like(state.entropy_sum),
      variance_sum=jnp.zeros_like(state.variance_sum),
      num_samples=jnp.zeros_like(state.num_samples),
      restarts=jnp.minimum(state.restarts, 1),
    )

  def _next_rank(self, state: EntropyState, window: Window) -> jax.Array:
    """Returns the rank after the warm-up; int32 []."""
    ranks = np.array(self.ranks, np.int32)
    current = jnp.argmin(jnp.abs(ranks - state.decision.rank))
    level = rules.round_to_ladder(
      self.rule(window), current, self.ranks, self.max_rank_step
    )
    return jnp.asarray(ranks)[level]

  def _pooled(self, tree: Any) -> Any:
    """Returns the means of numbers over the shards, the same on each."""
    if not self.shards:
      return tree
    tree = collectives.as_varying(tree, self.shards)
    return collectives.mean(tree, self.shards)

  def _agreed(self, decision: Decision) -> tuple[Decision, jax.Array]:
    """Returns the decision of a stage, and the rank of stage 0.

    Shards follow the first one. Stage 0 broadcasts its rank, and each stage
    aligns its own with it.
    """
    if self.shards:
      decision = collectives.from_first(decision, self.shards)
    if self.stage_axis is None:
      return decision, decision.rank
    first = collectives.from_first(decision.rank, self.stage_axis)
    if self.seconds is None:
      return decision, first
    table = alignment.aligned_levels(
      self.seconds,
      collectives.num_devices(self.stage_axis, "stage_axis"),
      self.backward_seconds,
    )
    stage = collectives.device_index(self.stage_axis)
    level = jnp.asarray(table)[stage, self._level(first)]
    rank = jnp.array(self.ladder, jnp.int32)[level]
    return decision._replace(rank=rank), first

  def _ends_warmup(
    self,
    state: EntropyState,
    has_sample: jax.Array,
    count: jax.Array,
    mean: jax.Array,
    first: jax.Array,
    errors: jax.Array,
  ) -> jax.Array:
    """Returns whether the warm-up ends with this window.

    From its least length on it does if, with this window's G,

      e^(2 H) G(rank_min) <= e^(2 H_first) G(rank_max)

    The window must have a sample. If stages are aligned, stage 0 decides.
    """
    num_closed = count // self.window
    least = max(1, math.ceil(self.warmup_steps / self.window))
    most = max(least, math.ceil(self.max_warmup_steps / self.window))
    loss_now = 2.0 * mean + errors[self.ranks[0]]
    loss_then = 2.0 * first + errors[self.ranks[-1]]
    may_end = (num_closed >= least) & (loss_now <= loss_then)
    may_end |= num_closed >= most
    ends = ~state.decision.is_warm & may_end & has_sample
    if self.stage_axis is None or self.seconds is None:
      return ends
    return collectives.from_first(ends.astype(jnp.int32), self.stage_axis) > 0

  def _log_error(self, variance: jax.Array) -> jax.Array:
    return error_model.log_error(self._table, self._sizes, variance)

  @functools.cached_property
  def _table(self) -> np.ndarray:
    return error_model.loss_table(self.matrices, self.ladder[-1])

  @functools.cached_property
  def _sizes(self) -> np.ndarray:
    """Entries of each matrix; float32 [K]."""
    return np.array([math.prod(leaf.sides) for leaf in self.matrices],
                    np.float32)  # fmt: skip


def _shifted(
  state: EntropyState, mean: jax.Array, has_sample: jax.Array
) -> EntropyState:
  """Shifts the references, if due, to make the last window's mean `mean`."""
  is_due = (state.restarts == 1) & has_sample
  shift = jnp.where(
    is_due & (state.num_windows > 0), mean - state.window_entropy, 0.0
  )
  return state._replace(
    window_entropy=state.window_entropy + shift,
    first_entropy=state.first_entropy + shift,
    reference_entropy=state.reference_entropy + shift,
    restarts=jnp.where(is_due, 0, state.restarts),
  )
