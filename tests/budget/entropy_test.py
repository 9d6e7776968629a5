"""Entropies against closed forms, and inputs that must not change them."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

from edgc_jax.budget import entropy

GAUSSIAN = 0.5 * np.log(2 * np.pi * np.e)  # of a standard Gaussian, nats
REPLICAS = 4


@functools.partial(jax.jit, static_argnames=("rate", "estimator"))
def estimate(leaves, index=0, rate=1.0, estimator="gaussian"):
  """Runs `entropy.estimate` on matrices with a leading axis of replicas."""
  run = lambda *x: entropy.estimate(  # noqa: E731
    [leaf[None] for leaf in x], index, "data",
    entropy.Sampling(entry_rate=rate, estimator=estimator),
  )  # fmt: skip
  return jax.vmap(run, axis_name="data")(*leaves)


def gaussian(shape, seed=0, scale=1.0):
  random = np.random.default_rng(seed)
  return jnp.asarray(
    scale * random.standard_normal((REPLICAS, *shape)), "float32"
  )


def sample(x, **options):
  result = estimate((x,), **options)
  np.testing.assert_array_equal(result.entropy, result.entropy[0])
  return float(result.entropy[0])


class EntropyTest(parameterized.TestCase):
  @parameterized.product(
    scale=[1e-18, 1e-4, 1.0, 3.0, 1e12], estimator=tuple(entropy.ESTIMATORS)
  )
  def test_gaussian_of_any_scale(self, scale, estimator):
    measured = sample(gaussian((300, 400), scale=scale), estimator=estimator)
    self.assertAlmostEqual(measured, GAUSSIAN + np.log(scale), delta=0.01)

  def test_histogram_of_other_shapes(self):
    random = np.random.default_rng(0)
    laplace = jnp.asarray(random.laplace(size=(REPLICAS, 200_000)), "float32")
    measured = sample(laplace, estimator="histogram")
    self.assertAlmostEqual(measured, 1 + np.log(2), delta=0.01)
    uniform = jnp.asarray(random.uniform(-1, 1, (REPLICAS, 200_000)), "float32")
    measured = sample(uniform, estimator="histogram")
    self.assertAlmostEqual(measured, np.log(2), delta=0.01)

  def test_histogram_counts_more_than_float32_can(self):
    entries = 2**24 + 16
    x = jnp.full((1, entries), 0.1)
    counts = jax.jit(entropy._histogram, static_argnums=2)([x], [x != 0], 64)
    self.assertEqual(counts.max(), entries)

  @parameterized.parameters(*entropy.ESTIMATORS)
  def test_zeros_outliers_and_nonfinite_entries_do_not_count(self, estimator):
    clean = gaussian((300, 400))
    expected = sample(clean, estimator=estimator)
    half = clean.at[:, ::2].set(0.0)
    self.assertAlmostEqual(sample(half, estimator=estimator), expected, 1)
    wild = clean.at[0, 0, 0].set(1e4)
    self.assertAlmostEqual(sample(wild, estimator=estimator), expected, 1)
    broken = clean.at[1, 0, :3].set(jnp.array([jnp.nan, jnp.inf, -jnp.inf]))
    self.assertAlmostEqual(sample(broken, estimator=estimator), expected, 3)

  def test_nothing_to_measure(self):
    for value in (0.0, np.nan):
      x = jnp.full((REPLICAS, 8, 8), value)
      result = estimate((x,))
      np.testing.assert_array_equal(result.weight, 0)
      np.testing.assert_array_equal(result.entropy, 0)
      np.testing.assert_array_equal(result.variance, 0)
    np.testing.assert_array_equal(estimate((gaussian((8, 8)),)).weight, 1)

  @parameterized.parameters(*entropy.ESTIMATORS)
  def test_entries_are_pooled_not_entropies(self, estimator):
    scales = jnp.array([1.0, 1.0, 1.0, 3.0])
    x = gaussian((300, 400)) * scales[:, None, None]
    mean_of_entropies = GAUSSIAN + np.log(3) / 4
    measured = sample(x, estimator=estimator)
    self.assertGreater(measured, mean_of_entropies + 0.02)
    if estimator == "gaussian":
      self.assertAlmostEqual(measured, GAUSSIAN + 0.5 * np.log(3.0), delta=0.01)

  def test_samples_agree_with_all_entries_and_move(self):
    x = gaussian((300, 400))
    every = sample(x)
    quarters = [sample(x, rate=0.25, index=i) for i in range(5)]
    np.testing.assert_allclose(quarters, every, atol=0.01)
    self.assertLen(set(quarters[:4]), 4)
    self.assertEqual(quarters[4], quarters[0])

  def test_each_sample_reads_its_share(self):
    """Entries of other offsets do not matter."""
    x = np.array(gaussian((40, 40)))
    flat = x.reshape(REPLICAS, -1)
    expected = sample(jnp.asarray(x), rate=0.25, index=2)
    keep = np.arange(flat.shape[1]) % 4 == 2
    flat[:, ~keep] = 1e6
    self.assertEqual(sample(jnp.asarray(x), rate=0.25, index=2), expected)

  def test_variance_and_entropy_by_matrix(self):
    """Mean squares count zeros, entropies do not."""
    a, b = gaussian((300, 400), 1, 2.0), gaussian((200, 300), 2, 0.01)
    c = gaussian((300, 400), 3, 1.0).at[:, ::2].set(0.0)
    result = estimate((a, b, c))
    expected = [4.0, 1e-4, 0.5]
    np.testing.assert_allclose(result.variance[0], expected, rtol=0.02)
    expected = GAUSSIAN + np.log([2.0, 0.01, 1.0])
    np.testing.assert_allclose(result.entropies[0], expected, atol=0.01)

  def test_a_stack_is_many_matrices(self):
    """Each matrix of a stack counts as if it were a leaf."""
    leaves = [gaussian((30, 40), seed, 10.0**seed) for seed in range(3)]
    apart = estimate(leaves, rate=0.25)
    together = jax.vmap(
      lambda x: entropy.estimate([x], 0, "data", entropy.Sampling()),
      axis_name="data",
    )(jnp.stack(leaves, axis=1))
    chex.assert_trees_all_close(apart, together, rtol=1e-5)

  def test_leaves_of_different_scales(self):
    """Entries of a small loud leaf are not outliers of the quiet rest."""
    loud, quiet = gaussian((100, 100), 1, 100.0), gaussian((400, 500), 2, 1.0)
    result = estimate((loud, quiet))
    variance = (1e4 * 1e4 + 2e5) / 2.1e5
    expected = GAUSSIAN + 0.5 * np.log(variance)
    self.assertAlmostEqual(float(result.entropy[0]), expected, delta=0.02)

  def test_matrix_smaller_than_the_stride(self):
    self.assertTrue(np.isfinite(sample(gaussian((1, 3)), rate=0.1)))


if __name__ == "__main__":
  absltest.main()
