"""Fits of made-up times are exact; real measurements are sane."""

import functools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.meshes import factors, mesh_of
from jax.sharding import AxisType
from numpy.testing import assert_allclose, assert_array_equal

from edgc_jax.measure import timing

PARAMS = {
  "bias": jnp.zeros((40,)),
  "kernel": jax.ShapeDtypeStruct((2, 96, 128), jnp.bfloat16),
  "scale": jnp.zeros(()),
}


def fake_times(seconds):
  """Replaces the clock: any calls give these medians."""
  return mock.patch.object(
    timing, "medians", lambda calls, repeats: np.array(seconds, float)
  )


@pytest.mark.parametrize(
  "seconds, base, per_rank",
  [
    ([1.0, 1.5, 2.5], 0.25, 0.0625),  # 0.5 at rank 4, 1.5 at rank 20
    ([1.0, 1.1, 2.5], 0.0, (4 * 0.1 + 20 * 1.5) / (4**2 + 20**2)),
    ([1.0, 2.0, 1.5], 0.75, 0.0),  # falls with rank
    ([1.0, 0.9, 0.8], 0.0, 0.0),  # faster than dense
  ],
)
def test_fit(seconds, base, per_rank):
  nothing = mock.patch.object(timing, "_update")
  with nothing, fake_times(seconds):
    found = timing.measure_compression(PARAMS, (4, 20))
  assert found.base == pytest.approx(base, rel=0, abs=5e-10)
  assert found.per_rank == pytest.approx(per_rank, rel=0, abs=5e-10)


@pytest.mark.slow
def test_real_compression():
  """It times dense first, then one update per rank, on each device."""
  medians, ranks, widths = timing.medians, [], []

  def spy(calls, repeats):
    for call in calls:
      updates, state = call()
      assert state.count == 2
      ranks.append(int(state.stats.rank))
      widths.append([q.shape for q in jax.tree.leaves(factors(state))])
      assert len(updates["kernel"].devices()) == len(jax.devices())
      assert updates["kernel"].is_fully_replicated
      assert updates["kernel"].dtype == jnp.bfloat16
    return medians(calls, repeats)

  view = lambda _, shape: (1, 192, 128) if len(shape) == 3 else None  # noqa: E731
  with mock.patch.object(timing, "medians", spy):
    found = timing.measure_compression(
      PARAMS, (4, 36), repeats=3, matrix_view=view
    )
  assert ranks == [0, 4, 36]
  # Computed at three times the rank, and at most at min_ratio.
  assert widths == [[], [(1, 12, 192)], [(1, 38, 192)]]
  assert min(found.base, found.per_rank) >= 0
  assert 0 <= found.seconds(36) <= 10


def test_real_backward():
  """Tokens have no gradient."""
  stage_fn = lambda p, x: jnp.tanh(x @ p["w"])  # noqa: E731
  params, inputs = {"w": jnp.ones((64, 64))}, jnp.ones((16, 64))
  assert timing.measure_backward(stage_fn, params, inputs, repeats=3) > 0
  embed = lambda p, x: p["w"][x]  # noqa: E731
  tokens = jnp.arange(16)
  assert timing.measure_backward(embed, params, tokens, repeats=3) > 0


def test_gradients_of_both_are_computed():
  def run(calls, repeats):
    assert repeats == 7
    of_params, of_inputs = calls[0]()
    assert_allclose(of_params, 4.0)
    assert_allclose(of_inputs, 3.0)
    return np.array([0.25])

  with mock.patch.object(timing, "medians", run):
    found = timing.measure_backward(
      lambda p, x: p * x, jnp.float32(3.0), jnp.float32(4.0), repeats=7
    )
  assert found == 0.25


def test_calls_alternate_and_first_runs_do_not_count():
  log, clock = [], [0.0]
  # First runs are slow, then 1, 2, 9 seconds and 3, 1, 1.
  costs = {"a": [50.0, 50.0, 1.0, 2.0, 9.0], "b": [50.0, 50.0, 3.0, 1.0, 1.0]}

  def call(name):
    log.append(name)
    clock[0] += costs[name][log.count(name) - 1]
    return jnp.zeros(())

  calls = [functools.partial(call, name) for name in "ab"]
  with mock.patch.object(timing.time, "perf_counter", lambda: clock[0]):
    found = timing.medians(calls, 3)
  assert_array_equal(found, [2.0, 1.0])
  assert "".join(log) == "ab" * 5


def test_mean_over_the_mesh():
  for axis_type in (AxisType.Auto, AxisType.Explicit):
    found = timing.agree(mesh_of(axis_type=axis_type), np.array([0.5, 3.0]))
    assert_array_equal(found, [0.5, 3.0])
    assert found.dtype == np.float64
