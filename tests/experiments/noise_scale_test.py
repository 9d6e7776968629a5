"""Tests the estimate of the gradient noise scale."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs.protocol import gpt
from experiments.lab.benchmarks import noise_scale


def test_estimates_are_unbiased():
  """Rows of variance 4 in 50 entries, and a gradient of energy 8."""
  rows, count, size = 8, 4000, 50
  draws = 2.0 * jax.random.normal(jax.random.key(0), (count, rows, size))
  params = jnp.full(size, 0.4)

  class Quadratic:  # its gradient is params - mean of the rows
    def loss(self, params, rows, key):
      return 0.5 * jnp.sum((params - rows.mean(0)) ** 2), {}

  gradients = noise_scale._gradients(Quadratic(), params, draws)
  each, mean = noise_scale._energies(gradients)
  found = noise_scale.noise_scale(float(each), float(mean), count, rows)
  np.testing.assert_allclose(found["signal"], size * 0.16, rtol=0.03)
  np.testing.assert_allclose(found["noise"], size * 4.0, rtol=0.03)
  np.testing.assert_allclose(found["noise_scale"], 25.0, rtol=0.05)
  found = noise_scale.noise_scale(4.0, 1.0, 4, 10)
  assert found["noise_scale"] == float("inf"), "without a signal"


def test_entropies_of_means():
  """The mean of n draws of variance 1 has variance 1 / n."""
  draws = {"w": jax.random.normal(jax.random.key(0), (256, 64, 64))}
  found = noise_scale._entropies(draws)
  expected = 0.5 * np.log(2 * np.pi * np.e / np.array([1, 4, 32, 128]))
  np.testing.assert_allclose(found["gaussian"], expected, atol=0.02)
  np.testing.assert_allclose(found["histogram"], expected, atol=0.1)


@pytest.mark.soak("experiments/lab/benchmarks")
def test_a_short_run():
  """Marks of a run, each with a positive scale."""
  config = gpt.get_config("allreduce")
  config.steps, config.batch_size = 20, 8
  config.optimizer.warmup_steps = 5
  config.model.update(width=32, num_layers=1, context=16, num_heads=2)
  lines = list(noise_scale.measure(config, 16))
  assert [line["step"] for line in lines] == [1, 2, 4, 8, 12, 16, 20]
  assert all(line["noise"] > 0 for line in lines)
  assert lines[-1]["loss"] < lines[0]["loss"]
  assert all(len(line["entropy"]["gaussian"]) == 2 for line in lines)  # 1, 4
