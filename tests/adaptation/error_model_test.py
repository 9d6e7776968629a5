"""The error model against exact singular values."""

import numpy as np
from absl.testing import absltest, parameterized

from edgc_jax.adaptation.error_model import SMALLEST_LOSS, lost_energy


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


if __name__ == "__main__":
  absltest.main()
