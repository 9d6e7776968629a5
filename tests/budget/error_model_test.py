"""The error model against exact singular values."""

import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import absltest, parameterized

from edgc_jax.budget.error_model import (
  SMALLEST_LOSS,
  calibrated_gains,
  log_error,
  loss_table,
  lost_energy,
)
from edgc_jax.leaves.leaf import leaves_in
from edgc_jax.methods.low_rank import with_factors


def lost_by_svd(rows, cols, draws):
  """Returns the mean lost share of the energy by rank, from exact values."""
  random = np.random.default_rng(0)
  shares = []
  for _ in range(draws):
    a = random.standard_normal((rows, cols))
    small = a @ a.T if rows <= cols else a.T @ a
    energy = np.linalg.eigvalsh(small)[::-1]  # squared singular values
    kept = np.concatenate([[0.0], np.cumsum(energy)])
    shares.append(1.0 - kept / kept[-1])
  return np.mean(shares, axis=0)


class SpectrumTest(parameterized.TestCase):
  @parameterized.parameters(
    # The smaller the matrix, the more draws its mean needs: the standard
    # error of 256 x 256 is 0.1 % with 20.
    (512, 2048, 5), (256, 256, 20), (64, 4096, 10), (2048, 512, 3)
  )  # fmt: skip
  @pytest.mark.slow
  def test_agrees_with_svd(self, rows, cols, draws):
    measured, model = lost_by_svd(rows, cols, draws), lost_energy(rows, cols)
    most = 3 * min(rows, cols) // 4
    np.testing.assert_allclose(model[: most + 1], measured[: most + 1], 5e-3)
    np.testing.assert_allclose(model[most:], measured[most:], 0, 1e-3)

  @parameterized.parameters((4, 4), (1, 7), (37, 91), (768, 50304))
  def test_falls_from_everything_to_nothing(self, rows, cols):
    lost = lost_energy(rows, cols)
    self.assertLen(lost, min(rows, cols) + 1)
    self.assertEqual(lost[0], 1.0)
    self.assertEqual(lost[-1], SMALLEST_LOSS)
    self.assertTrue(np.all(np.diff(lost) < 0))
    # Each further direction removes less than the one before.
    self.assertTrue(np.all(np.diff(lost, 2) > -1e-6))

  def test_transposing_changes_nothing(self):
    np.testing.assert_array_equal(lost_energy(30, 70), lost_energy(70, 30))


def model_gains(variance, sides, width):
  """Returns what each column removes of matrices of independent entries."""
  rows = []
  for own, (m, n) in zip(variance, sides, strict=True):
    lost = lost_energy(m, n)
    columns = np.minimum(np.arange(width + 1), len(lost) - 1)
    rows.append(-own * m * n * np.diff(lost[columns]))
  return np.array(rows)


class GainsTest(parameterized.TestCase):
  def test_model_is_the_energy_that_a_random_matrix_keeps(self):
    """With the loss of a random matrix, the gains are its singular values."""
    random = np.random.default_rng(0)
    sides = np.array([[48, 96], [64, 64]])
    scales, rank = np.array([0.1, 2.0]), 12
    energies, lost = [], []
    for (m, n), scale in zip(sides, scales, strict=True):
      draws = scale * random.standard_normal((20, m, n))
      values = np.linalg.svd(draws, compute_uv=False)
      energies.append(np.mean(values**2, axis=0)[:24])
      lost.append(1 - energies[-1][:rank].sum() / (m * n * scale**2))
    gains = calibrated_gains(
      jnp.asarray(scales**2, "float32"),
      sides,
      24,
      jnp.asarray(lost, "float32"),
      jnp.full(2, rank),
    )
    for row, exact in zip(np.asarray(gains), energies, strict=True):
      np.testing.assert_allclose(np.cumsum(row), np.cumsum(exact), rtol=0.06)

  @parameterized.parameters(0.9, 0.5, 0.1)
  def test_calibration_meets_the_measured_error(self, lost):
    sides = np.array([[48, 96], [64, 64]])
    gains = np.asarray(
      calibrated_gains(
        jnp.ones(2), sides, 48, jnp.full(2, lost), jnp.array([8, 5])
      )
    )
    sizes = np.prod(sides, axis=1)
    kept = [gains[0, :8].sum() / sizes[0], gains[1, :5].sum() / sizes[1]]
    np.testing.assert_allclose(kept, 1 - lost, atol=0.01)

  def test_a_matrix_on_the_model_is_not_stretched(self):
    lost = lost_energy(48, 96)[8]
    sides = np.array([[48, 96]])
    np.testing.assert_allclose(
      calibrated_gains(
        jnp.ones(1), sides, 24, jnp.full(1, lost), jnp.array([8])
      ),
      model_gains(np.ones(1), sides, 24),
      rtol=1e-3,
    )

  def test_the_full_rank_says_nothing_of_the_spectrum(self):
    """It loses nothing for any spectrum: the model stays as it is."""
    sides, full = np.array([[8, 96], [64, 64]]), jnp.array([8, 64])
    np.testing.assert_allclose(
      calibrated_gains(jnp.ones(2), sides, 64, jnp.zeros(2), full),
      model_gains(np.ones(2), sides, 64),
      atol=1e-3,
    )

  @parameterized.parameters(1, 2, 5)
  def test_gains_never_rise_nor_exceed_the_energy(self, rank):
    random = np.random.default_rng(rank)
    sides = np.tile([[12, 40]], (20, 1))
    variance = random.uniform(0.1, 2.0, 20).astype(np.float32)
    lost = random.uniform(0.0, 1.0, 20).astype(np.float32)
    gains = np.asarray(
      calibrated_gains(variance, sides, 12, lost, jnp.full(20, rank))
    )
    # Up to the rounding of T, which is a table of float32.
    self.assertTrue(np.all(np.diff(gains) <= 1e-6 * 480 * variance[:, None]))
    self.assertTrue(np.all(np.isfinite(gains) & (gains >= 0)))
    self.assertTrue(np.all(gains.sum(axis=1) <= 480 * variance * (1 + 1e-6)))

  def test_zero_matrices_gain_nothing(self):
    zeros = jnp.zeros(2)
    sides = np.array([[8, 16], [8, 8]])
    gains = calibrated_gains(zeros, sides, 6, zeros, jnp.array([2, 3]))
    np.testing.assert_array_equal(gains, 0)


class LossTableTest(parameterized.TestCase):
  def test_columns_end_at_the_cap(self):
    """At ratio 2, 32 x 32 has at most 8 columns; 64 x 128 has up to 21."""
    tree = {"a": jnp.zeros((32, 32)), "b": jnp.zeros((2, 128, 64))}
    matrices = with_factors(leaves_in(tree), (4,), 2.0, None)
    matrices = (matrices[0], matrices[1], matrices[1])
    table = loss_table(matrices, 24)
    self.assertEqual(table.shape, (3, 25))
    np.testing.assert_allclose(
      table[0], np.log(lost_energy(32, 32)[[*range(9), *[8] * 16]]), rtol=1e-6
    )
    columns = [*range(22), *[21] * 3]
    for row in table[1:]:
      expected = np.log(lost_energy(64, 128)[columns])
      np.testing.assert_allclose(row, expected, rtol=1e-6)

  @parameterized.parameters(1e-30, 1.0, 1e30)
  def test_shares_of_any_scale(self, scale):
    """G(r) / G(0) does not depend on the scale of the gradients."""
    tree = {"a": jnp.zeros((32, 32)), "b": jnp.zeros((64, 128))}
    matrices = with_factors(leaves_in(tree), (4,), 2.0, None)
    table, sizes = loss_table(matrices, 16), np.float32([1024, 8192])
    errors = log_error(table, sizes, jnp.float32([scale, 3 * scale]))
    lost = np.array([lost_energy(32, 32)[8], lost_energy(64, 128)[16]])
    expected = np.dot(lost, [1024, 3 * 8192]) / (1024 + 3 * 8192)
    self.assertAlmostEqual(
      float(np.exp(errors[16] - errors[0])), expected, places=4
    )
    self.assertTrue(np.all(np.diff(errors) < 0))


if __name__ == "__main__":
  absltest.main()
