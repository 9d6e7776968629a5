"""Notices residuals that outgrow the gradients.

If what is sent shrinks M in every step, |M - sent| <= |M|, then by the triangle
inequality

  |E_t| <= |E_(t-1)| + |G_t| <= sum_(s <= t) |G_s|

for residuals E and gradients G: however little is sent, the residual is no
larger than all gradients so far together. Otherwise it may multiply from step
to step, and the updates are wrong without an error.

At the end of each window of 50 steps the norms of the step stand for the
window, and two windows in a row are one too many in which

  |E| >= |E'|  and  |E| > 2 * 50 * (|G| + |G'| + |G''| + ...)

with ' for the windows before. Norms are over all leaves with a residual; the
mean over the replicas is compared.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from edgc_jax.wire import collectives, order

DIVERGING = 2  # windows in a row
WINDOW = 50  # steps
WIRE_BYTES = 8  # of the norms of an exchange, sent in every step
_MARGIN = 2.0  # since one step stands for a window


class Growth(NamedTuple):
  """What is known at the end of the newest window."""

  residual: jax.Array  # float32 [], |E|
  gradients: jax.Array  # float32 [], the sum of |G| over the steps so far
  windows: jax.Array  # int32 [], in a row, in which the residual diverges


def init() -> Growth:
  """Returns the state before the first step."""
  zero = lambda: jnp.zeros((), jnp.float32)  # noqa: E731
  return Growth(zero(), zero(), jnp.zeros((), jnp.int32))


def is_due(count: jax.Array) -> jax.Array:
  """Returns whether norms are compared after `count` steps; bool []."""
  return count % WINDOW == 0


def norms(
  fed_back: Sequence[tuple[jax.Array, jax.Array]], due: jax.Array
) -> jax.Array:
  """Returns |E| and |G|, float32 [2], local; 0 if not due.

  Args:
    fed_back: Gradient and residual of each leaf with one.
    due: bool [], whether a window ends.
  """

  def of_both() -> jax.Array:
    gradients, residuals = zip(*fed_back, strict=True)
    return jnp.stack([_norm(residuals), _norm(gradients)])

  like = jax.eval_shape(of_both)
  return jax.lax.cond(due, of_both, lambda: collectives.zeros_like_type(like))


def update(state: Growth, seen: jax.Array, due: jax.Array) -> Growth:
  """Compares the norms at the end of a window with those before.

  Args:
    state: Of the window before.
    seen: float32 [2], from `norms`, the mean over the replicas.
    due: bool [], whether a window ends.
  """
  residual, gradient = seen
  # A state on another number of shards begins anew, with a residual.
  before = jnp.where(state.gradients > 0, state.gradients, residual)
  gradients = before + WINDOW * gradient
  diverges = (residual >= state.residual) & (residual > _MARGIN * gradients)
  windows = jnp.where(diverges, state.windows + 1, 0)
  # The residual may be infinite, which ends a run; not the gradient alone.
  counts = due & jnp.isfinite(gradient)
  new = Growth(residual, gradients, windows)
  return jax.tree.map(lambda n, o: jnp.where(counts, n, o), new, state)


def _norm(arrays: Sequence[jax.Array]) -> jax.Array:
  """Returns the norm of all entries; squares of any scale stay in range."""
  arrays = [x.astype(jnp.float32) for x in arrays]
  largest = [jnp.max(jnp.abs(x), initial=0.0) for x in arrays]
  unit = jnp.max(order.together(largest))
  unit = jnp.where((unit > 0) & jnp.isfinite(unit), unit, 1.0)
  squares = [jnp.sum(jnp.square(x / unit)) for x in arrays]
  return unit * jnp.sqrt(jnp.sum(order.together(squares)))
