"""States that are sharded over a mesh: of a reducer, and of its wrappers."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from edgc_jax.budget.allocation import AllocationState
from edgc_jax.budget.entropy_budget import EntropyState
from edgc_jax.leaves.leaf import LeafState, is_leaf_state
from edgc_jax.wire import collectives

STATE_VERSION = 3  # checkpoints of another version do not load


class Stats(NamedTuple):
  """Statistics of the newest step; a field is None if it is not measured.

  Statistics of matrices are in the states of the leaves.
  """

  rank: jax.Array  # int32 [], 0 is dense
  wire_bytes: jax.Array  # float32 [], sent in this step over the replicas
  mean_wire_bytes: jax.Array  # float32 [], over all steps
  dense_bytes: jax.Array  # float32 [], of a dense float32 all-reduce
  # float32 [], share of the energy not sent; and root mean square over replicas
  relative_error: jax.Array | None = None
  residual_norm: jax.Array | None = None
  entropy: jax.Array | None = None  # float32 [], newest sample, nats
  predicted_error: jax.Array | None = None  # float32 [], by the model


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

  On pipeline stages the budget (except `first_rank`), the allocation and all
  statistics have a leading axis of size one for the stage; on shards two, for
  the stage (of which there is one) and for the shard.
  """

  count: jax.Array  # int32 [], steps done
  leaves: Any  # a `LeafState` for each leaf, in a tree like the parameters
  budget: Any  # such as EntropyState
  allocation: AllocationState | tuple[()]
  stats: Stats
  checks: Checks


class SkipStats(NamedTuple):
  """Counters of `skip_nonfinite`."""

  skipped_steps: jax.Array  # int32 []
  consecutive_skips: jax.Array  # int32 [], skips in a row up to this step
  max_consecutive: jax.Array  # int32 [], constant: skips before a warning


class PerReplica(NamedTuple):
  """Arrays that every replica has for itself, [1, *shape] for each leaf.

  As global arrays they are [N, *shape]. With the leading axis scalars can be
  sharded over replicas, too.
  """

  values: Any


class AccumulateState(NamedTuple):
  """State of `edgc_jax.accumulate`."""

  mini_step: jax.Array  # int32 [], calls since the last exchange
  accumulated: PerReplica  # float32, like the gradients
  inner_state: Any


class LocalStepsState(NamedTuple):
  """State of `edgc_jax.local_steps`."""

  step: jax.Array  # int32 [], inner steps done
  every: jax.Array  # int32 [], constant: inner steps of a round
  exchanged: jax.Array  # int32 [], the fragment of the newest step, or -1
  skipped: PerReplica  # int32, inner steps skipped on this replica alone
  # float32, like the parameters: what the replica has moved and not sent, d_i
  offset: PerReplica
  # float32, the same: what an exchange in flight sends, s_i, and zero in
  # fragments without one; () without overlap
  sent: PerReplica
  inner_state: PerReplica
  outer_state: tuple[Any, ...]  # of each fragment


def map_leaves(function: Callable[[LeafState], Any], leaves: Any) -> Any:
  """Applies a function to the state of each leaf of a tree."""
  return jax.tree.map(function, leaves, is_leaf=is_leaf_state)


def map_parts(
  function: Callable[[jax.Array], Any], state: ReducerState
) -> ReducerState:
  """Applies a function to all arrays that differ by stage or shard.

  Factors and residuals are not among them: they have no leading axes.
  """
  budget = state.budget
  if isinstance(budget, EntropyState):
    budget = budget._replace(first_rank=None)
  budget = jax.tree.map(function, budget)
  if isinstance(budget, EntropyState):
    budget = budget._replace(first_rank=state.budget.first_rank)
  return state._replace(
    leaves=map_leaves(
      lambda leaf: leaf._replace(stats=jax.tree.map(function, leaf.stats)),
      state.leaves,
    ),
    budget=budget,
    allocation=jax.tree.map(function, state.allocation),
    stats=jax.tree.map(function, state.stats),
  )


def stacked(
  state: ReducerState, num_axes: int, axes: tuple[str, ...] = ()
) -> ReducerState:
  """Adds the leading axes to the parts that differ by stage or shard.

  Args:
    state: The state of one device, as the reducer computes with it.
    num_axes: Number of leading axes.
    axes: The axes of stages and shards if they are bound: the parts are then
      typed as varying over them, even if their values do not.
  """
  if not num_axes:
    return state
  state = map_parts(lambda x: x.reshape((1,) * num_axes + x.shape), state)
  if not axes:
    return state
  return map_parts(lambda x: collectives.as_varying(x, axes), state)


def unstacked(state: ReducerState, num_axes: int) -> ReducerState:
  """Removes the axes that `stacked` added.

  Raises:
    ValueError: if the state has another number of them.
  """
  found = part_axes(state)
  if found != num_axes:
    kinds = ("none", "stages", "shards")
    raise ValueError(
      f"`state` must have leading axes for {kinds[num_axes]}, as the types of"
      f" the gradients demand, got a state made for {kinds[min(found, 2)]};"
      " create"
      " it inside, with jax.shard_map(tx.init, mesh=mesh,"
      " in_specs=param_specs, out_specs=edgc_jax.state_specs(tx, params,"
      " mesh=mesh, param_specs=param_specs)), and average gradients over axes"
      " that do not shard the parameters before, with edgc_jax.mean_over."
    )
  return map_parts(lambda x: x[(0,) * num_axes], state) if num_axes else state


def part_axes(state: ReducerState) -> int:
  """Returns the leading axes of a state's parts: 1 on stages, 2 on shards."""
  return state.stats.rank.ndim - state.count.ndim
