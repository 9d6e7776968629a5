"""Every method with feedback stays bounded, and moves no row without gradient.

On gradients that are hard to encode, the same at every step.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.meshes import AXIS

import edgc_jax
from edgc_jax.methods import chunks

REPLICAS, STEPS = 4, 200
METHODS = {
  "edgc": edgc_jax.edgc(rank_max=8, window=10, warmup_steps=5),
  "powersgd": edgc_jax.powersgd(8, min_ratio=1.0),
  "4 bits": edgc_jax.quantize(4, error_feedback=True),
  "4 bits, rotated": edgc_jax.quantize(
    4, block=64, error_feedback=True, rotate=True
  ),
  "2 bits": edgc_jax.quantize(2, error_feedback=True),
  "1 bit": edgc_jax.quantize(1, error_feedback=True),
  "topk": edgc_jax.topk(0.05),
  "topk, 2 bits": edgc_jax.topk(1 / 16, chunk=512, bits=2),
}
ROWS, LIVE = 103, 10  # of an embedding, and those with a gradient
# Rows of a width that no block divides.
SHAPES = {"noise": (96, 64), "spike": (64, 48), "embedding": (ROWS, 41)}


def gradients():
  random = np.random.default_rng(0)
  g = {
    name: random.standard_normal((REPLICAS, *shape)).astype(np.float32)
    for name, shape in SHAPES.items()
  }
  g["spike"][:] = 0
  g["spike"][:, 3, 4] = 1
  g["embedding"][:, :-LIVE] = 0
  g["bias"] = random.standard_normal((REPLICAS, 700)).astype(np.float32)
  return g


def updates_of(tx, g, steps):
  """Returns the update of each step, and the residuals after the last one."""

  def of_replica(g):
    def step(state, _):
      update, state = tx.update(g, state)
      return state, update

    return jax.lax.scan(step, tx.init(g), None, length=steps)

  state, updates = jax.jit(jax.vmap(of_replica, axis_name=AXIS))(g)
  return jax.tree.map(lambda x: np.asarray(x[0]), updates), state


@pytest.mark.parametrize("name", METHODS)
def test_feedback_stays_bounded(name):
  g = gradients()
  updates, state = updates_of(METHODS[name], g, STEPS)
  for leaf, update in updates.items():
    mean = np.linalg.norm(g[leaf].mean(0))
    norms = np.linalg.norm(update.reshape(STEPS, -1), axis=1)
    # What waits comes later, at a size that does not grow.
    assert norms[STEPS // 2 :].max() <= 1.25 * norms[: STEPS // 2].max(), leaf
    assert norms.max() <= 40 * mean, leaf
    lost = np.linalg.norm(update.mean(0) - g[leaf].mean(0))
    assert lost <= 0.35 * mean, leaf
  assert not updates["embedding"][:, :-LIVE].any()
  assert updates["embedding"][:, -LIVE:].any(axis=(0, 2)).all()
  others = np.delete(updates["spike"], 3, axis=1)
  assert not others.any()
  assert (
    edgc_jax.metrics(jax.tree.map(lambda x: x[0], state))["skipped_steps"] == 0
  )


@pytest.mark.parametrize("scale", [1e-30, 1e37])
def test_values_of_any_scale_are_sent_or_the_step_is_skipped(scale):
  """Sums of many magnitudes of 1e37 are beyond float32."""
  g = {"w": np.float32(scale) * gradients()["noise"] / 4}
  for name in ("topk, 2 bits", "topk", "2 bits", "4 bits"):
    updates, state = updates_of(METHODS[name], g, 2)
    assert np.isfinite(updates["w"]).all(), name
    skipped = np.asarray(edgc_jax.metrics(state)["skipped_steps"])
    assert updates["w"].any() or skipped == 2, name


@pytest.mark.parametrize(
  ("count", "size", "bits"),
  [(64, 4096, 8), (4, 4096, 12), (1024, 4096, 4), (8, 8, 2), (12, 500, 7.4)],
)
def test_indices_take_few_bits(count, size, bits):
  """At most 2 + log2(n / k) bits each, and bytes are whole."""
  random = np.random.default_rng(0)
  index = np.sort(
    [random.permutation(size)[:count] for _ in range(20)]
    + [np.arange(count), np.arange(size)[-count:]],
    axis=1,
  ).astype(np.int32)
  sent = chunks.pack_indices(jnp.asarray(index), size)
  found = chunks.unpack_indices(sent, count, size)
  np.testing.assert_array_equal(found, index)
  num_bytes = sum(x.size for x in sent) / len(index)
  assert num_bytes <= bits * count / 8 + 2
  assert bits <= 2 + np.log2(size / count) + 0.05
