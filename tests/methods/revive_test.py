"""Columns of Q that are vanishing get new directions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from edgc_jax.methods import linear_algebra

ROWS, COLS = 200, 24
UNIT = jnp.ones(())


def gaussian():
  return np.random.default_rng(0).standard_normal((ROWS, COLS))


def orthonormalize(rows):
  """Returns the basis of rows [r, m], and the shares, as float64."""
  return tuple(map(np.float64, linear_algebra.orthonormalize(rows)))


def revive(q, shares, seed=0):
  """Revives a stack of one matrix."""
  energies = jnp.sum(jnp.square(q), axis=2)
  signs = jax.random.rademacher(jax.random.key(seed), (1, ROWS), jnp.float32)
  return linear_algebra.revive(q, shares, energies, signs, UNIT)


Q = jnp.asarray(gaussian().T, jnp.float32)[None]  # rows


def test_keeps_columns_that_are_new_enough():
  shares = jnp.full((1, COLS), 0.01)
  q = revive(Q, shares)
  np.testing.assert_array_equal(q, Q)


def test_is_continuous_at_the_threshold():
  below = jnp.full((1, COLS), 0.01 * (1 - 1e-4))
  q = revive(Q, below)
  assert 1e-12 <= np.abs(q - Q).max() <= 1e-6


@pytest.mark.parametrize("dead", ["zeros", "copies", "noise"])
def test_dead_columns_get_new_directions(dead):
  half = COLS // 2
  column = Q[:, :1]
  last = {
    "zeros": jnp.zeros_like(column),
    "copies": column,
    "noise": column * (1 + 1e-7 * Q[:, half:]),
  }[dead]
  q = jnp.concatenate(
    [Q[:, :half], jnp.broadcast_to(last, (1, COLS - half, ROWS))], 1
  )
  _, found = orthonormalize(q[0])
  assert np.max(found[half:]) < 1e-5, "they are dead"
  shares = jnp.where(jnp.arange(COLS)[None] < half, 1.0, 0.0)
  q = revive(q, shares)
  p, shares = orthonormalize(linear_algebra.unit_columns(q[0]))
  np.testing.assert_array_less(1e-3, shares)
  np.testing.assert_allclose(p @ p.T, np.eye(COLS), 0, 2e-6)


def test_directions_change_with_the_signs():
  zeros, shares = jnp.zeros_like(Q), jnp.zeros((1, COLS))
  first, second = (
    np.asarray(revive(zeros, shares, seed=i)[0]) for i in range(2)
  )
  unit = lambda q: q / np.linalg.norm(q, axis=1, keepdims=True)  # noqa: E731
  overlap = np.abs(np.sum(unit(first) * unit(second), axis=1))
  assert overlap.max() < 0.5
