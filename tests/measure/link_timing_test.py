"""Fits of made-up link times are exact; real measurements are sane."""

import contextlib
import functools
import re
import warnings
from unittest import mock

import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized
from helpers.meshes import mesh_of
from jax.sharding import AxisType

from edgc_jax.measure import hlo, timing

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


@contextlib.contextmanager
def noise_allowed():
  with warnings.catch_warnings():
    warnings.simplefilter("ignore", RuntimeWarning)
    yield


class LinkTest(parameterized.TestCase):
  @parameterized.parameters((3e-5, 2e9), (1e-3, 1e8), (0.0, 5e10))
  def test_recovers_a_line(self, latency, bandwidth):
    with fake_link([latency + size / bandwidth for size in SIZES]):
      link = timing.measure_link(mesh_of(), "data", SIZES)
    self.assertAlmostEqual(link.latency / (latency or 1), bool(latency), 5)
    self.assertAlmostEqual(link.bandwidth / bandwidth, 1, places=5)
    self.assertAlmostEqual(link.r_squared, 1, places=5)
    hash(link)

  def test_long_latencies_are_not_paid_eight_times(self):
    latency, bandwidth = 0.2, 1e7
    seconds = [latency + size / bandwidth for size in SIZES]
    chains, make = [], timing._all_reduces
    with (
      fake_link(seconds, alone=latency),
      mock.patch.object(
        timing,
        "_all_reduces",
        lambda *args: chains.append(args[-1]) or make(*args),
      ),
    ):
      link = timing.measure_link(mesh_of(), "data", SIZES)
    self.assertEqual(chains, [1] * (1 + len(SIZES)))
    self.assertAlmostEqual(link.latency, latency, 5)
    self.assertAlmostEqual(link.bandwidth / bandwidth, 1, places=5)

  def test_fits_what_the_processes_agreed_on(self):
    agreed = np.array([1e-3 + size / 1e8 for size in SIZES])
    with (
      fake_link([1.0, 2.0, 3.0]),
      mock.patch.object(timing, "agree", lambda mesh, seconds: agreed),
    ):
      link = timing.measure_link(mesh_of(), "data", SIZES)
    self.assertAlmostEqual(link.latency, 1e-3, places=9)

  def test_small_sizes_weigh_as_much(self):
    """10 % more at the largest size must not swamp the latency."""
    times = np.array([1e-5 + size / 1e8 for size in SIZES])
    times[-1] *= 1.1
    with fake_link(times):
      link = timing.measure_link(mesh_of(), "data", SIZES)
    self.assertAlmostEqual(link.latency, 1e-5, delta=0.3e-5)
    self.assertBetween(link.r_squared, 0.9, 0.9999)

  def test_no_negative_latency(self):
    """The line is through the origin: least squares of errors in seconds."""
    seconds, sizes = np.array([1e-5, 1.2e-3]), np.array([2**16, 2**20])
    with fake_link(seconds):
      link = timing.measure_link(mesh_of(), "data", sizes.tolist())
    self.assertEqual(link.latency, 0.0)
    per_byte = np.sum(sizes * seconds) / np.sum(sizes.astype(float) ** 2)
    np.testing.assert_allclose(link.bandwidth, 1 / per_byte, rtol=1e-5)

  @parameterized.parameters(
    # Of 4 hosts at 10 and 100 Mbit/s, with round trips of 50 ms.
    ({2**16: 0.307, 2**20: 1.336, 2**22: 5.447}, (2**23, 11.02)),
    ({2**16: 0.309, 2**20: 0.373, 2**23: 1.294}, (43_180_032, 5.87)),
  )
  def test_a_long_link(self, times, larger):
    """No line fits; one that is right at both ends predicts larger sizes."""
    with fake_link(list(times.values())):
      link = timing.measure_link(mesh_of(), "data", list(times))
    size, seconds = larger
    np.testing.assert_allclose(link.seconds(size), seconds, rtol=0.08)
    np.testing.assert_allclose(link.seconds(2**16), times[2**16], rtol=0.08)

  @parameterized.parameters(
    ([2e-3, 1.5e-3, 1e-3],),
    ([3e-3, 3e-3, 1e-3],),
    ([2**-10] * 3,),  # the fit's own rounding gives a slope above 0
  )
  def test_noise(self, seconds):
    expected = SIZES[-1] / seconds[-1]
    message = f"latency 0 and the bandwidth of the largest, {expected:.4g} "
    message = re.escape(message)
    with fake_link(seconds), self.assertWarnsRegex(RuntimeWarning, message):
      link = timing.measure_link(mesh_of(), "data", SIZES)
    self.assertEqual((link.latency, link.r_squared), (0.0, 0.0))
    np.testing.assert_allclose(link.bandwidth, expected, rtol=1e-6)

  @parameterized.product(
    axis_type=[AxisType.Auto, AxisType.Explicit], shape=[(8,), (2, 4)]
  )
  def test_real(self, axis_type, shape):
    with noise_allowed():
      link = timing.measure_link(
        mesh_of(shape, axis_type), "data", SIZES, repeats=3
      )
    self.assertGreater(link.bandwidth, 0)
    self.assertTrue(np.isfinite([link.latency, link.bandwidth]).all())
    self.assertLessEqual(link.r_squared, 1)

  def test_several_axes(self):
    mesh = mesh_of((2, 4))
    call = timing._all_reduces(mesh, tuple(mesh.axis_names), 100, 1)
    np.testing.assert_array_equal(call(), np.full(8 * 100, 2.0))
    with fake_link([0.001, 0.002, 0.003]):
      timing.measure_link(mesh, tuple(mesh.axis_names), SIZES)

  def test_program(self):
    """It is one all-reduce in a loop, over groups along the axis."""
    call = timing._all_reduces(mesh_of(), "data", 1000, 5)
    result = call()
    # x <- mean(x) + x_0 from x = x_0 = 1.
    np.testing.assert_array_equal(result, 1 + 5)
    self.assertEqual(result.shape, (4 * 1000,))
    text = call.func.lower(*call.args).compile().as_text()
    (line,) = [x for x in text.splitlines() if " all-reduce(" in x]
    self.assertIn("f32[1000]", line)
    groups = hlo.groups_of(line)
    self.assertEqual(groups, [[0, 1, 2, 3], [4, 5, 6, 7]])
    self.assertIn("while", text)

  @parameterized.parameters(
    ("axis_name", {"axis_name": "model"}),
    ("axis_name", {"axis_name": "stage"}),
    ("sizes", {"sizes": ()}),
    ("sizes", {"sizes": (1024,)}),
    ("sizes", {"sizes": (1024, 1024)}),
    ("sizes", {"sizes": (4, 5)}),
    ("sizes", {"sizes": (2, 1024)}),
    ("repeats", {"repeats": 0}),
  )
  def test_errors(self, name, options):
    with self.assertRaisesRegex(ValueError, f"`{name}` must be .*, got .*; "):
      timing.measure_link(mesh_of((1, 8)), **options)

  @parameterized.parameters(
    ((1, 4, 16), 300.0, 3, 10),
    ((1, 4, 16), 200.0, 3, 5),
    ((1, 4, 16), 100.0, 2, 10),
    ((1, 4, 16), 40.0, 2, 4),
    ((1, 4, 16), 1.0, 2, 2),
    ((10, 11, 15), 250.0, 3, 2),  # most of it latency
    ((10, 11, 15), 200.0, 2, 5),
  )
  def test_calls_within_a_budget(self, durations, budget, many, repeats):
    """Each has four runs in addition to its repeats."""
    clock, made = [0.0], []

    def call(seconds):
      clock[0] += seconds
      return jnp.zeros(())

    calls = (made.append(s) or functools.partial(call, s) for s in durations)
    with mock.patch.object(timing.time, "perf_counter", lambda: clock[0]):
      found = timing._affordable(mesh_of(), calls, [100, 400, 1600], 10, budget)
    self.assertEqual((len(found[0]), found[1]), (many, repeats))
    self.assertLen(made, many)

  def test_threads_are_checked(self):
    with (
      mock.patch.dict("os.environ", NPROC="2"),
      self.assertRaisesRegex(RuntimeError, "NPROC"),
    ):
      timing.measure_link(mesh_of())


if __name__ == "__main__":
  absltest.main()
