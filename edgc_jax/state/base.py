"""The state of a reducer, and its form on pipeline stages."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from edgc_jax.adaptation.allocation import AllocatorState
from edgc_jax.adaptation.controller import ControllerState
from edgc_jax.comm import collectives
from edgc_jax.compression.base import ExchangeState
from edgc_jax.state.metrics import Checks, Stats


class ReducerState(NamedTuple):
  """State of a reducer; controller and allocator are empty where there is none.

  On pipeline stages both, but for `lead_rung`, and the statistics have an axis
  of one for the stage in front.
  """

  count: jax.Array  # int32 [], steps done
  controller: ControllerState | tuple[()]
  allocator: AllocatorState | tuple[()]
  exchange: ExchangeState
  stats: Stats
  checks: Checks


def stacked(state: ReducerState, stage_axis: str | None = None) -> ReducerState:
  """With an axis of one for the stage before what differs by stage.

  Where the axis is bound all of it is typed so, whether it differs or not.
  """
  state = _by_stage(lambda x: x[None], state)
  if stage_axis is None:
    return state
  return _by_stage(lambda x: collectives.as_varying(x, stage_axis), state)


def unstacked(state: ReducerState) -> ReducerState:
  return _by_stage(lambda x: x[0], state)


def _by_stage(fn: Callable, state: ReducerState) -> ReducerState:
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
  """State of `accumulate`."""

  mini_step: jax.Array  # int32 [], calls since the last exchange
  accumulated: Any  # float32, a leading axis of 1 per leaf; per replica
  inner_state: Any
