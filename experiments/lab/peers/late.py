"""The baseline of exchanges that run beside the next step."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

import edgc_jax
from edgc_jax import validation
from edgc_jax.wire.order import AxisName


class LateState(NamedTuple):
  """State of `late`."""

  step: jax.Array  # int32 []
  pending: optax.Updates  # the mean gradient of the step before; or zeros
  inner_state: Any


def late(
  axis_name: AxisName = "data", *, start: int = 0, **options: Any
) -> optax.GradientTransformationExtraArgs:
  """Averages gradients, and applies the mean one step later.

    update_t = mean_(t - 1)

  so that the exchange of a step may run beside the next one. Before step
  `start` means are applied at once, as when rates warm up, and step `start`
  itself applies nothing. Wire: as `allreduce`. Memory: one more gradient.

  Args:
    axis_name: As for `edgc_jax.allreduce`.
    start: The first step, from 0, whose mean is applied late.
    **options: Further arguments of `edgc_jax.allreduce`.

  Returns:
    A gradient transformation, from local gradients to an earlier mean.

  References:
    Delayed gradients as in PipeDream-2BW, Narayanan et al. 2021,
    arXiv:2006.09503. `local_steps(every=1, overlap=1)` applies a replica's own
    part at once, and the others' one step later.
  """
  validation.require_int("start", start, 0)
  inner = edgc_jax.allreduce(axis_name, **options)

  def init_fn(params: optax.Params) -> LateState:
    zeros = jax.tree.map(jnp.zeros_like, params)
    return LateState(jnp.zeros((), jnp.int32), zeros, inner.init(params))

  def update_fn(
    updates: optax.Updates,
    state: LateState,
    params: optax.Params | None = None,
    **extra_args: Any,
  ) -> tuple[optax.Updates, LateState]:
    mean, inner_state = inner.update(
      updates, state.inner_state, params, **extra_args
    )
    is_late = state.step >= start

    def choose(yes: Any, no: Any) -> Any:
      return jax.tree.map(lambda a, b: jnp.where(is_late, a, b), yes, no)

    applied = choose(state.pending, mean)
    pending = choose(mean, state.pending)  # zeros until then
    return applied, LateState(state.step + 1, pending, inner_state)

  return optax.GradientTransformationExtraArgs(
    init_fn,
    update_fn,  # ty: ignore[invalid-argument-type] takes its own state alone
  )
