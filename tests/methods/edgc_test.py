"""Ranks and metrics of `edgc` for scripted gradients."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import float32
from helpers.flat_options import edgc
from helpers.meshes import BACKENDS, Pmap, find, gradients_like, traced_once

import edgc_jax

# Scales change from window to window, without an announcement.
pytestmark = [
  pytest.mark.filterwarnings("ignore:The entropy of the gradients"),
  pytest.mark.filterwarnings("ignore:Gradients of float"),
]

PARAMS = {"w": jnp.zeros((64, 128)), "b": jnp.zeros((8,))}
# The published method: dense warm-up, one rank for a stage.
OPTIONS = {
  "rank_max": 12, "rank_min": 4, "window": 4, "warmup_steps": 4,
  "max_warmup_steps": 4, "step_rate": 0.5, "entry_rate": 1.0,
  "warmup_rank": None, "allocation": "uniform",
}  # fmt: skip
GAUSSIAN = 0.5 * np.log(2 * np.pi * np.e)


@functools.cache
def run_of(backend, **options):
  """Returns a run, compiled once for all tests."""
  return BACKENDS[backend](traced_once(edgc(**(OPTIONS | options))), PARAMS)


def drive(backend, scales, **options):
  """Runs one window for each scale; returns the run and all metrics."""
  run, values = run_of(backend, **options).restart(), []
  for step in range(4 * len(scales)):
    scale = scales[step // 4]
    run.step(gradients_like(PARAMS, seed=step, scale=scale))
    values.append(edgc_jax.metrics(run.state))
  return run, values


# Both changes of the scale, down and up, span the whole ladder.
WHOLE = [1.0, 0.2, 0.2, 0.2, 1.1, 1.1, 1.1]


@pytest.mark.slow
@pytest.mark.parametrize(
  "backend, scales, options, expected",
  [
    ("pmap", WHOLE, {}, [0, 12, 8, 4, 4, 8, 12]),
    ("shard_map", WHOLE, {}, [0, 12, 8, 4, 4, 8, 12]),
    # In a compressed warm-up only its own rank differs.
    ("pmap", WHOLE[:5], {"warmup_rank": "max"}, [12, 12, 8, 4, 4]),
    ("pmap", WHOLE[:5], {"warmup_rank": 9}, [8, 12, 8, 4, 4]),
    (
      "pmap", [1.0, 0.2, 0.2, 0.2, 0.04, 0.04],
      {"rule": "linear", "max_rank_step": 8}, [0, 12, 12, 4, 4, 12],
    ),
  ],
  ids=range(5),
)  # fmt: skip
def test_ranks_by_window_in_one_trace(backend, scales, options, expected):
  run, values = drive(backend, scales, **options)
  assert [v["rank"] for v in values] == list(np.repeat(expected, 4))
  reference = np.ravel(find(run.state).budget.reference_entropy)[0]
  assert abs(reference - GAUSSIAN) <= 0.02
  assert np.abs(run.residual()["w"]).max() > 0
  # Of the local gradient, before error feedback, every second step.
  entropies = [v["entropy"] for v in values]
  local = GAUSSIAN + np.log(np.repeat(scales, 4))
  np.testing.assert_allclose(entropies, local, rtol=0, atol=0.02)
  np.testing.assert_array_equal(entropies[::2], entropies[1::2])


def test_predicted_error_is_near_the_measured_one():
  """The model holds for independent entries.

  One power step is not the best rank-r approximation, and error feedback
  flattens the spectrum: the measured error is larger.
  """
  _, values = drive("pmap", [1.0] * 3)
  assert values[0]["predicted_error"] == values[0]["relative_error"] == 0
  last = values[-1]
  assert last["rank"] == 12
  ratio = last["relative_error"] / last["predicted_error"]
  assert 1 <= ratio <= 1.35


@pytest.mark.parametrize("allocation", ["uniform", "error"])
def test_errors_are_predicted_from_the_first_step_on(allocation):
  """Before a window is measured, by the model of independent entries."""
  tx = edgc_jax.edgc(rank_max=16, total_steps=100, allocation=allocation)
  found = edgc_jax.metrics(tx.init({"w": jnp.zeros((64, 64))}))
  assert 0.3 <= found["predicted_error"] <= 0.5
  assert 0.3 <= found["matrix_predicted_error"]["w"][0] <= 0.5


@pytest.mark.parametrize(
  "allocation, backend", [("uniform", "shard_map"), ("error", "pmap")]
)
def test_nothing_to_compress(allocation, backend):
  """With vectors only, `edgc` warns that it is an all-reduce."""
  params = {"b": jnp.zeros((8,))}
  tx = edgc(**OPTIONS | {"allocation": allocation})
  with pytest.warns(RuntimeWarning, match="gradients are sent dense"):
    run = BACKENDS[backend](tx, params)
  for step in range(6):
    gradients = gradients_like(params, seed=step)
    updates = run.step(gradients)
    np.testing.assert_allclose(
      updates["b"][0], np.mean(gradients["b"], 0), rtol=1e-6
    )
  values = edgc_jax.metrics(run.state)
  assert (values["wire_bytes"], values["rank"]) == (4 * 8, 0)
  chex.assert_tree_all_finite(values)
  tx = edgc(matrix_view=lambda path, shape: None, **OPTIONS)
  with pytest.warns(RuntimeWarning, match="`matrix_view`"):
    assert not jax.tree.leaves(tx.init(PARAMS).leaves)


def test_ranks_that_compress_nothing_are_left_out():
  """64 x 64 saves bytes up to rank 16: the reference rank is 16, not 32."""
  params = {"w": jnp.zeros((64, 64))}
  (part,) = edgc_jax.describe(float32.edgc(), params).parts
  assert part.ladder == (8, 12, 16)
  assert max(part.wire_bytes) < part.dense_bytes


@pytest.mark.slow
def test_float16_loses_nothing_to_rounding():
  params = {"w": jnp.zeros((32, 48), jnp.float16)}
  run, owed = BACKENDS["pmap"](float32.powersgd(2), params), 0.0
  for step in range(5):
    gradients = gradients_like(params, seed=step)
    updates = run.step(gradients)
    owed += np.asarray(gradients["w"], np.float64).mean(0)
    owed -= np.asarray(updates["w"][0], np.float64)
  np.testing.assert_allclose(run.residual()["w"].mean(0), owed, 1e-4, 1e-4)


@pytest.mark.slow
def test_float16_overflow_does_not_stay():
  """The residual keeps values beyond the range of float16."""
  params = {"w": jnp.zeros((32, 32), jnp.float16)}
  large = jnp.broadcast_to(4e4 * jnp.eye(32, dtype=jnp.float16), (4, 32, 32))
  large = large * jnp.array([1.0, 0.9, 1.1, 1.0], jnp.float16)[:, None, None]
  run = Pmap(float32.powersgd(1), params)
  for _ in range(12):
    updates = run.step({"w": large})
    chex.assert_tree_all_finite((updates, run.residual()))
  assert edgc_jax.metrics(run.state)["skipped_steps"] == 0


@pytest.mark.slow
@pytest.mark.parametrize(
  "dtype, changes",
  [
    ("float32", {"estimator": "histogram"}),
    ("float64", {"allocation": "error"}),
  ],
)
def test_with_64_bits_enabled(dtype, changes):
  """State and wire stay float32, so a scan can carry the state."""
  with jax.enable_x64(True):
    params = {"w": jnp.zeros((32, 48), dtype)}
    options = OPTIONS | {"rank_max": 4, "window": 1, "step_rate": 1}
    run = Pmap(edgc(**(options | changes)), params)
    for step in range(3):
      updates = run.step(gradients_like(params, seed=step))
    chex.assert_trees_all_equal_dtypes(run.state, run.first_state)
    chex.assert_trees_all_equal_dtypes(updates, params)


@pytest.mark.slow
def test_a_state_made_eagerly_can_be_donated():
  tx = edgc_jax.skip_nonfinite(float32.edgc(rank_max=4))
  leaves = jax.tree.leaves(tx.init(PARAMS))
  pointers = {leaf.unsafe_buffer_pointer() for leaf in leaves}
  assert len(pointers) == len(leaves)
