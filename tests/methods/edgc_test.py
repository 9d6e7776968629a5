"""Ranks and metrics of `edgc` for scripted gradients."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import float32
from helpers.flat_options import edgc
from helpers.meshes import BACKENDS, find, gradients_like, traced_once

import edgc_jax

# Scales change from window to window, without an announcement.
pytestmark = pytest.mark.filterwarnings("ignore:The entropy of the gradients")

PARAMS = {"w": jnp.zeros((64, 128)), "b": jnp.zeros((8,))}
# The published method: dense warm-up, one rank for a stage.
OPTIONS = {
  "rank_max": 12,
  "rank_min": 4,
  "window": 4,
  "warmup_steps": 4,
  "max_warmup_steps": 4,
  "step_rate": 0.5,
  "entry_rate": 1.0,
  "warmup_rank": None,
  "allocation": "uniform",
}
GAUSSIAN = 0.5 * np.log(2 * np.pi * np.e)


@functools.cache
def run_of(backend, **options):
  """Returns a run, compiled once for all tests."""
  return BACKENDS[backend](traced_once(edgc(**(OPTIONS | options))), PARAMS)


def drive(backend, scales, **options):
  """Runs one window for each scale; returns the run and all metrics."""
  run, values = run_of(backend, **options), []
  run.state = run.first_state
  for step in range(4 * len(scales)):
    scale = scales[step // 4]
    run.step(gradients_like(PARAMS, seed=step, scale=scale))
    values.append(edgc_jax.metrics(run.state))
  return run, values


@pytest.mark.parametrize("backend", [*BACKENDS])
@pytest.mark.slow
def test_visits_every_rank_in_one_trace(backend):
  # Both changes of the scale, down and up, span the whole ladder.
  scales = [1.0, 0.2, 0.2, 0.2, 1.1, 1.1, 1.1]
  _, values = drive(backend, scales)
  ranks = [v["rank"] for v in values]
  assert ranks[::4] == [0, 12, 8, 4, 4, 8, 12]
  for window in range(len(scales)):
    assert len(set(ranks[4 * window : 4 * window + 4])) == 1


@pytest.mark.slow
def test_entropy_is_of_the_local_gradient():
  """It is measured in nats before error feedback, every second step."""
  _, values = drive("pmap", [1.0, 0.2, 0.2])
  for step, value in enumerate(values):
    scale = 1.0 if step < 4 else 0.2
    expected = GAUSSIAN + np.log(scale)
    assert abs(value["entropy"] - expected) <= 0.02
  entropies = [v["entropy"] for v in values]
  np.testing.assert_array_equal(entropies[::2], entropies[1::2])


def test_predicted_error_is_near_the_measured_one():
  """The model holds for independent entries.

  One power step is not the best rank-r approximation, and error feedback
  flattens the spectrum: the measured error is larger.
  """
  _, values = drive("pmap", [1.0] * 3)
  last = values[-1]
  assert last["rank"] == 12
  assert (
    last["predicted_error"]
    <= last["relative_error"]
    <= 1.35 * last["predicted_error"]
  )
  assert values[0]["predicted_error"] == 0
  assert values[0]["relative_error"] == 0


@pytest.mark.parametrize("allocation", ["uniform", "error"])
def test_errors_are_predicted_from_the_first_step_on(allocation):
  """Before a window is measured, by the model of independent entries."""
  tx = edgc_jax.edgc(rank_max=16, total_steps=100, allocation=allocation)
  found = edgc_jax.metrics(tx.init({"w": jnp.zeros((64, 64))}))
  assert 0.3 <= found["predicted_error"] <= 0.5
  assert 0.3 <= found["matrix_predicted_error"]["w"][0] <= 0.5


@pytest.mark.slow
def test_linear_rule():
  scales = [1.0, 0.2, 0.2, 0.2, 0.04, 0.04]
  _, values = drive("pmap", scales, rule="linear", max_rank_step=8)
  assert [v["rank"] for v in values[::4]] == [0, 12, 12, 4, 4, 12]


@pytest.mark.parametrize(("warmup_rank", "first"), [("max", 12), (9, 8)])
@pytest.mark.slow
def test_compressed_warmup(warmup_rank, first):
  """Windows and H_ref stay the same: only the rank differs."""
  scales = [1.0, 0.2, 0.2, 0.2, 1.1]
  run, values = drive("pmap", scales, warmup_rank=warmup_rank)
  ranks = [v["rank"] for v in values]
  assert ranks[::4] == [first, 12, 8, 4, 4]
  reference = np.ravel(find(run.state).budget.reference_entropy)[0]
  assert abs(reference - GAUSSIAN) <= 0.02
  residual = run.residual()["w"]
  assert np.abs(residual).max() > 0


@pytest.mark.parametrize("allocation", ["uniform", "error"])
@pytest.mark.parametrize("backend", list(BACKENDS))
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
  assert values["wire_bytes"] == 4 * 8
  assert values["rank"] == 0
  chex.assert_tree_all_finite(values)


def test_excluded_by_view():
  view = lambda path, shape: None  # noqa: E731
  tx = edgc(matrix_view=view, **OPTIONS)
  with pytest.warns(RuntimeWarning, match="`matrix_view`"):
    assert not jax.tree.leaves(tx.init(PARAMS).leaves)


@pytest.mark.filterwarnings("ignore:Gradients of float")
@pytest.mark.slow
def test_float16_overflow_does_not_stay():
  """The residual keeps values beyond the range of float16."""
  params = {"w": jnp.zeros((32, 32), jnp.float16)}
  large = jnp.broadcast_to(4e4 * jnp.eye(32, dtype=jnp.float16), (4, 32, 32))
  large = large * jnp.array([1.0, 0.9, 1.1, 1.0], jnp.float16)[:, None, None]
  run = BACKENDS["pmap"](float32.powersgd(1), params)
  for _ in range(12):
    updates = run.step({"w": large})
    chex.assert_tree_all_finite((updates, run.residual()))
  assert edgc_jax.metrics(run.state)["skipped_steps"] == 0


@pytest.mark.filterwarnings("ignore:Gradients of float")
@pytest.mark.slow
def test_narrow_dtypes_lose_nothing_to_rounding():
  params = {
    dtype: jnp.zeros((32, 48), dtype) for dtype in ("bfloat16", "float16")
  }
  run = BACKENDS["pmap"](float32.powersgd(2), params)
  owed = dict.fromkeys(params, 0.0)
  for step in range(5):
    gradients = gradients_like(params, seed=step)
    updates = run.step(gradients)
    for dtype in params:
      owed[dtype] += np.asarray(gradients[dtype], np.float64).mean(0)
      owed[dtype] -= np.asarray(updates[dtype][0], np.float64)
  for dtype, residual in run.residual().items():
    np.testing.assert_allclose(residual.mean(0), owed[dtype], 1e-4, 1e-4)


@pytest.mark.filterwarnings("ignore:Gradients of float")
@pytest.mark.slow
@pytest.mark.parametrize(
  ("dtype", "changes"),
  [
    pytest.param("float32", {"estimator": "histogram"}, id="histogram"),
    pytest.param("float64", {"allocation": "error"}, id="by_error"),
  ],
)
def test_with_64_bits_enabled(dtype, changes):
  """State and wire stay float32, so a scan can carry the state."""
  with jax.enable_x64(True):
    params = {"w": jnp.zeros((32, 48), dtype)}
    options = OPTIONS | {"rank_max": 4, "window": 1, "step_rate": 1}
    run = BACKENDS["pmap"](edgc(**(options | changes)), params)
    for step in range(3):
      updates = run.step(gradients_like(params, seed=step))
    chex.assert_trees_all_equal_dtypes(run.state, run.first_state)
    chex.assert_trees_all_equal_dtypes(updates, params)


@pytest.mark.filterwarnings("ignore:Gradients of float")
@pytest.mark.slow
def test_a_state_made_eagerly_can_be_donated():
  tx = edgc_jax.skip_nonfinite(float32.edgc(rank_max=4))
  state = tx.init(PARAMS)
  leaves = jax.tree.leaves(state)
  pointers = {leaf.unsafe_buffer_pointer() for leaf in leaves}
  assert len(pointers) == len(leaves)


@pytest.mark.filterwarnings("ignore:Gradients of float")
@pytest.mark.slow
def test_ranks_that_compress_nothing_are_left_out():
  """64 x 64 saves bytes up to rank 16: the reference rank is 16, not 32."""
  params = {"w": jnp.zeros((64, 64))}
  tx = float32.edgc(
    window=2,
    warmup_steps=2,
    max_warmup_steps=2,
    sampling=edgc_jax.Sampling(step_rate=1),
    allocation="uniform",
  )
  run = BACKENDS["pmap"](tx, params)
  for step in range(3):
    run.step(gradients_like(params, seed=step))
  values = edgc_jax.metrics(run.state)
  assert values["rank"] == 16
  assert values["wire_bytes"] < values["dense_bytes"]
  assert values["predicted_error"] > 0.1
