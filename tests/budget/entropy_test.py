"""Entropies against closed forms, and inputs that must not change them."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from edgc_jax.budget import entropy
from edgc_jax.wire.channel import Channel

GAUSSIAN = 0.5 * np.log(2 * np.pi * np.e)  # of a standard Gaussian, nats
REPLICAS = 4


@functools.partial(jax.jit, static_argnames=("rate", "estimator"))
def estimate(leaves, index=0, rate=1.0, estimator="gaussian"):
  """Runs `entropy.estimate` on matrices with a leading axis of replicas."""
  run = lambda *x: entropy.estimate(  # noqa: E731
    [leaf[None] for leaf in x], index, Channel("data"),
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
  assert_array_equal(result.entropy, result.entropy[0])
  return float(result.entropy[0])


@pytest.mark.parametrize("scale", [1e-18, 3.0, 1e12])
@pytest.mark.parametrize("estimator", tuple(entropy.ESTIMATORS))
def test_gaussian_of_any_scale(scale, estimator):
  measured = sample(gaussian((300, 400), scale=scale), estimator=estimator)
  assert measured == pytest.approx(GAUSSIAN + np.log(scale), rel=0, abs=0.01)


def test_histogram_of_other_shapes():
  random = np.random.default_rng(0)
  for draws, expected in (
    (random.laplace(size=(REPLICAS, 200_000)), 1 + np.log(2)),
    (random.uniform(-1, 1, (REPLICAS, 200_000)), np.log(2)),
  ):
    measured = sample(jnp.asarray(draws, "float32"), estimator="histogram")
    assert_allclose(measured, expected, 0, 0.01)


def test_histogram_counts_more_than_float32_can():
  entries = 2**24 + 16
  x = jnp.full((1, entries), 0.1)
  counts = jax.jit(entropy._histogram, static_argnums=2)([x], [x != 0], 64)
  assert counts.max() == entries


@pytest.mark.parametrize("estimator", entropy.ESTIMATORS)
def test_zeros_outliers_and_nonfinite_entries_do_not_count(estimator):
  clean = gaussian((300, 400))
  expected = sample(clean, estimator=estimator)
  half = clean.at[:, ::2].set(0.0)
  wild = clean.at[0, 0, 0].set(1e4)
  broken = clean.at[1, 0, :3].set(jnp.array([jnp.nan, jnp.inf, -jnp.inf]))
  for x, atol in ((half, 5e-2), (wild, 5e-2), (broken, 5e-4)):
    assert_allclose(sample(x, estimator=estimator), expected, 0, atol)


def test_nothing_to_measure():
  for value in (0.0, np.nan):
    x = jnp.full((REPLICAS, 8, 8), value)
    result = estimate((x,))
    chex.assert_trees_all_equal(result, jax.tree.map(jnp.zeros_like, result))
  assert_array_equal(estimate((gaussian((8, 8)),)).weight, 1)


@pytest.mark.parametrize("estimator", entropy.ESTIMATORS)
def test_entries_are_pooled_not_entropies(estimator):
  scales = jnp.array([1.0, 1.0, 1.0, 3.0])
  x = gaussian((300, 400)) * scales[:, None, None]
  mean_of_entropies = GAUSSIAN + np.log(3) / 4
  measured = sample(x, estimator=estimator)
  assert measured > mean_of_entropies + 0.02
  if estimator == "gaussian":
    assert_allclose(measured, GAUSSIAN + 0.5 * np.log(3.0), 0, 0.01)


def test_samples_agree_with_all_entries_and_move():
  x = gaussian((300, 400))
  every = sample(x)
  quarters = [sample(x, rate=0.25, index=i) for i in range(5)]
  assert_allclose(quarters, every, atol=0.01)
  assert len(set(quarters[:4])) == 4
  assert quarters[4] == quarters[0]
  # Entries of other offsets do not matter.
  others = np.arange(300 * 400).reshape(300, 400) % 4 != 2
  assert sample(jnp.where(others, 1e6, x), rate=0.25, index=2) == quarters[2]
  # A matrix smaller than the stride is read whole.
  assert np.isfinite(sample(gaussian((1, 3)), rate=0.1))


def test_variance_and_entropy_by_matrix():
  """Mean squares count zeros, entropies do not."""
  a, b = gaussian((300, 400), 1, 2.0), gaussian((200, 300), 2, 0.01)
  c = gaussian((300, 400), 3, 1.0).at[:, ::2].set(0.0)
  result = estimate((a, b, c))
  expected = [4.0, 1e-4, 0.5]
  assert_allclose(result.variance[0], expected, rtol=0.02)
  expected = GAUSSIAN + np.log([2.0, 0.01, 1.0])
  assert_allclose(result.entropies[0], expected, atol=0.01)


def test_a_stack_is_many_matrices():
  """Each matrix of a stack counts as if it were a leaf."""
  leaves = [gaussian((30, 40), seed, 10.0**seed) for seed in range(3)]
  apart = estimate(leaves, rate=0.25)
  together = jax.vmap(
    lambda x: entropy.estimate([x], 0, Channel("data"), entropy.Sampling()),
    axis_name="data",
  )(jnp.stack(leaves, axis=1))
  chex.assert_trees_all_close(apart, together, rtol=1e-5)


def test_leaves_of_different_scales():
  """Entries of a small loud leaf are not outliers of the quiet rest."""
  loud, quiet = gaussian((100, 100), 1, 100.0), gaussian((400, 500), 2, 1.0)
  result = estimate((loud, quiet))
  variance = (1e4 * 1e4 + 2e5) / 2.1e5
  expected = GAUSSIAN + 0.5 * np.log(variance)
  assert float(result.entropy[0]) == pytest.approx(expected, rel=0, abs=0.02)
