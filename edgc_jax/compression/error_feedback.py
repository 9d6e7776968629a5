"""Error feedback: what was not sent is added to the next gradient.

  M_i = gradient_i + residual_i,    residual_i' = M_i - what replica i sent

so that over time everything is sent (Stich et al. 2018, arXiv:1809.07599;
Karimireddy et al. 2019, arXiv:1901.09847).
"""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from edgc_jax.compression.base import Exchange
from edgc_jax.plan.plan import Plan


def with_feedback(
  plan: Plan,
  gradients: Sequence[jax.Array],
  residual: Sequence[jax.Array],
  exchange: Callable[[list[jax.Array]], Exchange],
) -> Exchange:
  """An exchange of gradients and residuals, in the gradients' own dtypes.

  Args:
    plan: Which leaves have a residual.
    gradients: All leaves, local.
    residual: Those of the compressible leaves, or none at all.
    exchange: Of all leaves in float32.

  Returns:
    The exchange. What rounding to a narrower dtype takes from an update is
    left in the residual, too.
  """
  matrices = [g.astype(jnp.float32) for g in gradients]
  members = plan.compressible if plan.has_residual else ()
  for i, e in zip(members, residual, strict=True):
    matrices[i] += e
  result = exchange(matrices)
  rounded = [
    _round(mean, g.dtype)
    for mean, g in zip(result.averaged, gradients, strict=True)
  ]
  # Rounding to a narrower dtype is not lost either: it goes on next time.
  kept = [
    e
    if rounded[i] is result.averaged[i]
    else e + result.averaged[i] - rounded[i]
    # Without error feedback what was not sent is dropped here.
    for i, e in zip(members, result.residual, strict=plan.has_residual)
  ]
  averaged = [
    u.astype(g.dtype) for u, g in zip(rounded, gradients, strict=True)
  ]
  return result._replace(averaged=averaged, residual=kept)


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
