"""Error feedback: replicas add the entries they did not send to the next step.

  M_i = gradient_i + residual_i,    residual_i' = M_i - sent_i

Over time every gradient is sent in full (Stich et al. 2018, arXiv:1809.07599;
Karimireddy et al. 2019, arXiv:1901.09847).
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from edgc_jax.plan.plan import Plan


def init_residual(plan: Plan) -> list[jax.Array]:
  """Returns zeros for each leaf of `plan.with_residual`.

  Residuals are float32, as large as the leaves, and local to a replica.
  """
  shapes = [plan.leaves[i].shape for i in plan.with_residual]
  return [jnp.zeros(shape, jnp.float32) for shape in shapes]


def added(gradient: jax.Array, residual: jax.Array) -> jax.Array:
  """Returns M = gradient + residual, float32."""
  # M_i = gradient_i + residual_i
  return gradient.astype(jnp.float32) + residual


def all_added(
  plan: Plan, gradients: Sequence[jax.Array], residuals: Sequence[jax.Array]
) -> list[jax.Array]:
  """Returns M of all leaves, float32.

  Args:
    plan: Names the leaves with a residual.
    gradients: All leaves, local.
    residuals: Arrays of these leaves.
  """
  matrices = [g.astype(jnp.float32) for g in gradients]
  for i, e in zip(plan.with_residual, residuals, strict=True):
    matrices[i] = added(gradients[i], e)
  return matrices


def settled(
  mean: jax.Array,
  left: jax.Array | None,
  gradient: jax.Array,
  residual: jax.Array | None,
  is_finite: jax.Array,
) -> tuple[jax.Array, jax.Array | None]:
  """Rounds an update to the gradient's dtype, and keeps what was not applied.

    residual' = (M - sent) + (update - round(update))

  Args:
    mean: The update, float32; zero if the step was not finite.
    left: M - sent, float32; None if all of M was sent.
    gradient: Only its dtype is read.
    residual: The residual before, which stays if the step was not finite; None
      without error feedback.
    is_finite: bool [], whether the step was finite.

  Returns:
    The update in the gradient's dtype, and the new residual.
  """
  rounded = _round(mean, gradient.dtype)
  if residual is None:
    return rounded.astype(gradient.dtype), None
  if left is None:
    left = jnp.zeros_like(residual)
  # residual' = (M - sent) + update - round(update)
  if rounded is not mean:
    left = left + mean - rounded
  left = jnp.where(is_finite, left, residual)
  return rounded.astype(gradient.dtype), left


def _round(mean: jax.Array, dtype: jnp.dtype) -> jax.Array:
  """Rounds float32 to values of a narrower dtype, clipped to its range.

  The compiler may remove a cast to the dtype and back, but not this.
  """
  if jnp.dtype(dtype).itemsize >= 4:
    return mean
  info = jnp.finfo(dtype)
  limit = float(info.max)
  mean = jnp.clip(mean, -limit, limit)
  return jax.lax.reduce_precision(mean, info.nexp, info.nmant)
