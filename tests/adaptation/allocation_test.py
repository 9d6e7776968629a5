"""Ranks under a budget against brute force and exact decompositions."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

from edgc_jax.adaptation import allocation, error_model
from edgc_jax.adaptation.error_model import lost_energy


@functools.partial(jax.jit, static_argnames=("sides",))
def _allocate(gains, sides, budgets, floors, limits):
  sides = np.array(sides)
  return allocation.allocate(gains, sides, budgets, floors, limits)


def allocate(gains, sides, budgets, floor=0, limits=None):
  """Returns ranks; `floor` and `limits` may be one number for all."""
  gains = np.asarray(gains, np.float32)
  num, width = gains.shape
  full = lambda x: jnp.broadcast_to(jnp.int32(x), num)  # noqa: E731
  ranks = _allocate(
    gains, tuple(map(tuple, sides)), jnp.array(budgets, jnp.int32), full(floor),
    full(width if limits is None else jnp.array(limits)),
  )  # fmt: skip
  return np.asarray(ranks)


def removed(gains, ranks):
  return sum(g[:r].sum() for g, r in zip(np.asarray(gains), ranks, strict=True))


def best(gains, sides, budgets, floor=0):
  """Returns the largest energy that ranks within the budgets remove."""
  num, width = np.shape(gains)
  every = itertools.product(range(floor, width + 1), repeat=num)
  return max(
    removed(gains, ranks)
    for ranks in every
    if np.all(np.array(ranks) @ np.array(sides) <= budgets)
  )


def spectra(random, num, width):
  """Draws falling squared singular values of different decay and size."""
  decay = random.uniform(0.3, 0.95, (num, 1))
  size = 10 ** random.uniform(-2, 2, (num, 1))
  return size * decay ** np.arange(width)


def one_by_one(gains, sides, budgets, floor):
  """Takes column after column in the order of gain per price."""
  gains = np.asarray(gains, np.float32)
  gains = np.minimum.accumulate(gains / gains.max(), axis=1)
  share = np.float32(sides) / np.maximum(np.float32(budgets), 1)
  found = []
  for price in allocation._PRICES:
    cost = price * share[:, 0] + (1 - price) * share[:, 1]
    score = gains / cost[:, None]
    ranks = np.full(len(gains), floor)
    left = budgets - ranks @ sides
    for place in np.argsort(-score.T.ravel(), kind="stable"):
      column, i = divmod(place, len(gains))
      if column >= floor and gains[i, column] > 0 and all(sides[i] <= left):
        left, ranks[i] = left - sides[i], ranks[i] + 1
    found.append((removed(gains, ranks), ranks))
  return max(found, key=lambda x: x[0])[1]


class AllocateTest(parameterized.TestCase):
  @parameterized.parameters(*range(10))
  def test_whole_runs_of_columns_are_as_one_column_after_the_other(self, seed):
    random = np.random.default_rng(100 + seed)
    gains = spectra(random, 25, 16)
    sides = random.choice([8, 24, 32, 96], (25, 2))
    floor, rank = int(random.integers(3)), int(random.integers(4, 12))
    budgets = rank * sides.sum(axis=0)
    expected = one_by_one(gains, sides, budgets, floor)
    ranks = allocate(gains, sides, budgets, floor)
    self.assertTrue(np.all(ranks @ sides <= budgets))
    # Prices that remove as much, up to rounding, may leave other ranks.
    self.assertAlmostEqual(
      removed(gains, ranks) / removed(gains, expected), 1, places=6
    )

  @parameterized.product(seed=[*range(6)], floor=[0, 1])
  def test_best_up_to_a_column(self, seed, floor):
    """With one shape of matrix there is one budget, and Lagrange is exact."""
    random = np.random.default_rng(seed)
    gains = spectra(random, 4, 6)
    sides = np.tile(random.integers(2, 9, 2), (4, 1))
    budgets = random.integers(6, 15) * sides[0]
    ranks = allocate(gains, sides, budgets, floor)
    self.assertAlmostEqual(
      removed(gains, ranks) / best(gains, sides, budgets, floor), 1, places=5
    )

  @parameterized.parameters(*range(12))
  def test_near_the_best_for_different_sides(self, seed):
    """The gap is at most the largest gain of one more column."""
    random = np.random.default_rng(seed)
    gains = spectra(random, 4, 6)
    sides = random.integers(2, 9, (4, 2))
    sides.sort(axis=1)
    budgets = 3 * sides.sum(axis=0)
    ranks = allocate(gains, sides, budgets, floor=1)
    self.assertTrue(np.all(ranks @ sides <= budgets))
    next_columns = [g[r] for g, r in zip(gains, ranks, strict=True) if r < 6]
    self.assertGreaterEqual(
      removed(gains, ranks) + max(next_columns),
      best(gains, sides, budgets, floor=1),
    )

  @parameterized.parameters(*range(6))
  def test_the_budget_is_kept_and_spent(self, seed):
    """The rest of the budget is too small for another column."""
    random = np.random.default_rng(seed)
    num, width = 12, 40
    gains = spectra(random, num, width)
    sides = np.sort(random.integers(8, 300, (num, 2)), axis=1)
    limits = random.integers(10, width + 1, num)
    budgets = 8 * sides.sum(axis=0)
    ranks = allocate(gains, sides, budgets, 2, limits)
    self.assertTrue(np.all((ranks >= 2) & (ranks <= limits)))
    left = budgets - ranks @ sides
    self.assertTrue(np.all(left >= 0))
    for i in range(num):
      if ranks[i] < limits[i]:
        self.assertTrue(np.any(left < sides[i]), i)

  def test_equal_matrices_get_equal_ranks(self):
    for row in (0.5 ** np.arange(8.0), np.ones(8), 1 + np.arange(8.0)):
      gains = np.tile(row, (5, 1))
      sides = np.tile([6, 9], (5, 1))
      ranks = allocate(gains, sides, 4 * sides.sum(axis=0), 1)
      np.testing.assert_array_equal(ranks, 4)

  def test_a_matrix_without_gain_stays_at_its_floor(self):
    gains = np.array([[4.0, 3, 2, 1, 1, 1, 1, 1], [0.0] * 8])
    sides = np.array([[6, 9], [6, 9]])
    np.testing.assert_array_equal(allocate(gains, sides, (48, 72), 2), [6, 2])
    np.testing.assert_array_equal(
      allocate(np.zeros((2, 8)), sides, (48, 72), 2), [2, 2]
    )

  def test_limit_0_gives_rank_0(self):
    gains = np.ones((3, 4))
    sides = np.tile([2, 3], (3, 1))
    ranks = _allocate(
      gains, ((2, 3),) * 3, jnp.array([8, 12]), jnp.array([1, 0, 1]),
      jnp.array([4, 0, 4]),
    )  # fmt: skip
    np.testing.assert_array_equal(ranks, [2, 0, 2])
    self.assertTrue(np.all(np.asarray(ranks) @ sides <= (8, 12)))

  @parameterized.parameters(1e-30, 1e30)
  def test_any_scale(self, scale):
    gains = spectra(np.random.default_rng(0), 4, 6)
    sides = np.tile([2, 3], (4, 1))
    np.testing.assert_array_equal(
      allocate(gains * scale, sides, (20, 30)), allocate(gains, sides, (20, 30))
    )


class CurvesTest(parameterized.TestCase):
  def test_measured_energies_of_known_spectra(self):
    """Measured energies give the ranks that the exact spectra give."""
    random = np.random.default_rng(0)
    num, width, rank = 6, 24, 8
    exact = spectra(random, num, width)
    sides = np.tile([32, 64], (num, 1))
    measured = np.where(np.arange(width) < rank, exact, 0.0)
    gains = error_model.energy_gains(
      jnp.asarray(measured, jnp.float32),
      jnp.asarray(exact.sum(axis=1), jnp.float32),
      jnp.full(num, rank),
    )
    np.testing.assert_allclose(gains[:, :rank], exact[:, :rank], rtol=1e-5)
    budgets = rank * sides.sum(axis=0)
    found = removed(exact, allocate(gains, sides, budgets))
    oracle = removed(exact, allocate(exact, sides, budgets))
    uniform = removed(exact, np.full(num, rank))
    self.assertGreater(found, 0.999 * oracle)
    self.assertLess(exact.sum() - oracle, 0.6 * (exact.sum() - uniform))

  def test_geometric_spectra_are_continued_exactly(self):
    exact = np.array([[3.0], [0.1]]) * np.array([[0.5], [0.8]]) ** np.arange(60)
    gains = error_model.energy_gains(
      jnp.asarray(np.where(np.arange(60) < 7, exact, 0), jnp.float32),
      jnp.asarray(exact.sum(axis=1), jnp.float32),
      jnp.array([7, 7]),
    )
    np.testing.assert_allclose(gains[:, :20], exact[:, :20], rtol=2e-3)

  @parameterized.parameters(1, 2, 5)
  def test_a_tail_never_rises_nor_exceeds_what_is_left(self, rank):
    random = np.random.default_rng(rank)
    columns = random.uniform(0.0, 2.0, (20, 12)).astype(np.float32)
    energy = columns[:, :rank].sum(axis=1) + random.uniform(0, 5, 20)
    gains = np.asarray(
      error_model.energy_gains(
        columns, jnp.asarray(energy, jnp.float32), jnp.full(20, rank)
      )
    )
    self.assertTrue(np.all(np.diff(gains) <= 1e-6))
    self.assertTrue(np.all(np.isfinite(gains) & (gains >= 0)))

  def test_zero_matrices_gain_nothing(self):
    zeros = jnp.zeros(2)
    ranks = jnp.array([2, 3])
    sides = np.array([[8, 16], [8, 8]])
    for gains in (
      error_model.energy_gains(jnp.zeros((2, 6)), zeros, ranks),
      error_model.model_gains(zeros, sides, 6),
      error_model.calibrated_gains(zeros, sides, 6, zeros, ranks),
    ):
      np.testing.assert_array_equal(gains, 0)

  def test_model_is_the_energy_that_a_random_matrix_keeps(self):
    random = np.random.default_rng(0)
    sides = np.array([[48, 96], [64, 64]])
    scales = np.array([0.1, 2.0])
    gains = np.asarray(
      error_model.model_gains(jnp.asarray(scales**2, "float32"), sides, 24)
    )
    for row, (m, n), scale in zip(gains, sides, scales, strict=True):
      draws = scale * random.standard_normal((20, m, n))
      values = np.linalg.svd(draws, compute_uv=False)
      exact = np.mean(values**2, axis=0)[:24]
      np.testing.assert_allclose(np.cumsum(row), np.cumsum(exact), rtol=0.06)

  @parameterized.parameters(0.9, 0.5, 0.1)
  def test_calibration_meets_the_measured_error(self, lost):
    sides = np.array([[48, 96], [64, 64]])
    gains = np.asarray(
      error_model.calibrated_gains(
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
      error_model.calibrated_gains(
        jnp.ones(1), sides, 24, jnp.full(1, lost), jnp.array([8])
      ),
      error_model.model_gains(jnp.ones(1), sides, 24),
      rtol=1e-3,
    )

  def test_the_full_rank_says_nothing_of_the_spectrum(self):
    """It loses nothing for any spectrum: the model stays as it is."""
    sides, full = np.array([[8, 96], [64, 64]]), jnp.array([8, 64])
    np.testing.assert_allclose(
      error_model.calibrated_gains(jnp.ones(2), sides, 64, jnp.zeros(2), full),
      error_model.model_gains(jnp.ones(2), sides, 64),
      atol=1e-3,
    )


if __name__ == "__main__":
  absltest.main()
