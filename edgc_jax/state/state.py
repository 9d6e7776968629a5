"""States that are sharded over a mesh: of a reducer, and of its wrappers."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from edgc_jax.budget.allocation import AllocationState
from edgc_jax.budget.entropy_budget import EntropyState
from edgc_jax.leaves.leaf import LeafState, is_leaf_state
from edgc_jax.state.growth import Growth
from edgc_jax.wire import collectives

STATE_VERSION = 8  # the trainer refuses checkpoints of another version


class Stats(NamedTuple):
  """Statistics of the newest step; a field is None if it is not measured.

  Statistics of matrices are in the states of the leaves.
  """

  rank: jax.Array  # int32 [], 0 is dense; of the stage, equal on its shards
  wire_bytes: jax.Array  # float32 [], sent in this step over the replicas
  mean_wire_bytes: jax.Array  # float32 [], over all steps
  dense_bytes: jax.Array  # float32 [], of a dense float32 all-reduce
  # float32 [], share of the energy not sent; and root mean square over replicas
  relative_error: jax.Array | None = None
  residual_norm: jax.Array | None = None
  entropy: jax.Array | None = None  # float32 [], newest sample, nats
  predicted_error: jax.Array | None = None  # float32 [], by the model
  diverging_windows: jax.Array | None = None  # int32 [] (`state.growth`)


class Checks(NamedTuple):
  """Counters that are equal on all replicas and stages."""

  skipped_steps: jax.Array  # int32 [], steps with non-finite gradients
  # int32 [], first steps with equal gradients on all replicas; -1 once they
  # differed (`wire.agreement.count_identical`)
  identical_steps: jax.Array
  # int32 [], comparisons that found diverged replicas
  # (`wire.agreement.have_diverged`)
  diverged_steps: jax.Array
  left_out: jax.Array  # int32 [], leaves that a mask keeps from the reducer


class ReducerState(NamedTuple):
  """State of a reducer; `budget` and `allocation` are () if they keep nothing.

  `Parts` says which axes lead the arrays of budget, allocation and statistics.
  """

  count: jax.Array  # int32 [], steps done
  leaves: Any  # a `LeafState` for each leaf, in a tree like the parameters
  budget: Any  # such as EntropyState
  allocation: AllocationState | tuple[()]
  stats: Stats
  checks: Checks
  growth: Growth | tuple[()] = ()  # of the residuals; () without any


class SkipStats(NamedTuple):
  """Counters of `skip_nonfinite`."""

  skipped_steps: jax.Array  # int32 []
  consecutive_skips: jax.Array  # int32 [], skips in a row up to this step
  max_consecutive: jax.Array  # int32 [], constant: skips before a warning


class PerReplica(NamedTuple):
  """Arrays that every replica has for itself, [1, *shape] for each leaf.

  As global arrays they are [N, *shape], sharded over the replicas along their
  first axis, and otherwise as the parameter that they are like. All other
  arrays of a state are equal on all replicas.
  """

  values: Any


def is_per_replica(x: Any) -> bool:
  """Returns whether this differs by replica, for `jax.tree.map`."""
  return isinstance(x, PerReplica)


class AccumulateState(NamedTuple):
  """State of `edgc_jax.accumulate`."""

  mini_step: jax.Array  # int32 [], calls since the last exchange
  accumulated: PerReplica  # float32, like the gradients
  inner_state: Any


class LocalStepsState(NamedTuple):
  """State of `edgc_jax.local_steps`."""

  step: jax.Array  # int32 [], inner steps done
  every: jax.Array  # int32 [], constant: inner steps of a round
  exchanged: jax.Array  # bool [], whether the newest step applied an exchange
  # bool [], whether s_i is still to be applied; a state of another overlap
  # would lose it otherwise
  in_flight: jax.Array
  skipped: PerReplica  # int32, inner steps skipped on this replica alone
  # float32, like the parameters: what the replica has moved and not sent, d_i
  offset: PerReplica
  # float32, the same: what an exchange in flight sends, s_i, and zero without
  # one; () without overlap
  sent: PerReplica
  inner_state: PerReplica
  outer_state: Any


def map_leaves(function: Callable[[LeafState], Any], leaves: Any) -> Any:
  """Applies a function to the state of each leaf of a tree."""
  return jax.tree.map(function, leaves, is_leaf=is_leaf_state)


class Parts(NamedTuple):
  """Over what the parts of a reducer's state differ: static.

  Budget, allocation and statistics differ by stage and by shard. As arrays they
  lead with an axis of stages, [S, ...]; on shards with two, [S, F, ...], where
  S is 1 without stages. The rank and what else a budget decides are equal on
  all shards of a stage, and lead with the stages alone. What the stages decide
  together (`first_rank`), and counters, have no such axes.
  """

  stages: bool
  shards: bool

  @property
  def own(self) -> tuple[int, ...]:
    """The leading axes, on one device, of what differs by stage and shard."""
    return (1, 1) if self.shards else self.of_stage

  @property
  def of_stage(self) -> tuple[int, ...]:
    """The leading axes, on one device, of what differs by stage alone."""
    return (1,) * self.stages

  def __str__(self) -> str:
    names = [name for name, is_axis in self._asdict().items() if is_axis]
    return " and ".join(names) or "neither stages nor shards"


def parts_of(state: ReducerState) -> Parts:
  """Returns over what the parts of a state differ, from its shapes."""
  stats, base = state.stats, state.count.ndim
  return Parts(stats.rank.ndim > base, stats.wire_bytes.ndim > base + 1)


def map_parts(
  function: Callable[[jax.Array], Any],
  of_stage: Callable[[jax.Array], Any],
  state: ReducerState,
) -> ReducerState:
  """Applies functions to all arrays that differ by stage or shard.

  Factors and residuals are not among them: they have no leading axes.

  Args:
    function: For arrays that differ by stage and by shard.
    of_stage: For arrays that differ by stage alone.
    state: The state.
  """
  budget, stats = state.budget, state.stats
  if isinstance(budget, EntropyState):
    own = budget._replace(decision=None, first_rank=None)
    budget = jax.tree.map(function, own)._replace(
      decision=jax.tree.map(of_stage, budget.decision),
      first_rank=budget.first_rank,
    )
  return state._replace(
    leaves=map_leaves(
      lambda leaf: leaf._replace(stats=jax.tree.map(function, leaf.stats)),
      state.leaves,
    ),
    budget=budget,
    allocation=jax.tree.map(function, state.allocation),
    stats=Stats(
      of_stage(stats.rank), *(jax.tree.map(function, x) for x in stats[1:])
    ),
    growth=jax.tree.map(function, state.growth),
  )


def stacked(
  state: ReducerState,
  parts: Parts,
  stage: tuple[str, ...] = (),
  shards: tuple[str, ...] = (),
) -> ReducerState:
  """Adds the leading axes to what differs by replica, stage or shard.

  Args:
    state: The state of one device, as the reducer computes with it.
    parts: Over what the parts differ.
    stage: The axis of the stages if it is bound: the parts are then typed as
      varying over it, even if their values do not.
    shards: The same of the shards.
  """

  def add(
    lead: tuple[int, ...], axes: tuple[str, ...]
  ) -> Callable[[jax.Array], jax.Array]:
    return lambda x: collectives.as_varying(x.reshape(lead + x.shape), axes)

  def kept(leaf: LeafState) -> LeafState:
    if leaf.residual is None:
      return leaf
    return leaf._replace(residual=PerReplica(leaf.residual[None]))

  state = state._replace(leaves=map_leaves(kept, state.leaves))
  return map_parts(
    add(parts.own, stage + shards), add(parts.of_stage, stage), state
  )


def unstacked(state: ReducerState, parts: Parts) -> ReducerState:
  """Removes the axes that `stacked` added.

  Raises:
    ValueError: if the state has others.
  """
  found = parts_of(state)
  if found != parts:
    raise ValueError(
      f"`state` must have leading axes for {parts}, as the types of"
      f" the gradients demand, got a state made for {found}; create"
      " it inside, with jax.shard_map(tx.init, mesh=mesh,"
      " in_specs=param_specs, out_specs=edgc_jax.state_specs(tx, params,"
      " mesh=mesh, param_specs=param_specs)), and average gradients over axes"
      " that do not shard the parameters before, with edgc_jax.mean_over."
    )

  def without(lead: tuple[int, ...]) -> Callable[[jax.Array], jax.Array]:
    return lambda x: x[(0,) * len(lead)]

  def own(leaf: LeafState) -> LeafState:
    if leaf.residual is None:
      return leaf
    return leaf._replace(residual=leaf.residual.values[0])

  state = state._replace(leaves=map_leaves(own, state.leaves))
  return map_parts(without(parts.own), without(parts.of_stage), state)
