"""Peers' methods, against NumPy: what one step sends, and what it keeps."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import fft

import edgc_jax
from experiments.lab.peers.demo import demo
from experiments.lab.peers.late import late
from experiments.lab.peers.sparse_loco import sparse_loco

# Methods for comparison, in `experiments/` alone.
pytestmark = pytest.mark.slow

N, AXIS = 4, "data"
SPARSE_LOCO = edgc_jax.topk(1 / 64, chunk=4096, bits=2, residual_decay=0.95)
PUBLISHED = sparse_loco()
DEMO = demo(count=32)
PARAMS = {"w": jnp.zeros((96, 128)), "b": jnp.zeros(128)}
BIASES = 256 // 2 + 4 + 4 * N  # 4 bits in a block of 64 of each replica


def gradients(seed=0):
  keys = jax.random.split(jax.random.key(seed), 2)
  return {
    "w": jax.random.normal(keys[0], (N, 96, 128)),
    "b": jax.random.normal(keys[1], (N, 128)),
  }


def start(tx, params):
  """Returns the first state of replicas, and the compiled update."""
  axes = edgc_jax.state_axes(tx, params)
  init = jax.vmap(
    tx.init, in_axes=None, out_axes=axes, axis_size=N, axis_name=AXIS
  )
  update = jax.vmap(
    tx.update, in_axes=(0, axes), out_axes=(None, axes), axis_name=AXIS
  )
  return init(params), jax.jit(update)


# All tests of a method share its program.
program = functools.cache(lambda tx: start(tx, PARAMS))


def run(tx, steps):
  """Returns updates and state after some steps."""
  state, update = program(tx)
  for seed in range(steps):
    updates, state = update(gradients(seed), state)
  return updates, state


def bytes_of(tx):
  """Returns the bytes of a step after those that compare gradients."""
  return edgc_jax.metrics(run(tx, 6)[1])["wire_bytes"]


def residual_of(state):
  return np.asarray(state.leaves["w"].residual.values)[:, 0]


def two_magnitudes(values):
  """The code of SparseLoCo, of the entries of one chunk."""
  magnitude = np.abs(values)
  large = magnitude > magnitude.mean()
  coded = np.where(large, magnitude[large].mean(), magnitude[~large].mean())
  return np.sign(values) * coded


def test_sparse_loco_sends_the_largest_of_every_chunk():
  updates, state = run(SPARSE_LOCO, 1)
  given = np.asarray(gradients()["w"]).reshape(N, 3, 4096)
  expected = np.zeros_like(given)
  for i in range(N):
    for c in range(3):
      index = np.argsort(-np.abs(given[i, c]))[:64]
      expected[i, c, index] = two_magnitudes(given[i, c, index])
  mean = expected.mean(0).reshape(96, 128)
  # Values of 16 bits, of which opposite ones cancel.
  np.testing.assert_allclose(updates["w"], mean, rtol=0.01, atol=5e-3)
  assert np.count_nonzero(updates["w"]) <= N * 3 * 64
  left = (given - expected).reshape(N, 96, 128)
  np.testing.assert_allclose(residual_of(state), left, rtol=0.01, atol=0.02)
  # 10 bits an entry and 4 bytes a chunk of each replica; errors and biases.
  sent = N * 3 * (64 * 10 // 8 + 4) / 2
  assert bytes_of(SPARSE_LOCO) == sent + BIASES + 4 * (18 + 2)


def test_sparse_loco_as_published_differs_in_bytes_alone():
  (ours, kept), (updates, state) = run(SPARSE_LOCO, 3), run(PUBLISHED, 3)
  np.testing.assert_allclose(updates["w"], ours["w"], rtol=1e-6, atol=1e-7)
  np.testing.assert_allclose(
    residual_of(state), residual_of(kept), rtol=1e-6, atol=1e-7
  )
  # 14 bits an entry and 4 bytes a chunk of each replica; float32 biases.
  sent = N * 3 * (64 * 14 // 8 + 4) / 2
  assert bytes_of(PUBLISHED) == sent + 4 * 128 + 4 * (18 + 2)


def test_demo_sends_the_largest_frequencies():
  updates, state = run(DEMO, 1)
  given = np.asarray(gradients()["w"])
  expected = np.zeros_like(given)
  for i in range(N):
    # The largest divisors up to 64 are 48 and 64.
    for r in range(0, 96, 48):
      for c in range(0, 128, 64):
        part = fft.dctn(given[i, r : r + 48, c : c + 64], norm="ortho")
        count = 48 * 64 * 32 // 4096
        least = np.sort(np.abs(part).ravel())[-count]
        kept = np.where(np.abs(part) >= least, part, 0.0)
        expected[i, r : r + 48, c : c + 64] = fft.idctn(kept, norm="ortho")
  np.testing.assert_allclose(updates["w"], expected.mean(0), atol=5e-3)
  np.testing.assert_allclose(residual_of(state), given - expected, atol=2e-2)
  # Indices take 7 bits each, and a map of 24 + 23 bits.
  sent = N * 4 * (24 * 2 + 21 + 6) / 2
  assert bytes_of(DEMO) == sent + 4 * 128 + 4 * (18 + 2)


@pytest.mark.parametrize(
  ("tx", "decay"), [(SPARSE_LOCO, 0.95), (PUBLISHED, 0.95), (DEMO, 0.999)]
)
def test_nothing_but_the_decay_is_lost(tx, decay):
  _, state = run(tx, 2)
  kept = residual_of(state).mean(0)
  updates, state = run(tx, 3)
  given = np.asarray(gradients(2)["w"]).mean(0)
  np.testing.assert_allclose(
    updates["w"] + residual_of(state).mean(0), given + decay * kept, atol=1e-4
  )


@pytest.mark.parametrize("tx", [SPARSE_LOCO, PUBLISHED, DEMO])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_nonfinite_entry_skips_the_step(tx, bad):
  given = gradients()
  given["w"] = given["w"].at[1, 2, 3].set(bad)
  state, update = program(tx)
  updates, state = update(given, state)
  assert not np.any(updates["w"])
  assert edgc_jax.metrics(state)["skipped_steps"] == 1


def test_wrong_options():
  for make, options, name in (
    (demo, {"count": 3}, "count"), (demo, {"count": 5000}, "count"),
    (edgc_jax.topk, {"chunk": 6}, "chunk"),
    (edgc_jax.topk, {"chunk": 8192}, "chunk"),
    (edgc_jax.topk, {"bits": 2}, "bits"),
    (edgc_jax.topk, {"bits": 4, "chunk": 4096}, "bits"),
  ):  # fmt: skip
    with pytest.raises(ValueError, match=f"`{name}` must be"):
      make(**options)
  state, update = start(demo(), {"w": jnp.zeros((67, 67))})
  with pytest.raises(ValueError, match="a divisor from 2 to 64"):
    update({"w": jnp.ones((N, 67, 67))}, state)


def test_float32_values_of_chunks():
  """Chunks of 1,024 with 12 entries each; the last chunk of "b" is padded."""
  tx = edgc_jax.topk(0.012, chunk=1024, min_size=1)
  updates, state = run(tx, 1)
  given = np.asarray(gradients()["w"]).reshape(N, 12, 1024)
  least = np.sort(np.abs(given), 2)[:, :, -12:-11]
  expected = np.where(np.abs(given) >= least, given, 0.0)
  np.testing.assert_allclose(
    updates["w"], expected.mean(0).reshape(96, 128), atol=1e-6
  )
  np.testing.assert_allclose(
    residual_of(state), (given - expected).reshape(N, 96, 128), atol=1e-6
  )
  # Indices take 6 bits each, and a map of 12 + 15 bits.
  sent = N * 12 * (12 * 4 + 9 + 4) / 2
  assert bytes_of(tx) == sent + BIASES + 4 * (18 + 2)


def test_a_leaf_smaller_than_a_chunk():
  """All 60 entries are sent, padded to one chunk of 60."""
  tx = edgc_jax.topk(1.0, chunk=4096, min_size=1)
  state, update = start(tx, {"w": jnp.zeros((6, 10))})
  given = {"w": jax.random.normal(jax.random.key(0), (N, 6, 10))}
  updates, _ = update(given, state)
  np.testing.assert_allclose(updates["w"], given["w"].mean(0), atol=1e-6)


@pytest.mark.parametrize("first", [0, 2])
def test_late_applies_the_mean_of_the_step_before(first):
  """At once before `start`; step `start` itself applies nothing."""
  tx = late(start=first)
  found = [run(tx, steps)[0]["w"] for steps in (1, 2, 3, 4)]
  means = [gradients(seed)["w"].mean(0) for seed in range(4)]
  wanted = [*means[:first], jnp.zeros_like(means[0]), *means[first:]]
  for own, expected in zip(found, wanted[:4], strict=True):
    np.testing.assert_allclose(own, expected, rtol=1e-5, atol=1e-6)
