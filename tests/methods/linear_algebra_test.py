"""Bases are orthonormal or short, continuous and in order for any input.

Columns of Q that are vanishing get new directions.
"""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.constants import changed

from edgc_jax.methods import linear_algebra

ROWS, COLS = 200, 24


def spectrum(values, seed=0):
  """Returns a matrix [ROWS, len(values)] of given singular values."""
  random = np.random.default_rng(seed)
  u, _ = np.linalg.qr(random.standard_normal((ROWS, len(values))))
  v, _ = np.linalg.qr(random.standard_normal((len(values),) * 2))
  return (u * values) @ v.T


def gaussian(seed=0):
  return np.random.default_rng(seed).standard_normal((ROWS, COLS))


def orthonormal(count):
  random = np.random.default_rng(0)
  return np.linalg.qr(random.standard_normal((ROWS, count)))[0]


def flushed(y):
  """Sets denormal numbers to zero, as XLA does."""
  return np.where(np.abs(y) < np.finfo(np.float32).tiny, 0.0, y)


INPUTS = {
  "gaussian": (gaussian(), COLS),
  "conditioned_1e2": (spectrum(np.logspace(0, -2, COLS)), COLS),
  "conditioned_1e4": (spectrum(np.logspace(0, -4, COLS)), COLS),
  "two_sizes": (spectrum(np.r_[np.full(8, 1e4), np.ones(COLS - 8)]), COLS),
  "columns_of_all_sizes": (gaussian() * np.logspace(15, -15, COLS), COLS),
  "rank_5": (gaussian()[:, :5] @ gaussian(1)[:5], 5),
  "rank_1": (np.outer(np.arange(ROWS), np.ones(COLS)), 1),
  "equal_columns_of_ones": (np.ones((ROWS, 64)), 1),
  "zero_columns": (gaussian() * (np.arange(COLS) % 2), COLS // 2),
  "tiny": (gaussian() * 1e-18, COLS),
  "nearly_denormal": (flushed(gaussian() * 1e-36), COLS),
  "huge": (gaussian() * 1e30, COLS),
  "largest": (gaussian() * 5e37, COLS),
  "zero": (np.zeros((ROWS, COLS)), 0),
  "square": (gaussian()[:COLS], COLS),
}


@jax.jit
def orthonormalize(y):
  """Returns the basis of [m, r] as columns, and the shares."""
  basis = linear_algebra.orthonormalize(y.T)
  return basis.rows.T, basis.shares


@jax.jit
def unit_columns(y):
  return linear_algebra.unit_columns(y.T).T


def basis_of(y):
  """Returns columns and shares of one matrix as float64."""
  return tuple(map(np.float64, orthonormalize(jnp.asarray(y, jnp.float32))))


@pytest.mark.parametrize(("y", "rank"), INPUTS.values(), ids=INPUTS)
def test_orthonormal_or_short(y, rank):
  p, shares = basis_of(y)
  whole = shares > 1e-5
  assert whole.sum() == rank
  gram = p.T @ p
  np.testing.assert_allclose(
    gram[whole][:, whole], np.eye(rank), rtol=0, atol=2e-6
  )
  # Damped columns are rounding noise, and short.
  assert np.abs(p[:, ~whole]).max(initial=0) < 0.05
  # Nothing of substance is outside the span.
  scale = np.maximum(np.abs(y).max(0), 1e-300)
  rest = y / scale - p[:, whole] @ (p[:, whole].T @ (y / scale))
  assert np.abs(rest).max() < 1e-5


@pytest.mark.parametrize(
  "name", [k for k, (y, n) in INPUTS.items() if n == y.shape[1]]
)
def test_is_gram_schmidt(name):
  """The basis is Q of the QR decomposition with a positive diagonal.

  The tolerance is the effect of rounding the input to float32.
  """
  y, _ = INPUTS[name]
  p, shares = basis_of(y)
  y = np.float64(np.float32(y) / np.abs(y).max(0))
  q, r = np.linalg.qr(y)
  q = q * np.sign(np.diagonal(r))
  expected = np.abs(np.diagonal(r)) / np.linalg.norm(y, axis=0)
  np.testing.assert_allclose(shares, expected, rtol=0.01)
  assert np.abs((p - q) * expected).max() < 1e-6


@pytest.mark.parametrize("y", [y for y, _ in INPUTS.values()], ids=INPUTS)
def test_no_threshold_and_no_sign_flips(y):
  """Noise of 1e-7 moves a column by at most 1e-7 over its share."""
  y = np.asarray(y / max(np.abs(y).max(), 1e-300), np.float32)
  p, shares = basis_of(y)
  for seed in range(5):
    noise = 1e-7 * np.random.default_rng(seed).standard_normal(y.shape)
    moved, _ = basis_of(y * (1 + noise))
    bound = 1e-5 + 3e-6 / np.maximum(shares, 1e-5)
    distance = np.linalg.norm(moved - p, axis=0)
    assert (distance / bound).max() < 1, f"{distance} {shares}"


@pytest.mark.parametrize("rows", [768, 50304])
@pytest.mark.parametrize("values", [(0.1, 0.3), (0, 1, 2, 3), (1, -1), (0.7,)])
def test_tall_parallel_columns_of_few_values(rows, values):
  """Rounding errors of long sums of equal terms have one sign."""
  random = np.random.default_rng(rows)
  column = random.choice(np.float32(values), rows)
  for scales in (np.ones(32), random.choice(np.float32(values), 32)):
    y = jnp.asarray(np.outer(column, scales), jnp.float32)
    chex.assert_tree_all_finite((orthonormalize(y), unit_columns(y)))
    p, _ = basis_of(y)
    first = np.flatnonzero(scales)[0]
    assert abs(np.linalg.norm(p[:, first]) - 1) < 0.5e-5


def test_a_failed_factorisation_gives_zeros():
  y = jnp.ones((40, 4))
  with changed(_SHIFT=-1.0):
    columns, shares = orthonormalize.__wrapped__(y)
  np.testing.assert_array_equal(columns, 0.0)
  np.testing.assert_array_equal(shares, 0.0)


def test_a_batch_has_the_bases_of_its_matrices():
  """Accelerators compute all matrices of a stack at once."""
  rows = jnp.asarray(
    [gaussian(0).T, spectrum(np.logspace(0, -4, COLS)).T, gaussian(1).T],
    jnp.float32,
  )
  together = jax.vmap(linear_algebra.orthonormalize)(rows)
  alone = jax.lax.map(linear_algebra.orthonormalize, rows)
  chex.assert_trees_all_close(together, alone, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("share", [0.9, 0.5, 0.2, 0.11])
def test_the_third_pass_changes_roundings_only(share):
  """Two passes are enough if the second begins nearly orthogonal."""
  base = orthonormal(COLS)
  y = base + 0.0
  y[:, 1:] = np.sqrt(1 - share**2) * base[:, :1] + share * base[:, 1:]
  bases = []
  for near in (0.0, 2.0):  # two passes, three
    with changed(_NEAR=near):
      rows = linear_algebra.orthonormalize(jnp.asarray(y.T, jnp.float32)).rows
      bases.append(np.float64(rows))
  gram = bases[0] @ bases[0].T
  np.testing.assert_allclose(gram, np.eye(COLS), rtol=0, atol=2e-6)
  assert 1e-12 <= np.abs(bases[1] - bases[0]).max() <= 1e-6


@pytest.mark.parametrize(
  ("count", "share"), [(16, 0.6), (16, 0.5), (32, 0.6), (32, 0.8)]
)
def test_columns_that_each_lean_on_the_one_before(count, share):
  """They are close to dependent although each has a large share."""
  base = orthonormal(count)
  y = base + 0.0
  y[:, 1:] = np.sqrt(1 - share**2) * base[:, :-1] + share * base[:, 1:]
  p, _ = basis_of(y)
  np.testing.assert_allclose(p.T @ p, np.eye(count), rtol=0, atol=1e-5)


Q = jnp.asarray(gaussian().T, jnp.float32)[None]  # rows


def revive(q, shares, seed=0):
  """Revives a stack of one matrix."""
  signs = jax.random.rademacher(jax.random.key(seed), (ROWS,), jnp.float32)
  rows, energy = linear_algebra.revive(q[0], shares[0], signs, jnp.ones(()))
  np.testing.assert_allclose(energy, jnp.sum(jnp.square(q)), 1e-5)
  return rows[None]


def test_columns_that_are_new_enough_stay():
  """And what is added is continuous at the threshold."""
  np.testing.assert_array_equal(revive(Q, jnp.full((1, COLS), 0.01)), Q)
  below = revive(Q, jnp.full((1, COLS), 0.01 * (1 - 1e-4)))
  assert 1e-12 <= np.abs(below - Q).max() <= 1e-6


@pytest.mark.parametrize("dead", ["zeros", "copies", "noise"])
def test_dead_columns_get_new_directions(dead):
  half = COLS // 2
  column = Q[:, :1]
  last = {
    "zeros": jnp.zeros_like(column),
    "copies": column,
    "noise": column * (1 + 1e-7 * Q[:, half:]),
  }[dead]
  last = jnp.broadcast_to(last, (1, COLS - half, ROWS))
  q = jnp.concatenate([Q[:, :half], last], 1)
  _, found = basis_of(q[0].T)
  assert np.max(found[half:]) < 1e-5, "they are dead"
  q = revive(q, jnp.where(jnp.arange(COLS)[None] < half, 1.0, 0.0))
  p, shares = basis_of(unit_columns(q[0].T))
  np.testing.assert_array_less(1e-3, shares)
  np.testing.assert_allclose(p.T @ p, np.eye(COLS), 0, 2e-6)
  # They change with the signs.
  first, second = (
    np.asarray(revive(0 * Q, jnp.zeros((1, COLS)), seed)[0]) for seed in (0, 1)
  )
  unit = lambda q: q / np.linalg.norm(q, axis=1, keepdims=True)  # noqa: E731
  assert np.abs(np.sum(unit(first) * unit(second), axis=1)).max() < 0.5
