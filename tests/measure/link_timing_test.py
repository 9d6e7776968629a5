"""Fits of made-up link times are exact; real measurements are sane."""

import functools
import re
from unittest import mock

import jax.numpy as jnp
import numpy as np
import pytest
from helpers.meshes import mesh_of
from jax.sharding import AxisType
from numpy.testing import assert_allclose, assert_array_equal

from edgc_jax.measure import hlo, timing

near = functools.partial(pytest.approx, rel=0, abs=5e-6)

SIZES = (2**12, 2**16, 2**20)


def fake_link(seconds, alone=1e-3):
  """Replaces the clock: any call gives these medians of one all-reduce.

  Args:
    seconds: The medians.
    alone: What the first call takes; a long one is not chained.
  """
  chained = timing._CHAINED if alone < timing._LONG else 1
  times = chained * np.array(seconds, float)
  return mock.patch.multiple(
    timing,
    medians=lambda calls, repeats: times,
    _seconds=lambda mesh, call: alone,
  )


def measured(seconds, sizes=SIZES, **options):
  with fake_link(seconds, **options):
    return timing.measure_link(mesh_of(), "data", list(sizes))


@pytest.mark.parametrize(
  "latency, bandwidth", [(3e-5, 2e9), (1e-3, 1e8), (0.0, 5e10)]
)
def test_recovers_a_line(latency, bandwidth):
  link = measured([latency + size / bandwidth for size in SIZES])
  assert link.latency / (latency or 1) == near(float(latency > 0))
  assert link.bandwidth / bandwidth == near(1)
  assert link.r_squared == near(1)
  hash(link)


def test_long_latencies_are_not_paid_eight_times():
  make = mock.patch.object(timing, "_all_reduces", wraps=timing._all_reduces)
  with make as made:
    link = measured([0.2 + size / 1e7 for size in SIZES], alone=0.2)
  chains = [call.args[-1] for call in made.call_args_list]
  assert chains == [1] * (1 + len(SIZES))
  assert link.latency == near(0.2)
  assert link.bandwidth / 1e7 == near(1)


def test_fits_what_the_processes_agreed_on():
  agreed = np.array([1e-3 + size / 1e8 for size in SIZES])
  with mock.patch.object(timing, "agree", lambda mesh, seconds: agreed):
    link = measured([1.0, 2.0, 3.0])
  assert link.latency == pytest.approx(1e-3, rel=0, abs=5e-10)


def test_small_sizes_weigh_as_much():
  """10 % more at the largest size must not swamp the latency."""
  times = np.array([1e-5 + size / 1e8 for size in SIZES])
  times[-1] *= 1.1
  link = measured(times)
  assert link.latency == pytest.approx(1e-5, rel=0, abs=0.3e-5)
  assert 0.9 <= link.r_squared <= 0.9999


def test_no_negative_latency():
  """The line is through the origin: least squares of errors in seconds."""
  seconds, sizes = np.array([1e-5, 1.2e-3]), np.array([2**16, 2**20])
  link = measured(seconds, sizes.tolist())
  assert link.latency == 0.0
  per_byte = np.sum(sizes * seconds) / np.sum(sizes.astype(float) ** 2)
  assert_allclose(link.bandwidth, 1 / per_byte, rtol=1e-5)


@pytest.mark.parametrize(
  "times, larger",
  [
    # Of 4 hosts at 10 and 100 Mbit/s, with round trips of 50 ms.
    ({2**16: 0.307, 2**20: 1.336, 2**22: 5.447}, (2**23, 11.02)),
    ({2**16: 0.309, 2**20: 0.373, 2**23: 1.294}, (43_180_032, 5.87)),
  ],
)
def test_a_long_link(times, larger):
  """No line fits; one that is right at both ends predicts larger sizes."""
  link = measured(list(times.values()), times)
  for size, seconds in (larger, (2**16, times[2**16])):
    assert_allclose(link.seconds(size), seconds, rtol=0.08)


@pytest.mark.parametrize(
  "seconds",
  [
    [2e-3, 1.5e-3, 1e-3],
    [3e-3, 3e-3, 1e-3],
    [2**-10] * 3,  # the fit's own rounding gives a slope above 0
  ],
)
def test_noise(seconds):
  expected = SIZES[-1] / seconds[-1]
  message = f"latency 0 and the bandwidth of the largest, {expected:.4g} "
  with pytest.warns(RuntimeWarning, match=re.escape(message)):
    link = measured(seconds)
  assert (link.latency, link.r_squared) == (0.0, 0.0)
  assert_allclose(link.bandwidth, expected, rtol=1e-6)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of noise
@pytest.mark.parametrize(
  "axis_type, shape", [(AxisType.Auto, (8,)), (AxisType.Explicit, (2, 4))]
)
def test_real(axis_type, shape):
  link = timing.measure_link(
    mesh_of(shape, axis_type), "data", SIZES, repeats=3
  )
  assert link.bandwidth > 0
  assert np.isfinite([link.latency, link.bandwidth]).all()
  assert link.r_squared <= 1


def test_program():
  """It is one all-reduce in a loop, over groups along the axis."""
  call = timing._all_reduces(mesh_of(), "data", 1000, 5)
  # x <- mean(x) + x_0 from x = x_0 = 1.
  assert_array_equal(call(), np.full(4 * 1000, 1.0 + 5))
  text = call.func.lower(*call.args).compile().as_text()
  (line,) = [x for x in text.splitlines() if " all-reduce(" in x]
  assert "f32[1000]" in line
  assert hlo.groups_of(line) == [[0, 1, 2, 3], [4, 5, 6, 7]]
  assert "while" in text
  # Over several axes.
  call = timing._all_reduces(mesh_of(), ("stage", "data"), 100, 1)
  assert_array_equal(call(), np.full(8 * 100, 2.0))


@pytest.mark.parametrize(
  "durations, budget, many, repeats",
  [
    ((1, 4, 16), 300.0, 3, 10), ((1, 4, 16), 200.0, 3, 5),
    ((1, 4, 16), 40.0, 2, 4), ((1, 4, 16), 1.0, 2, 2),
    # Most of it latency.
    ((10, 11, 15), 250.0, 3, 2), ((10, 11, 15), 200.0, 2, 5),
  ],
)  # fmt: skip
def test_calls_within_a_budget(durations, budget, many, repeats):
  """Each has four runs in addition to its repeats."""
  clock, made = [0.0], []

  def call(seconds):
    clock[0] += seconds
    return jnp.zeros(())

  calls = (made.append(s) or functools.partial(call, s) for s in durations)
  with mock.patch.object(timing.time, "perf_counter", lambda: clock[0]):
    found = timing._affordable(mesh_of(), calls, [100, 400, 1600], 10, budget)
  assert (len(found[0]), found[1]) == (many, repeats)
  assert len(made) == many


def test_threads_are_checked():
  with (
    mock.patch.dict("os.environ", NPROC="2"),
    pytest.raises(RuntimeError, match="NPROC"),
  ):
    timing.measure_link(mesh_of())
