"""Notices residuals that outgrow the gradients.

If what is sent shrinks M in every step, |M - sent| <= |M|, then by the triangle
inequality

  |E_t| <= |E_(t-1)| + |G_t| <= sum_(s <= t) |G_s|

for residuals E and gradients G: however little is sent, the residual is no
larger than all gradients so far together. Otherwise it may multiply from step
to step, and the updates are wrong without an error.

|G| is added up in every step, and |E| is compared at the end of each window of
50. The residual diverges if in two windows in a row

  |E| >= |E'|  and  |E| > 2 sum |G|

with E' of the window before. Norms are over the leaves of an exchange with a
residual, and added over exchanges; the mean over the replicas is compared.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from edgc_jax.wire import order
from edgc_jax.wire.channel import Channel

DIVERGING = 2  # windows in a row
WINDOW = 50  # steps
WIRE_BYTES = 8  # of the norms of an exchange, sent in every step
_MARGIN = 2.0
_LEAST = 1e-15  # of |E|; squares of much smaller gradients are below float32's


class Growth(NamedTuple):
  """What is known after a step."""

  residual: jax.Array  # float32 [], |E| at the end of a window; -1: unknown
  gradients: jax.Array  # float32 [], the sum of |G| so far
  windows: jax.Array  # int32 [], in a row, in which the residual diverges


def init() -> Growth:
  """Returns the state before the first step."""
  zero = lambda: jnp.zeros((), jnp.float32)  # noqa: E731
  return Growth(zero(), zero(), jnp.zeros((), jnp.int32))


def is_due(count: jax.Array) -> jax.Array:
  """Returns whether residuals are compared after `count` steps; bool []."""
  return count % WINDOW == 0


def norms(
  fed_back: Sequence[tuple[jax.Array, jax.Array]],
  due: jax.Array,
  channel: Channel,
) -> jax.Array:
  """Returns |E| and |G|, float32 [2], local; 0 for |E| if not due.

  Args:
    fed_back: Gradient and residual of each leaf with one.
    due: bool [], whether a window ends.
    channel: To the other replicas, which follows the compiler's sums over
      axes that are left to it.
  """
  gradients, residuals = zip(*fed_back, strict=True)
  residual = channel.cond(due, lambda: _norm(residuals))
  both = jnp.stack([residual, _norm(gradients)])
  channel.follow(both)
  return both


def update(state: Growth, seen: jax.Array, due: jax.Array) -> Growth:
  """Adds a step's gradients; at the end of a window compares the residual.

  Args:
    state: Of the step before.
    seen: float32 [2], from `norms`, the mean over the replicas.
    due: bool [], whether a window ends.
  """
  residual, gradient = seen
  is_finite = jnp.isfinite(gradient)  # the residual may have overflowed
  gradients = state.gradients + jnp.where(is_finite, gradient, 0.0)
  due &= is_finite & ~jnp.isnan(residual)
  gradients += jnp.where(due & (state.residual < 0), residual, 0.0)
  diverges = (residual >= state.residual) & (residual > _LEAST)
  diverges &= residual > _MARGIN * gradients
  windows = jnp.where(diverges, state.windows + 1, 0)
  return Growth(
    jnp.where(due, residual, state.residual),
    gradients,
    jnp.where(due, windows, state.windows),
  )


def _norm(arrays: Sequence[jax.Array]) -> jax.Array:
  """Returns the norm of all entries."""
  squares = [jnp.sum(jnp.square(x.astype(jnp.float32))) for x in arrays]
  return jnp.sqrt(jnp.sum(order.together(squares)))
