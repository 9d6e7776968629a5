"""Notices residuals that grow while the gradients do not.

Error feedback keeps a residual bounded by the gradients if what is sent shrinks
it. Else it multiplies from step to step, and training is wrong without an
error. So every `check_every` steps (a window) the residual's norm |E| and the
gradients' |G|, root mean square over the replicas, are compared with those of
the window before, E' and G':

  doublings += log2(|E| / |E'|)   if |E| > 2 |E'| and |G| <= 2 |G'|
  doublings  = 0                  otherwise

The first window does not count: a residual starts at zero. From its end on, one
that fills at the rate of the gradients, as that of `topk` does, doubles once.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from edgc_jax.state.state import Stats
from edgc_jax.wire import collectives
from edgc_jax.wire.order import AxisName

_WIRE_BYTES = 4.0  # sent at the end of a window


def update(
  stats: Stats,
  residual: jax.Array,
  gradients: Sequence[jax.Array],
  is_due: jax.Array,
  axis_name: AxisName,
) -> tuple[Stats, jax.Array]:
  """Compares the norms at the end of a window; sends 4 bytes there.

  Args:
    stats: Of the step before.
    residual: float32 [], |E| of this step, equal on all replicas.
    gradients: Of the leaves with residuals, local.
    is_due: bool [], whether a window ends; equal on all replicas.
    axis_name: The bound axis of the replicas.

  Returns:
    The statistics with their growth, and the bytes sent in this step.
  """
  before = (
    stats.residual_before,
    stats.gradient_before,
    stats.residual_doublings,
  )
  if not gradients or before[0] is None:
    return stats, jnp.zeros((), jnp.float32)

  def compare(before: tuple) -> tuple:
    residual_before, gradient_before, doublings = before
    squares = [jnp.sum(jnp.square(g.astype(jnp.float32))) for g in gradients]
    gradient = jnp.sqrt(collectives.mean(sum(squares), axis_name))
    factor = residual / jnp.where(residual_before > 0, residual_before, jnp.inf)
    has_grown = (factor > 2) & (gradient <= 2 * gradient_before)
    doublings = jnp.where(has_grown, doublings + jnp.log2(factor), 0.0)
    # By type all vary over the same axes.
    zero = 0.0 * (doublings + residual_before)
    return residual + zero, gradient + zero, doublings + zero

  def keep(before: tuple) -> tuple:
    like = jax.eval_shape(compare, before)
    return jax.tree.map(
      lambda x, t: x + collectives.zeros_like_type(t), before, like
    )

  is_due &= jnp.isfinite(residual)
  now = jax.lax.cond(is_due, compare, keep, before)
  stats = stats._replace(
    residual_before=now[0], gradient_before=now[1], residual_doublings=now[2]
  )
  is_sent = is_due & (collectives.num_devices(axis_name) > 1)
  return stats, jnp.where(is_sent, _WIRE_BYTES, 0.0)
