"""Sketches: a few values per matrix measure the norm of the mean residual.

The norm of one replica's residual E_i = M_i - sent_i says little, since most of
E_i differs between replicas and cancels in their mean. The error of the update
is that mean:

  z_g = sum_(j in g) v_j (u^T mean_i E_i)_j,    E |z|^2 = |mean_i E_i|^2

with random signs u and v, new at each step and the same on all replicas, u
along the smaller side of E, and g one of `SKETCH_VALUES` groups of columns. z
is linear, so replicas average it with the other values. If the residual has
many directions, the relative standard deviation of |z|^2 is about
(2 / SKETCH_VALUES)^(1/2), and less over a window.
"""

import jax
import jax.numpy as jnp

from edgc_jax.leaves.leaf import Leaf
from edgc_jax.reducer.rounds import Draws

SKETCH_VALUES = 16  # float32 values for each matrix


def sketch(leaf: Leaf, m: jax.Array, draws: Draws) -> jax.Array:
  """Returns the sketch z of each matrix [k, m, n]; float32 [k, 16]."""
  if leaf.is_tall:
    m = jnp.swapaxes(m, 1, 2)
  rows = jnp.matmul(draws.short, m, precision=jax.lax.Precision.HIGHEST)
  return _in_groups(rows[:, 0] * draws.long)


def residual_sketch(
  row: jax.Array, p: jax.Array, q: jax.Array, u: jax.Array, v: jax.Array
) -> jax.Array:
  """Returns the sketch z of one M - P Q^T, without forming it.

  Args:
    row: u^T M, float32 [n].
    p, q: Rows of P and of Q, float32 [r, m] and [r, n].
    u, v: Signs, float32 [m] and [n].

  Returns:
    float32 [16].
  """
  exact = jax.lax.Precision.HIGHEST
  shares = jnp.matmul(p, u, precision=exact)
  return _in_groups(v * (row - jnp.matmul(shares, q, precision=exact)))


def squared(sketches: jax.Array, unit: jax.Array) -> jax.Array:
  """Returns |z|^2 of each sketch [k, 16], in units of unit^2; float32 [k]."""
  return jnp.sum(jnp.square(sketches / unit), axis=1)


def _in_groups(rows: jax.Array) -> jax.Array:
  """Sums float32 [..., n] over groups of columns, each 16th one of a group."""
  *lead, length = rows.shape
  rows = jnp.pad(rows, [(0, 0)] * len(lead) + [(0, -length % SKETCH_VALUES)])
  return jnp.sum(rows.reshape(*lead, -1, SKETCH_VALUES), axis=-2)
