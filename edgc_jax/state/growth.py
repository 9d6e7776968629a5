"""Notices residuals that grow while the gradients do not.

Error feedback keeps a residual bounded by the gradients if what is sent shrinks
it. If not, the residual multiplies from step to step, and the updates are wrong
without an error. So at the end of each window of 50 steps the sums of |E| and
|G|, residual and gradient, are compared with those of the window before, E' and
G':

  growth     = log2(|E| / |E'|) - max(0, log2(|G| / |G'|))
  doublings' = doublings + growth  if growth >= log2(1.25), else 0

The sums are over all leaves with a residual, and the mean over the replicas.

A residual that starts at zero fills at the rate of the gradients at most, since
even a method that sends nothing adds one gradient a step. It is compared from
its first whole window on, and then grows by 2, 1.5, 1.33, 1.25 and less: 2.4
doublings. `DIVERGING` is more.
"""

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from edgc_jax.wire import collectives

DIVERGING = 3.0  # doublings in windows in a row
WINDOW = 50  # steps
WIRE_BYTES = 8  # of the sums of an exchange, sent in every step
_LEAST = 1.25  # growth in a window, as a factor


class Growth(NamedTuple):
  """What is known at the end of the newest window."""

  residual: jax.Array  # float32 [], sum of |E|
  gradient: jax.Array  # float32 [], sum of |G|
  windows: jax.Array  # int32 [], since the residual was zero
  doublings: jax.Array  # float32 [], in windows in a row


def init() -> Growth:
  """Returns the state before the first step."""
  zero = lambda: jnp.zeros((), jnp.float32)  # noqa: E731
  return Growth(zero(), zero(), jnp.zeros((), jnp.int32), zero())


def is_due(count: jax.Array) -> jax.Array:
  """Returns whether a window ends after `count` steps; bool []."""
  return (count > 0) & (count % WINDOW == 0)


def sums(
  fed_back: Sequence[tuple[jax.Array, jax.Array]], due: jax.Array
) -> jax.Array:
  """Returns the sums of |E| and |G|, float32 [2], local; 0 if not due.

  Args:
    fed_back: Gradient and residual of each leaf with one.
    due: bool [], whether a window ends.
  """

  def total(arrays: Sequence[jax.Array]) -> jax.Array:
    own = [jnp.sum(jnp.abs(x.astype(jnp.float32))) for x in arrays]
    return functools.reduce(jnp.add, own)

  def of_both() -> jax.Array:
    gradients, residuals = zip(*fed_back, strict=True)
    return jnp.stack([total(residuals), total(gradients)])

  like = jax.eval_shape(of_both)
  return jax.lax.cond(due, of_both, lambda: collectives.zeros_like_type(like))


def update(state: Growth, seen: jax.Array, counts: jax.Array) -> Growth:
  """Compares the sums at the end of a window with those before.

  Args:
    state: Of the window before.
    seen: float32 [2], from `sums`, the mean over the replicas.
    counts: bool [], whether a window ends in a step that counts.
  """
  residual, gradient = seen
  grows = jnp.log2(residual / state.residual)
  grows -= jnp.where(
    gradient > state.gradient, jnp.log2(gradient / state.gradient), 0.0
  )
  has_grown = (state.windows >= 2) & (grows >= math.log2(_LEAST))
  has_grown &= jnp.isfinite(grows)
  new = Growth(
    residual,
    gradient,
    jnp.where(residual > 0, state.windows + 1, 0),
    jnp.where(has_grown, state.doublings + grows, 0.0),
  )
  return jax.tree.map(lambda n, o: jnp.where(counts, n, o), new, state)
