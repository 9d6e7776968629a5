"""The error model against exact singular values."""

import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

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


@pytest.mark.slow
@pytest.mark.parametrize(
  # The smaller the matrix, the more draws its mean needs: the standard error of
  # 256 x 256 is 0.1 % with 20.
  "rows, cols, draws",
  [(512, 2048, 5), (256, 256, 20), (64, 4096, 10), (2048, 512, 3)],
)
def test_agrees_with_svd(rows, cols, draws):
  measured, model = lost_by_svd(rows, cols, draws), lost_energy(rows, cols)
  most = 3 * min(rows, cols) // 4
  assert_allclose(model[: most + 1], measured[: most + 1], 5e-3)
  assert_allclose(model[most:], measured[most:], 0, 1e-3)


@pytest.mark.parametrize("rows, cols", [(4, 4), (1, 7), (37, 91), (768, 50304)])
def test_falls_from_everything_to_nothing(rows, cols):
  lost = lost_energy(rows, cols)
  assert len(lost) == min(rows, cols) + 1
  assert lost[0] == 1.0
  assert lost[-1] == SMALLEST_LOSS
  assert np.all(np.diff(lost) < 0)
  # Each further direction removes less than the one before.
  assert np.all(np.diff(lost, 2) > -1e-6)
  assert_array_equal(lost, lost_energy(cols, rows))


def model_gains(variance, sides, width):
  """Returns what each column removes of matrices of independent entries."""
  rows = []
  for own, (m, n) in zip(variance, sides, strict=True):
    lost = lost_energy(m, n)
    columns = np.minimum(np.arange(width + 1), len(lost) - 1)
    rows.append(-own * m * n * np.diff(lost[columns]))
  return np.array(rows)


def gains_of(variance, sides, width, lost, ranks):
  variance, lost = (jnp.asarray(x, "float32") for x in (variance, lost))
  found = calibrated_gains(
    variance, np.array(sides), width, lost, jnp.array(ranks)
  )
  return np.asarray(found)


def test_calibration_meets_the_measured_error():
  sides = [[48, 96], [64, 64]]
  for lost in (0.9, 0.5, 0.1):
    gains = gains_of(np.ones(2), sides, 48, [lost, lost], [8, 5])
    kept = gains[0, :8].sum() / (48 * 96), gains[1, :5].sum() / 64**2
    assert_allclose(kept, 1 - lost, atol=0.01)


def test_what_the_model_predicts_is_not_stretched():
  """Nor a full rank, which loses nothing for any spectrum."""
  sides, lost = [[48, 96]], lost_energy(48, 96)[8]
  gains = gains_of(np.ones(1), sides, 24, [lost], [8])
  assert_allclose(gains, model_gains(np.ones(1), sides, 24), rtol=1e-3)
  sides = [[8, 96], [64, 64]]
  gains = gains_of(np.ones(2), sides, 64, np.zeros(2), [8, 64])
  assert_allclose(gains, model_gains(np.ones(2), sides, 64), atol=1e-3)


@pytest.mark.parametrize("rank", [1, 2, 5])
def test_gains_never_rise_nor_exceed_the_energy(rank):
  random = np.random.default_rng(rank)
  sides = np.tile([[12, 40]], (20, 1))
  variance = random.uniform(0.1, 2.0, 20).astype(np.float32)
  lost = random.uniform(0.0, 1.0, 20).astype(np.float32)
  gains = gains_of(variance, sides, 12, lost, [rank] * 20)
  # Up to the rounding of T, which is a table of float32.
  assert np.all(np.diff(gains) <= 1e-6 * 480 * variance[:, None])
  assert np.all(np.isfinite(gains) & (gains >= 0))
  assert np.all(gains.sum(axis=1) <= 480 * variance * (1 + 1e-6))


def test_columns_end_at_the_cap_and_any_scale_has_the_same_shares():
  """At ratio 2, 32 x 32 has at most 8 columns; 64 x 128 has up to 21."""
  tree = {"a": jnp.zeros((32, 32)), "b": jnp.zeros((128, 64))}
  matrices = with_factors(leaves_in(tree), (4,), 2.0, None)
  table = loss_table(matrices, 24)
  lost = np.array([
    lost_energy(32, 32)[[*range(9), *[8] * 16]],
    lost_energy(64, 128)[[*range(22), *[21] * 3]],
  ])  # fmt: skip
  assert_allclose(table, np.log(lost), rtol=1e-6)
  sizes = np.float32([1024, 8192])
  for scale in (1e-30, 1.0, 1e30):
    errors = log_error(table, sizes, jnp.float32([scale, 3 * scale]))
    weights = np.array([1024, 3 * 8192])
    expected = weights @ lost / weights.sum()
    assert_allclose(np.exp(errors - errors[0]), expected, rtol=0, atol=5e-5)
    assert np.all(np.diff(errors[:22]) < 0)
