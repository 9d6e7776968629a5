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
  statistics have a leading axis of size one for the stage.
  """

  count: jax.Array  # int32 [], steps done
  controller: ControllerState | tuple[()]
  allocator: AllocatorState | tuple[()]
  exchange: ExchangeState
  stats: Stats
  checks: Checks


def stacked(state: ReducerState, stage_axis: str | None = None) -> ReducerState:
  """Adds the leading axis of stages to the parts that differ by stage.

  Args:
    state: The state of one stage, as the reducer computes with it.
    stage_axis: The axis of the stages if it is bound: the parts are then typed
      as varying over it, even if their values do not.
  """
  state = _by_stage(lambda x: x[None], state)
  if stage_axis is None:
    return state
  return _by_stage(lambda x: collectives.as_varying(x, stage_axis), state)


def unstacked(state: ReducerState) -> ReducerState:
  """Removes the axis that `stacked` added."""
  return _by_stage(lambda x: x[0], state)


def _by_stage(fn: Callable, state: ReducerState) -> ReducerState:
  """Applies `fn` to all arrays that differ by stage."""
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
