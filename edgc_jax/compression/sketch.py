"""The norm of what the mean of replicas lacks, from a few values a matrix.

What was not sent, E_i = M_i - P Q_i^T, is a replica's own; its norm says
little, since most of it is what sets the replicas apart and is gone from
their mean. The norm of the mean is what an update lacks:

  z_g = sum_(j in g) v_j (u^T mean_i E_i)_j,    E |z|^2 = |mean_i E_i|^2

with random signs u and v, new in each step and the same on all replicas, and
g one of `SKETCH_VALUES` groups of columns. z is linear, so it is averaged with
the factors. One |z|^2 has a relative standard deviation of about
(2 / SKETCH_VALUES)^(1/2) where the residual has many directions; means over a
window are nearer.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from edgc_jax.plan.plan import SKETCH_VALUES

Signs = tuple[jax.Array, jax.Array]


def draw_signs(key: jax.Array, stacks: Sequence[jax.Array]) -> list[Signs]:
  """Signs u [k, 1, m] and v [k, n] for each stack of matrices [k, m, n]."""
  if not stacks:
    return []
  shapes = [
    shape
    for k, m, n in (stack.shape for stack in stacks)
    for shape in ((k, 1, m), (k, n))
  ]
  # One draw for all: a generator for each compiles slowly.
  sizes = [int(np.prod(shape)) for shape in shapes]
  draw = jax.random.rademacher(key, (sum(sizes),), jnp.float32)
  parts = jnp.split(draw, np.cumsum(sizes[:-1]))
  signs = [part.reshape(s) for part, s in zip(parts, shapes, strict=True)]
  return list(zip(signs[::2], signs[1::2], strict=True))


def sketch(stack: jax.Array, signs: Signs) -> jax.Array:
  """z of float32 [k, m, n] itself; float32 [k, SKETCH_VALUES]."""
  u, v = signs
  return _in_groups((u @ stack)[:, 0] * v)


def residual_sketch(
  across: jax.Array, p: jax.Array, q: jax.Array, signs: Signs
) -> jax.Array:
  """z of M - P Q^T, without forming it.

  Args:
    across: u^T M, float32 [k, 1, n].
    p: float32 [k, m, r].
    q: float32 [k, n, r].
    signs: From `draw_signs`.

  Returns:
    float32 [k, SKETCH_VALUES].
  """
  u, v = signs
  return _in_groups((across - (u @ p) @ jnp.swapaxes(q, 1, 2))[:, 0] * v)


def _in_groups(row: jax.Array) -> jax.Array:
  """Sums of `SKETCH_VALUES` groups of columns of [k, n]."""
  row = jnp.pad(row, ((0, 0), (0, -row.shape[1] % SKETCH_VALUES)))
  return jnp.sum(row.reshape(len(row), SKETCH_VALUES, -1), axis=2)
