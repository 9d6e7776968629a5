"""Bases are orthonormal or short, continuous and in order for any input."""

from unittest import mock

import chex
import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

from edgc_jax.compression import linear_algebra
from edgc_jax.compression.linear_algebra import (
  orthonormalize,
  revive,
  unit_columns,
)

ROWS, COLS = 200, 24
UNIT = jnp.ones(())


def spectrum(values, seed=0):
  """Returns a matrix [ROWS, len(values)] of given singular values."""
  random = np.random.default_rng(seed)
  u, _ = np.linalg.qr(random.standard_normal((ROWS, len(values))))
  v, _ = np.linalg.qr(random.standard_normal((len(values),) * 2))
  return (u * values) @ v.T


def gaussian(seed=0):
  return np.random.default_rng(seed).standard_normal((ROWS, COLS))


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
  "zero": (np.zeros((ROWS, COLS)), 0),
  "square": (gaussian()[:COLS], COLS),
}


def basis_of(y):
  """Returns columns and shares of one matrix as float64."""
  basis = jax.jit(orthonormalize)([jnp.asarray(y, jnp.float32)[None]])
  return np.float64(basis.columns[0][0]), np.float64(basis.shares[0][0])


class OrthonormalizeTest(parameterized.TestCase):
  @parameterized.named_parameters(
    (name, y, rank) for name, (y, rank) in INPUTS.items()
  )
  def test_orthonormal_or_short(self, y, rank):
    p, shares = basis_of(y)
    whole = shares > 1e-5
    self.assertEqual(whole.sum(), rank)
    gram = p.T @ p
    np.testing.assert_allclose(
      gram[whole][:, whole], np.eye(rank), rtol=0, atol=2e-6
    )
    # Damped columns are rounding noise, and short.
    self.assertLess(np.abs(p[:, ~whole]).max(initial=0), 0.05)
    # Nothing of substance is outside the span.
    scale = np.maximum(np.abs(y).max(0), 1e-300)
    rest = y / scale - p[:, whole] @ (p[:, whole].T @ (y / scale))
    self.assertLess(np.abs(rest).max(), 1e-5)

  @parameterized.named_parameters(
    (name, y) for name, (y, rank) in INPUTS.items() if rank == y.shape[1]
  )
  def test_is_gram_schmidt(self, y):
    """The basis is Q of the QR decomposition with a positive diagonal.

    The tolerance is the effect of rounding the input to float32.
    """
    p, shares = basis_of(y)
    y = np.float64(np.float32(y) / np.abs(y).max(0))
    q, r = np.linalg.qr(y)
    q = q * np.sign(np.diagonal(r))
    expected = np.abs(np.diagonal(r)) / np.linalg.norm(y, axis=0)
    np.testing.assert_allclose(shares, expected, rtol=0.01)
    self.assertLess(np.abs((p - q) * expected).max(), 1e-6)

  @parameterized.named_parameters((name, y) for name, (y, _) in INPUTS.items())
  def test_no_threshold_and_no_sign_flips(self, y):
    """Noise of 1e-7 moves a column by at most 1e-7 over its share."""
    y = np.asarray(y / max(np.abs(y).max(), 1e-300), np.float32)
    p, shares = basis_of(y)
    for seed in range(5):
      noise = 1e-7 * np.random.default_rng(seed).standard_normal(y.shape)
      moved, _ = basis_of(y * (1 + noise))
      bound = 1e-5 + 3e-6 / np.maximum(shares, 1e-5)
      distance = np.linalg.norm(moved - p, axis=0)
      self.assertLess((distance / bound).max(), 1, f"{distance} {shares}")

  @parameterized.product(
    rows=[768, 5000, 50304], values=[(0.1, 0.3), (0, 1, 2, 3), (1, -1), (0.7,)]
  )
  def test_tall_parallel_columns_of_few_values(self, rows, values):
    """Rounding errors of long sums of equal terms have one sign."""
    random = np.random.default_rng(rows)
    column = random.choice(np.float32(values), rows)
    for scales in (np.ones(32), random.choice(np.float32(values), 32)):
      y = jnp.asarray(np.outer(column, scales), jnp.float32)[None]
      chex.assert_tree_all_finite((orthonormalize([y]), unit_columns([y])))
      p = np.float64(orthonormalize([y]).columns[0][0])
      first = np.flatnonzero(scales)[0]
      self.assertAlmostEqual(np.linalg.norm(p[:, first]), 1, places=5)

  def test_a_matrix_that_cannot_be_factorised_gives_no_basis(self):
    """The others still have theirs."""
    bad = jnp.full((1, 40, 4), jnp.nan)
    good = jnp.asarray(gaussian()[None], jnp.float32)
    columns, _ = orthonormalize([bad, good])
    alone, _ = orthonormalize([good])
    np.testing.assert_allclose(columns[1], alone[0], atol=1e-6)

  def test_a_failed_factorisation_gives_zeros(self):
    y = jnp.ones((1, 40, 4))
    with mock.patch.object(linear_algebra, "_SHIFT", -1.0):
      columns, shares = orthonormalize([y])
    np.testing.assert_array_equal(columns[0], 0.0)
    np.testing.assert_array_equal(shares[0], 0.0)

  def test_iterated_columns_come_sorted_by_energy(self):
    """Orthogonal iteration: column i tends to the i-th singular vector."""
    values = np.logspace(0, -2, COLS)
    m = jnp.asarray(spectrum(values), jnp.float32)[None]
    q = [jnp.asarray(gaussian()[:COLS], jnp.float32)[None]]
    step = jax.jit(lambda q: orthonormalize([m @ unit_columns(q)[0]]).columns)
    for _ in range(20):
      p = step(q)
      q = [jnp.swapaxes(m, 1, 2) @ p[0]]
    held = np.linalg.norm(np.asarray(q[0][0]), axis=0)
    np.testing.assert_allclose(held, values, rtol=0.02)

  def test_batches_of_many_shapes(self):
    stacks = [
      jnp.asarray(np.random.default_rng(i).standard_normal(shape), jnp.float32)
      for i, shape in enumerate(((2, 30, 4), (1, 50, 4), (3, 20, 7), (1, 9, 1)))
    ]
    columns, shares = orthonormalize(stacks)
    chex.assert_trees_all_equal_shapes(columns, stacks)
    alone = [orthonormalize([y]) for y in stacks]
    chex.assert_trees_all_close(
      columns, [one.columns[0] for one in alone], rtol=0, atol=1e-5
    )
    chex.assert_trees_all_close(
      shares, [one.shares[0] for one in alone], rtol=1e-5
    )

  def test_later_passes_are_needed(self):
    """One pass alone is far from orthonormal on a conditioned input."""
    y = jnp.asarray(spectrum(np.logspace(0, -2.9, COLS)), jnp.float32)[None]
    once = np.asarray(unit_columns([y])[0][0], np.float64)
    self.assertGreater(np.abs(once.T @ once - np.eye(COLS)).max(), 1e-4)


class ReviveTest(parameterized.TestCase):
  def setUp(self):
    super().setUp()
    self.q = jnp.asarray(gaussian(), jnp.float32)[None]
    self.key = jax.random.key(0)

  def test_keeps_columns_that_are_new_enough(self):
    shares = jnp.full((1, COLS), 0.01)
    (q,) = revive([self.q], [shares], self.key, UNIT)
    np.testing.assert_array_equal(q, self.q)

  def test_is_continuous_at_the_threshold(self):
    below = jnp.full((1, COLS), 0.01 * (1 - 1e-4))
    (q,) = revive([self.q], [below], self.key, UNIT)
    self.assertBetween(np.abs(q - self.q).max(), 1e-12, 1e-6)

  @parameterized.parameters("zeros", "copies", "noise")
  def test_dead_columns_get_new_directions(self, dead):
    half = COLS // 2
    column = self.q[:, :, :1]
    last = {
      "zeros": jnp.zeros_like(column),
      "copies": column,
      "noise": column * (1 + 1e-7 * self.q[:, :, half:]),
    }[dead]
    q = jnp.concatenate(
      [self.q[:, :, :half], jnp.broadcast_to(last, (1, ROWS, COLS - half))], 2
    )
    found = orthonormalize([q]).shares[0]
    self.assertLess(np.max(found[0, half:]), 1e-5, "they are dead")
    shares = jnp.where(jnp.arange(COLS)[None] < half, 1.0, 0.0)
    q = revive([q], [shares], self.key, UNIT)
    p, shares = orthonormalize(unit_columns(q))
    np.testing.assert_array_less(1e-3, shares[0])
    gram = np.asarray(p[0][0]).T @ np.asarray(p[0][0])
    np.testing.assert_allclose(gram, np.eye(COLS), 0, 2e-6)

  def test_directions_change_with_the_key(self):
    zeros, shares = jnp.zeros_like(self.q), jnp.zeros((1, COLS))
    first, second = (
      np.asarray(revive([zeros], [shares], jax.random.key(i), UNIT)[0][0])
      for i in range(2)
    )
    unit = lambda q: q / np.linalg.norm(q, axis=0)  # noqa: E731
    overlap = np.abs(np.sum(unit(first) * unit(second), axis=0))
    self.assertLess(overlap.max(), 0.5)


if __name__ == "__main__":
  absltest.main()
