"""Error feedback: replicas add the entries they did not send to the next step.

  M_i = gradient_i + residual_i,    residual_i' = M_i - sent_i

Over time every gradient is sent in full (Stich et al. 2018, arXiv:1809.07599;
Karimireddy et al. 2019, arXiv:1901.09847).
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from edgc_jax.compression.base import Exchange
from edgc_jax.plan.plan import Plan


def init_residual(plan: Plan) -> list[jax.Array]:
  """Returns zeros for each compressible leaf, or none without error feedback.

  Residuals are float32, as large as the leaves, and local to a replica.
  """
  if not plan.has_residual:
    return []
  return [
    jnp.zeros(plan.leaves[i].shape, jnp.float32) for i in plan.compressible
  ]


def add_residual(
  plan: Plan, gradients: Sequence[jax.Array], residual: Sequence[jax.Array]
) -> list[jax.Array]:
  """Returns M = gradient + residual of all leaves, float32.

  Args:
    plan: Names the leaves with a residual.
    gradients: All leaves, local.
    residual: Arrays of the compressible leaves, none without error feedback.
  """
  matrices = [g.astype(jnp.float32) for g in gradients]
  members = plan.compressible if plan.has_residual else ()
  # M_i = gradient_i + residual_i
  for i, e in zip(members, residual, strict=True):
    matrices[i] += e
  return matrices


def keep_error(
  plan: Plan, gradients: Sequence[jax.Array], exchange: Exchange
) -> Exchange:
  """Rounds updates to the gradients' dtypes; residuals keep the rounding error.

    residual' = M - sent + update - round(update)

  Args:
    plan: Names the leaves with a residual; without error feedback residuals
      are dropped here.
    gradients: All leaves, local; only their dtypes are read.
    exchange: The result of an exchange, in float32.

  Returns:
    The result, with `averaged` in the gradients' dtypes.
  """
  rounded = [
    _round(mean, g.dtype)
    for mean, g in zip(exchange.averaged, gradients, strict=True)
  ]
  members = plan.compressible if plan.has_residual else ()
  # residual' = (M - sent) + update - round(update)
  residual = [
    e
    if rounded[i] is exchange.averaged[i]
    else e + exchange.averaged[i] - rounded[i]
    for i, e in zip(members, exchange.residual, strict=plan.has_residual)
  ]
  averaged = [
    u.astype(g.dtype) for u, g in zip(rounded, gradients, strict=True)
  ]
  return exchange._replace(averaged=averaged, residual=residual)


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
