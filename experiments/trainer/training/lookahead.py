"""The baseline of local steps: an outer step that sends nothing."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from edgc_jax import validation


class LookaheadState(NamedTuple):
  """State of `lookahead`."""

  step: jax.Array  # int32 []
  slow: optax.Params  # float32, parameters after the newest outer step
  inner_state: Any
  outer_state: Any


def lookahead(
  inner: optax.GradientTransformation,
  outer: optax.GradientTransformation,
  every: int,
) -> optax.GradientTransformationExtraArgs:
  """Takes an outer step every H = `every` steps of a synchronous optimiser.

    x <- x + inner(gradient)             each step
    s <- s + outer(s - x),    x <- s     every H steps

  What local steps gain from their outer rule, and not from rare exchanges, this
  gains, too. Wire: what `inner` sends.

  Args:
    inner: A chain with a reducer, whose updates are equal on all replicas.
    outer: The outer rule, such as SGD with momentum; without collectives.
    every: Steps between two outer steps, H.

  Returns:
    A gradient transformation.

  References:
    Lookahead, Zhang et al. 2019, arXiv:1907.08610, whose outer rule is
    `optax.sgd(alpha)`. Departure: any outer rule.
  """
  validation.require_int("every", every, 1)
  inner = optax.with_extra_args_support(inner)

  def init_fn(params: optax.Params) -> LookaheadState:
    slow = jax.tree.map(lambda p: jnp.asarray(p, jnp.float32), params)
    step = jnp.zeros((), jnp.int32)
    return LookaheadState(step, slow, inner.init(params), outer.init(slow))

  def update_fn(
    updates: optax.Updates,
    state: LookaheadState,
    params: optax.Params | None = None,
    **extra_args: Any,
  ) -> tuple[optax.Updates, LookaheadState]:
    validation.require(
      params is not None, "params", params, "the parameters", "pass them"
    )
    found, inner_state = inner.update(
      updates, state.inner_state, params, **extra_args
    )
    step = state.step + 1

    def outer_step(slow: Any, outer_state: Any) -> tuple[Any, Any, Any]:
      # s <- s + outer(s - x)
      distance = jax.tree.map(lambda s, p, u: s - (p + u), slow, params, found)
      move, outer_state = outer.update(distance, outer_state, slow)
      slow = jax.tree.map(jnp.add, slow, move)
      # x <- s
      moved = jax.tree.map(
        lambda s, p, u: (s - p).astype(u.dtype), slow, params, found
      )
      return moved, slow, outer_state

    moved, slow, outer_state = jax.lax.cond(
      step % every == 0,
      outer_step,
      lambda slow, outer_state: (found, slow, outer_state),
      state.slow,
      state.outer_state,
    )
    return moved, LookaheadState(step, slow, inner_state, outer_state)

  return optax.GradientTransformationExtraArgs(
    init_fn,
    update_fn,  # ty: ignore[invalid-argument-type] takes its own state alone
  )
