"""Entrywise methods against NumPy on four replicas."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.meshes import (
  Pmap,
  factors,
  first_replica,
  gradients_like,
  residuals,
)

import edgc_jax

REPLICAS = 4
# Of the two compressed leaves, one is no multiple of a block or a run.
PARAMS = {
  "small": jnp.zeros((20, 20)),
  "stack": jnp.zeros((3, 20, 24)),
  "wide": jnp.zeros((23, 51)),
}
LARGE = ("stack", "wide")


def host(tree):
  return jax.tree.map(lambda x: np.asarray(x, np.float64), tree)


def mean(tree):
  return jax.tree.map(lambda x: x.mean(0), host(tree))


def largest(x, density):
  """Returns x with all but its k largest entries set to zero."""
  count = max(1, round(density * x.size))
  kept = np.zeros(x.size)
  places = np.argsort(-np.abs(x.ravel()), kind="stable")[:count]
  kept[places] = x.ravel()[places]
  return kept.reshape(x.shape)


def test_topk_agrees_with_numpy():
  run = Pmap(edgc_jax.topk(0.05), PARAMS)
  residual = dict.fromkeys(LARGE, 0.0)
  for step in range(4):
    gradients = gradients_like(PARAMS, seed=step)
    updates, expected = run.step(gradients), {}
    for name in LARGE:
      m = host(gradients)[name] + residual[name]
      sent = np.stack([largest(part, 0.05) for part in m])
      expected[name], residual[name] = sent.mean(0), m - sent
    kept = {name: run.residual()[name] for name in LARGE}
    found = {name: first_replica(updates)[name] for name in LARGE}
    chex.assert_trees_all_close(found, expected, rtol=1e-5, atol=1e-6)
    chex.assert_trees_all_close(kept, residual, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("error_feedback", [True, False])
@pytest.mark.slow
def test_randomk_agrees_with_numpy(error_feedback):
  """One entry of each run is sent, the same on all replicas."""
  tx = edgc_jax.randomk(0.1, error_feedback=error_feedback)
  run = Pmap(tx, PARAMS)
  residual = dict.fromkeys(LARGE, 0.0)
  seen = set()
  for step in range(4):
    gradients = gradients_like(PARAMS, seed=step)
    updates = run.step(gradients)
    for name in LARGE:
      m = host(gradients)[name] + residual[name]
      size = PARAMS[name].size
      count = round(0.1 * size)
      places = np.flatnonzero(updates[name][0])
      lengths = size // count + (np.arange(count) < size % count)
      ends = np.cumsum(lengths)
      np.testing.assert_array_equal(
        np.searchsorted(ends, places, side="right"), np.arange(count)
      )
      expected = np.zeros(size)
      scale = 1 if error_feedback else lengths
      expected[places] = m.mean(0).ravel()[places] * scale
      np.testing.assert_allclose(updates[name][0].ravel(), expected, 1e-5, 1e-6)
      if error_feedback:
        residual[name] = m.copy()
        residual[name].reshape(REPLICAS, -1)[:, places] = 0
        np.testing.assert_allclose(
          run.residual()[name], residual[name], 1e-5, 1e-6
        )
      seen.add((name, tuple(places)))
  assert len(seen) == 8


@pytest.mark.slow
def test_randomk_is_unbiased_without_error_feedback():
  """The average of 400 draws is close to the mean in each entry."""
  params = {"w": jnp.zeros((16, 64))}
  run = Pmap(edgc_jax.randomk(0.25, error_feedback=False), params)
  gradients = gradients_like(params, seed=0)
  exact = mean(gradients)["w"]
  total = sum(run.step(gradients)["w"][0] for _ in range(400)) / 400
  # An entry is sent in one of 4 steps, 4 times as large: deviation 3^(1/2).
  error = (total - exact) / (np.abs(exact) * (3 / 400) ** 0.5)
  assert abs(np.mean(error * np.sign(exact))) <= 0.15
  assert abs(np.std(error) - 1) <= 0.15


@pytest.mark.parametrize("bits", [2, 1])
@pytest.mark.slow
def test_few_bits_lose_nothing_for_ever(bits):
  """All updates and the mean residual add up to all gradients."""
  params = {"w": jnp.zeros((32, 64))}
  run = Pmap(edgc_jax.quantize(bits, error_feedback=True, block=64), params)
  given, received = 0.0, 0.0
  for step in range(12):
    gradients = gradients_like(params, seed=step)
    given += host(gradients)["w"].mean(0)
    received += run.step(gradients)["w"][0]
  left = run.residual()["w"].mean(0)
  np.testing.assert_allclose(received + left, given, atol=1e-4)
  assert np.abs(left).max() > 0.1


@pytest.mark.slow
def test_a_residual_that_decays_forgets():
  params = {"w": jnp.zeros((32, 64))}
  run = Pmap(edgc_jax.topk(0.05, residual_decay=0.5), params)
  gradients = gradients_like(params, seed=0)
  run.step(gradients)
  residual = run.residual()["w"]
  sent = run.step(jax.tree.map(jnp.zeros_like, gradients))["w"][0]
  left = run.residual()["w"].mean(0)
  np.testing.assert_allclose(sent + left, 0.5 * residual.mean(0), atol=1e-6)


def test_relative_error_is_of_the_mean():
  """Sketches of the whole and the rest are unbiased, up to their ratio."""
  params = {"w": jnp.zeros((60, 80))}
  run = Pmap(edgc_jax.topk(0.3), params)
  estimated, exact = [], []
  for step in range(40):
    gradients = gradients_like(params, seed=step)
    m = host(gradients)["w"] + run.residual()["w"]
    run.step(gradients)
    residual = run.residual()["w"]
    exact.append(np.sum(residual.mean(0) ** 2) / np.sum(m.mean(0) ** 2))
    values = edgc_jax.metrics(run.state)
    estimated.append(values["relative_error"])
    norm = np.sqrt(np.mean(np.sum(residual**2, axis=(1, 2))))
    assert abs(values["residual_norm"] / norm - 1) < 0.5e-4
  # Values and indices of 4 replicas, a sketch for the error, and sums.
  assert values["wire_bytes"] == 4 * 4 * 1440 + 4 * (18 + 2)
  assert abs(np.mean(estimated) - np.mean(exact)) <= 0.1
  assert 0.2 <= np.mean(exact) <= 0.8


def test_options_of_error_feedback():
  for tx in (edgc_jax.quantize(), edgc_jax.randomk(error_feedback=False)):
    state = tx.init(PARAMS)
    assert not jax.tree.leaves((residuals(state), factors(state)))
  with pytest.raises(ValueError, match="`rotate` must be True with bits=2"):
    edgc_jax.quantize(2, rotate=False)
  with pytest.raises(ValueError, match="`residual_decay` must be 1 without"):
    edgc_jax.quantize(8, residual_decay=0.9)


@pytest.mark.slow
def test_a_nonfinite_entry_skips_the_step_of_chunks():
  """All replicas skip it, even if the entry is not sent."""
  params = {"w": jnp.zeros((32, 40))}
  run = Pmap(edgc_jax.topk(0.05, chunk=512, bits=2), params)
  for step, bad in enumerate((np.nan, np.inf, None)):
    gradients = gradients_like(params, seed=step)
    if bad:
      gradients["w"] = gradients["w"].at[2, 3, 4].set(bad)
    update = run.step(gradients)["w"]
    assert (np.abs(update).max() > 0) == (bad is None)
    assert np.isfinite(update).all()
  assert edgc_jax.metrics(run.state)["skipped_steps"] == 2


@pytest.mark.parametrize(("kind", "bias"), [("heavy", 0.15), ("constant", 0.3)])
def test_errors_are_not_read_too_large(kind, bias):
  """Of one step, over many draws of the signs."""
  own = np.random.default_rng(0).standard_normal((4, 32, 48)) ** 3
  if kind == "constant":
    own = np.ones((4, 32, 48))
  gradients = {"w": jnp.asarray(own, jnp.float32)}
  run, found = Pmap(edgc_jax.topk(0.3), {"w": jnp.zeros((32, 48))}), []
  start = run.state
  for step in range(60):  # the signs of a step depend on its number
    run.state = start._replace(count=start.count + step)
    run.step(gradients)
    found.append(edgc_jax.metrics(run.state)["relative_error"])
  left = run.residual()["w"].mean(0)
  exact = np.sum(left**2) / np.sum(own.mean(0) ** 2)
  assert abs(np.mean(found) / exact - 1) < bias
  assert max(found) < 1
