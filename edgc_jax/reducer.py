"""The one gradient transformation behind edgc, powersgd and allreduce.

They differ in their ladder of ranks and in the policy that picks a rung.
One step: choose the rung, add the residual, exchange, keep what was not sent.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from edgc_jax import collectives, guards, low_rank
from edgc_jax.comm_cost import Plan
from edgc_jax.controller import ControllerState
from edgc_jax.low_rank import Exchange, LowRankState
from edgc_jax.policy import Policy
from edgc_jax.telemetry import Stats


class ReducerState(NamedTuple):
  """State of a reducer; the controller's part is empty where there is none."""

  count: jax.Array  # int32 [], steps done
  controller: ControllerState | tuple[()]
  low_rank: LowRankState
  stats: Stats


def make_reducer(
  axis_name: str,
  plan_for: Callable[[Any], Plan],
  policy_for: Callable[[Plan], Policy],
  seed: int,
) -> optax.GradientTransformationExtraArgs:
  """Builds a transformation from local gradients to their mean.

  Args:
    axis_name: Axis averaged over; must be bound where `update` runs.
    plan_for: From a tree of parameters or gradients to the plan.
    policy_for: From the plan to the policy.
    seed: Seed of the first Q and of columns drawn anew.

  Returns:
    The transformation.
  """

  def init_fn(params: optax.Params) -> ReducerState:
    plan = plan_for(params)
    guards.warn_if_nothing_pays(plan)
    policy = policy_for(plan)
    control = policy.init()
    residual = [
      jnp.zeros(plan.leaves[i].shape, jnp.float32) for i in plan.compressible
    ]
    factor_q = low_rank.init_factors(plan, seed)
    # A new array for every field: one that served twice cannot be donated.
    zero = functools.partial(jnp.zeros, (), jnp.float32)
    none = functools.partial(jnp.zeros, (), jnp.int32)
    entropy, predicted_error = policy.report(policy.init())
    return ReducerState(
      count=none(),
      controller=control,
      low_rank=low_rank.pack(plan, params, factor_q, residual),
      stats=Stats(
        entropy=entropy,
        rank=none(),
        rung=none(),
        wire_bytes=zero(),
        mean_wire_bytes=zero(),
        dense_bytes=jnp.float32(plan.dense_bytes),
        relative_error=zero(),
        predicted_error=predicted_error,
        residual_norm=zero(),
        skipped_steps=none(),
        identical_steps=none(),
      ),
    )

  def update_fn(
    updates: optax.Updates,
    state: ReducerState,
    params: optax.Params | None = None,
    **extra_args: Any,
  ) -> tuple[optax.Updates, ReducerState]:
    del params, extra_args
    collectives.num_replicas(axis_name)  # raises where the axis is unbound
    guards.require_threads()
    plan = plan_for(updates)  # raises on leaves that are not real floating
    gradients = jax.tree.leaves(updates)
    guards.require_local(gradients, axis_name)
    policy = policy_for(plan)
    count, old = state.count, state.stats

    choice = policy.choose(state.controller, gradients, count)
    factor_q, residual = low_rank.unpack(state.low_rank)
    matrices = [g.astype(jnp.float32) for g in gradients]
    for i, e in zip(plan.compressible, residual, strict=True):
      matrices[i] += e
    key = jax.random.fold_in(jax.random.key(seed), count)
    result = low_rank.exchange(
      plan, choice.rung, matrices, factor_q, key, axis_name
    )
    ok = result.is_finite
    means = [jnp.where(ok, mean, 0.0) for mean in result.averaged]
    rounded = [
      _round(mean, g.dtype) for mean, g in zip(means, gradients, strict=True)
    ]
    averaged = [
      u.astype(g.dtype) for u, g in zip(rounded, gradients, strict=True)
    ]
    # Rounding to a narrower dtype is not lost either: it goes on next time.
    unrounded = [
      0.0 if u is mean else mean - u
      for mean, u in zip(means, rounded, strict=True)
    ]
    residual = [
      jnp.where(ok, new + unrounded[i], e)
      for i, new, e in zip(
        plan.compressible, result.residual, residual, strict=True
      )
    ]
    factor_q = [
      jnp.where(ok, new, q)
      for new, q in zip(result.factor_q, factor_q, strict=True)
    ]
    control = policy.settle(choice, ok)

    is_compared = guards.is_comparing(old.identical_steps, axis_name)
    wire_bytes = (
      jnp.array([plan.wire_bytes(r) for r in plan.ladder], jnp.float32)[
        choice.rung
      ]
      + choice.wire_bytes
      + jnp.where(is_compared, float(guards.CHECK_BYTES), 0.0)
    )
    entropy, predicted_error = policy.report(control)
    stats = old._replace(
      entropy=entropy,
      rank=jnp.array(plan.ladder, jnp.int32)[choice.rung],
      rung=choice.rung,
      wire_bytes=wire_bytes,
      mean_wire_bytes=old.mean_wire_bytes
      + (wire_bytes - old.mean_wire_bytes) / (count + 1),
      predicted_error=predicted_error,
      skipped_steps=old.skipped_steps + (~ok).astype(jnp.int32),
      identical_steps=guards.count_identical(
        gradients, old.identical_steps, axis_name
      ),
      **_errors(result, old),
    )
    new_state = ReducerState(
      count=optax.safe_increment(count),
      controller=control,
      low_rank=low_rank.pack(plan, updates, factor_q, residual),
      stats=stats,
    )
    return jax.tree.unflatten(jax.tree.structure(updates), averaged), new_state

  return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _round(mean: jax.Array, dtype: jnp.dtype) -> jax.Array:
  """A float32 array rounded to the values of a narrower dtype.

  What is too large for it becomes its largest value. The compiler may leave
  out a cast there and back; this it must do.
  """
  if jnp.dtype(dtype).itemsize >= 4:
    return mean
  info = jnp.finfo(dtype)
  limit = float(info.max)
  mean = jnp.clip(mean, -limit, limit)
  return jax.lax.reduce_precision(mean, info.nexp, info.nmant)


def _errors(result: Exchange, old: Stats) -> dict[str, jax.Array]:
  """Relative error and residual norm; those before if they are not finite.

  P is orthonormal, so |M - P P^T M|^2 = |M|^2 - |P^T M|^2, summed over
  matrices and averaged over replicas: two scalars travel with the factors.
  """
  lost = jnp.maximum(result.energy - result.kept, 0.0)
  share = lost / jnp.where(result.energy > 0, result.energy, 1.0)
  measured = result.is_finite & jnp.isfinite(share)
  return {
    "relative_error": jnp.where(measured, share, old.relative_error),
    "residual_norm": jnp.where(measured, jnp.sqrt(lost), old.residual_norm),
  }
