"""States that are sharded over a mesh: of a reducer, and of `accumulate`."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from edgc_jax.adaptation.allocation import AllocatorState
from edgc_jax.adaptation.controller import ControllerState
from edgc_jax.comm import collectives
from edgc_jax.compression.base import ExchangeState
from edgc_jax.state.statistics import Checks, Stats


class ReducerState(NamedTuple):
  """State of a reducer; `controller` and `allocator` are () if it has none.

  On pipeline stages the controller (except `lead_rung`), the allocator and the
  statistics have a leading axis of size one for the stage; on shards two, for
  the stage (of which there is one) and for the shard.
  """

  count: jax.Array  # int32 [], steps done
  controller: ControllerState | tuple[()]
  allocator: AllocatorState | tuple[()]
  exchange: ExchangeState
  stats: Stats
  checks: Checks


def stacked(
  state: ReducerState, lead: int, axes: tuple[str, ...] = ()
) -> ReducerState:
  """Adds the leading axes to the parts that differ by stage or shard.

  Args:
    state: The state of one device, as the reducer computes with it.
    lead: Number of leading axes.
    axes: The axes of stages and shards if they are bound: the parts are then
      typed as varying over them, even if their values do not.
  """
  if not lead:
    return state
  state = _by_part(lambda x: x.reshape((1,) * lead + x.shape), state)
  if not axes:
    return state
  return _by_part(lambda x: collectives.as_varying(x, axes), state)


def unstacked(state: ReducerState, lead: int) -> ReducerState:
  """Removes the axes that `stacked` added.

  Raises:
    ValueError: if the state has another number of them.
  """
  found = lead_axes(state)
  if found != lead:
    kinds = ("none", "stages", "shards")
    raise ValueError(
      f"`state` must have leading axes for {kinds[lead]}, as the types of the"
      f" gradients demand, got a state made for {kinds[min(found, 2)]}; create"
      " it inside, with jax.shard_map(tx.init, mesh=mesh,"
      " in_specs=param_specs, out_specs=edgc_jax.state_specs(tx, params,"
      " mesh=mesh, param_specs=param_specs)), and average gradients over axes"
      " that do not shard the parameters, with `fast_axis`."
    )
  return _by_part(lambda x: x[(0,) * lead], state) if lead else state


def lead_axes(state: ReducerState) -> int:
  """Returns the leading axes of a state's parts: 1 on stages, 2 on shards."""
  return state.stats.rank.ndim - state.count.ndim


def _by_part(fn: Callable, state: ReducerState) -> ReducerState:
  """Applies `fn` to all arrays that differ by stage or shard."""
  controller = state.controller
  if controller:
    lead_rung = controller.lead_rung
    controller = jax.tree.map(fn, controller._replace(lead_rung=None))
    controller = controller._replace(lead_rung=lead_rung)
  return state._replace(
    controller=controller,
    allocator=jax.tree.map(fn, state.allocator),
    stats=jax.tree.map(fn, state.stats),
  )


class AccumulateState(NamedTuple):
  """State of `edgc_jax.accumulate`."""

  mini_step: jax.Array  # int32 [], calls since the last exchange
  accumulated: Any  # float32, [1, *shape] for each leaf; local to a replica
  inner_state: Any
