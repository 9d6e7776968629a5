"""Tests the benchmark of the entropy's estimate at a small size."""

import numpy as np
import pytest

from configs import gpt2_tiny
from experiments.lab.benchmarks import estimate


@pytest.mark.soak("experiments/lab/benchmarks", "edgc_jax/budget/entropy.py")
def test_samples_of_a_small_model(monkeypatch):
  monkeypatch.setattr(estimate, "_LEAST", 2**8)
  config = gpt2_tiny.get_config("allreduce")
  config.model.update(width=64, num_layers=2, num_heads=2)
  lines = estimate.measure(config, steps=2, rounds=1)
  by_share = {(x["estimator"], x["share"]): x for x in lines}
  assert len(by_share) == len(lines)
  for name in ("gaussian", "histogram"):
    shares = {share for estimator, share in by_share if estimator == name}
    assert shares == {1.0, 0.25, 0.2, 0.05, 0.01}
    whole, sample = by_share[name, 1.0], by_share[name, 0.25]
    # Four matrices a layer, embedding and positions.
    assert whole["entries"] == 2 * 12 * 64**2 + (256 + 128) * 64
    assert whole["error"] == 0.0 and whole["of_all"] == 1.0
    assert 0.0 < sample["error"] < 0.1
    assert len(sample["entropies"]) == 2 and sample["seconds"] > 0.0
  np.testing.assert_allclose(
    by_share["gaussian", 1.0]["entropies"],
    by_share["histogram", 1.0]["entropies"],
    atol=1.0,
  )
