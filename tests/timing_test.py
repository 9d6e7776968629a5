"""Fits of made-up times are exact; real measurements are sane."""

import contextlib
import functools
import re
import warnings
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized
from jax.sharding import AxisType

from edgc_jax import stopwatch, timing

SIZES = (2**12, 2**16, 2**20)
PARAMS = {
  "bias": jnp.zeros((40,)),
  "kernel": jax.ShapeDtypeStruct((2, 96, 128), jnp.bfloat16),
  "scale": jnp.zeros(()),
}


def mesh_of(shape=(2, 4), axis_type=AxisType.Auto):
  names = ("stage", "data")[-len(shape) :]
  return jax.make_mesh(
    shape,
    names,
    (axis_type,) * len(shape),
    devices=jax.devices()[: np.prod(shape)],
  )


def fake_times(seconds):
  """Replaces the clock: these medians, whatever is called."""
  return mock.patch.object(
    timing, "medians", lambda calls, repeats: np.array(seconds, float)
  )


def fake_link(seconds):
  """The same, in seconds of one all-reduce."""
  return fake_times(timing._CHAINED * np.array(seconds))


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

  def test_fits_what_the_processes_agreed_on(self):
    agreed = np.array([1e-3 + size / 1e8 for size in SIZES])
    with (
      fake_link([1.0, 2.0, 3.0]),
      mock.patch.object(timing, "agree", lambda mesh, seconds: agreed),
    ):
      link = timing.measure_link(mesh_of(), "data", SIZES)
    self.assertAlmostEqual(link.latency, 1e-3, places=9)

  def test_small_sizes_weigh_as_much(self):
    """A tenth more at the largest size must not swamp the latency."""
    times = np.array([1e-5 + size / 1e8 for size in SIZES])
    times[-1] *= 1.1
    with fake_link(times):
      link = timing.measure_link(mesh_of(), "data", SIZES)
    self.assertAlmostEqual(link.latency, 1e-5, delta=0.3e-5)
    self.assertBetween(link.r_squared, 0.9, 0.9999)

  def test_no_negative_latency(self):
    """Through the origin then: least squares of relative errors by hand."""
    seconds, sizes = np.array([1e-5, 1.2e-3]), np.array([2**16, 2**20])
    with fake_link(seconds):
      link = timing.measure_link(mesh_of(), "data", sizes.tolist())
    self.assertEqual(link.latency, 0.0)
    per_byte = np.sum(sizes / seconds) / np.sum((sizes / seconds) ** 2)
    np.testing.assert_allclose(link.bandwidth, 1 / per_byte, rtol=1e-5)

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

  @parameterized.parameters(AxisType.Auto, AxisType.Explicit)
  def test_real(self, axis_type):
    for shape in ((8,), (2, 4)):
      with noise_allowed():
        link = timing.measure_link(
          mesh_of(shape, axis_type), "data", SIZES, repeats=3
        )
      self.assertGreater(link.bandwidth, 0)
      self.assertTrue(np.isfinite([link.latency, link.bandwidth]).all())
      self.assertLessEqual(link.r_squared, 1)

  def test_what_is_timed(self):
    """One all-reduce in a loop, over groups along the axis, none dropped."""
    call = timing._all_reduces(mesh_of(), "data", 1000)
    result = call()
    # x <- mean(x) + x_0 from x = x_0 = 1.
    np.testing.assert_array_equal(result, 1 + timing._CHAINED)
    self.assertEqual(result.shape, (4 * 1000,))
    hlo = call.func.lower(*call.args).compile().as_text()
    (line,) = [x for x in hlo.splitlines() if " all-reduce(" in x]
    self.assertIn("f32[1000]", line)
    self.assertIn("{{0,1,2,3},{4,5,6,7}}", line)
    self.assertIn("while", hlo)

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

  def test_threads_are_checked(self):
    with (
      mock.patch.dict("os.environ", NPROC="2"),
      self.assertRaisesRegex(RuntimeError, "NPROC"),
    ):
      timing.measure_link(mesh_of())


class CompressionTest(parameterized.TestCase):
  @parameterized.parameters(
    ([1.0, 1.5, 2.5], 0.25, 0.0625),  # 0.5 at rank 4, 1.5 at rank 20
    ([1.0, 1.1, 2.5], 0.0, (4 * 0.1 + 20 * 1.5) / (4**2 + 20**2)),
    ([1.0, 2.0, 1.5], 0.75, 0.0),  # falls with rank
    ([1.0, 0.9, 0.8], 0.0, 0.0),  # faster than dense
    ([1.0, 0.5, 0.9], 0.0, 0.0),
  )
  def test_fit(self, seconds, base, per_rank):
    nothing = mock.patch.object(timing, "_update")
    with nothing, fake_times(seconds):
      found = timing.measure_compression(PARAMS, (4, 20))
    self.assertAlmostEqual(found.base, base, places=9)
    self.assertAlmostEqual(found.per_rank, per_rank, places=9)

  def test_real(self):
    """Dense first, then one update per rank, all on one device."""
    medians, ranks, factors = timing.medians, [], []

    def spy(calls, repeats):
      for call in calls:
        updates, state = call()
        self.assertEqual(state.count, 2)
        ranks.append(int(state.stats.rank))
        factors.append(
          [q.shape for q in jax.tree.leaves(state.exchange.factor_q)]
        )
        self.assertLen(updates["kernel"].devices(), 1)
        self.assertEqual(updates["kernel"].dtype, jnp.bfloat16)
      return medians(calls, repeats)

    view = lambda _, shape: (1, 192, 128) if len(shape) == 3 else None  # noqa: E731
    with mock.patch.object(timing, "medians", spy):
      found = timing.measure_compression(
        PARAMS, (4, 36), repeats=3, matrix_view=view
      )
    self.assertEqual(ranks, [0, 4, 36])
    # Computed at three times the rank, and at most at min_ratio.
    self.assertEqual(factors, [[], [(1, 128, 12)], [(1, 128, 38)]])
    self.assertGreaterEqual(min(found.base, found.per_rank), 0)
    self.assertBetween(found.seconds(36), 0, 10)

  @parameterized.parameters(
    ("ranks", {"ranks": (8,)}),
    ("ranks", {"ranks": (8, 8)}),
    ("ranks", {"ranks": (0, 8)}),
    ("repeats", {"repeats": 0}),
  )
  def test_errors(self, name, options):
    with self.assertRaisesRegex(ValueError, f"`{name}` must be .*, got .*; "):
      timing.measure_compression(PARAMS, **options)


class CodingTest(parameterized.TestCase):
  @parameterized.parameters(([1.0, 1.5], 0.5), ([1.0, 0.9], 0.0))
  def test_is_what_it_costs_more_than_dense(self, seconds, expected):
    nothing = mock.patch.object(timing, "_update")
    with nothing as made, fake_times(seconds):
      found = timing.measure_coding(PARAMS)
    self.assertAlmostEqual(found, expected)
    self.assertLen(made.mock_calls, 2)

  def test_real(self):
    self.assertBetween(timing.measure_coding(PARAMS, repeats=3), 0, 10)


class BackwardTest(parameterized.TestCase):
  def test_real(self):
    stage_fn = lambda p, x: jnp.tanh(x @ p["w"])  # noqa: E731
    params, inputs = {"w": jnp.ones((64, 64))}, jnp.ones((16, 64))
    self.assertGreater(
      timing.measure_backward(stage_fn, params, inputs, repeats=3), 0
    )
    # Tokens have no gradient.
    embed = lambda p, x: p["w"][x]  # noqa: E731
    tokens = jnp.arange(16)
    self.assertGreater(
      timing.measure_backward(embed, params, tokens, repeats=3), 0
    )

  def test_gradients_of_both_are_computed(self):
    def run(calls, repeats):
      self.assertEqual(repeats, 7)
      of_params, of_inputs = calls[0]()
      np.testing.assert_allclose(of_params, 4.0)
      np.testing.assert_allclose(of_inputs, 3.0)
      return np.array([0.25])

    with mock.patch.object(timing, "medians", run):
      found = timing.measure_backward(
        lambda p, x: p * x, jnp.float32(3.0), jnp.float32(4.0), repeats=7
      )
    self.assertEqual(found, 0.25)


class MediansTest(parameterized.TestCase):
  def test_in_turn_without_the_first_runs(self):
    log, clock = [], [0.0]
    # Slow at first, then 1, 2, 9 seconds and 3, 1, 1.
    costs = {"a": [50.0, 50.0, 1.0, 2.0, 9.0], "b": [50.0, 50.0, 3.0, 1.0, 1.0]}

    def call(name):
      log.append(name)
      clock[0] += costs[name][log.count(name) - 1]
      return jnp.zeros(())

    calls = [functools.partial(call, name) for name in "ab"]
    with mock.patch.object(stopwatch.time, "perf_counter", lambda: clock[0]):
      found = stopwatch.medians(calls, 3)
    np.testing.assert_array_equal(found, [2.0, 1.0])
    self.assertEqual("".join(log), "ab" * 5)


class AgreeTest(parameterized.TestCase):
  @parameterized.parameters(AxisType.Auto, AxisType.Explicit)
  def test_mean_over_the_mesh(self, axis_type):
    found = stopwatch.agree(mesh_of(axis_type=axis_type), np.array([0.5, 3.0]))
    np.testing.assert_array_equal(found, [0.5, 3.0])
    self.assertEqual(found.dtype, np.float64)


if __name__ == "__main__":
  absltest.main()
