"""edgc as a whole: scripted gradients in, ranks and numbers out."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import absltest, parameterized
from helpers.flat_options import edgc
from helpers.meshes import BACKENDS, gradients_like

import edgc_jax

# Scales that jump stand for entropies that do.
pytestmark = pytest.mark.filterwarnings("ignore:In .* windows the gradients")

PARAMS = {"w": jnp.zeros((64, 128)), "b": jnp.zeros((8,))}
# As published: dense warm-up, one rank for a stage.
OPTIONS = {
  "rank_max": 12, "rank_min": 4, "window": 4, "warmup_steps": 4,
  "max_warmup_steps": 4, "step_rate": 0.5, "entry_rate": 1.0,
  "warmup_rank": None, "granularity": "stage",
}  # fmt: skip
GAUSSIAN = 0.5 * np.log(2 * np.pi * np.e)


def drive(backend, scales, **options):
  """One window per scale of the gradients; metrics of every step."""
  run = backend(edgc(**(OPTIONS | options)), PARAMS)
  values = []
  for step in range(4 * len(scales)):
    scale = scales[step // 4]
    run.step(gradients_like(PARAMS, seed=step, scale=scale))
    values.append(edgc_jax.metrics(run.state))
  return run, values


class EdgcTest(parameterized.TestCase):
  def test_visits_every_rung_in_one_trace(self):
    # The step to a fifth is worth the whole ladder; so is the way back.
    scales = [1.0, 0.2, 0.2, 0.2, 1.1, 1.1, 1.1]
    for backend in BACKENDS.values():
      run, values = drive(backend, scales)
      ranks = [v["rank"] for v in values]
      self.assertEqual(ranks[::4], [0, 12, 8, 4, 4, 8, 12])
      for window in range(len(scales)):
        self.assertLen(set(ranks[4 * window : 4 * window + 4]), 1)
      self.assertEqual(run.traces, 1)

  def test_entropy_is_that_of_the_local_gradient(self):
    """Before error feedback, in nats, every second step, all through."""
    _, values = drive(BACKENDS["pmap"], [1.0, 0.2, 0.2])
    for step, value in enumerate(values):
      scale = 1.0 if step < 4 else 0.2
      expected = GAUSSIAN + np.log(scale)
      self.assertAlmostEqual(value["entropy"], expected, delta=0.02)
    entropies = [v["entropy"] for v in values]
    np.testing.assert_array_equal(entropies[::2], entropies[1::2])

  def test_predicted_error_is_near_the_measured_one(self):
    """On independent entries, where the model holds; one power step is not
    the best rank-r approximation, and error feedback flattens the spectrum:
    what is measured lies above."""
    _, values = drive(BACKENDS["pmap"], [1.0] * 3)
    last = values[-1]
    self.assertEqual(last["rank"], 12)
    self.assertBetween(
      last["relative_error"],
      last["predicted_error"],
      1.35 * last["predicted_error"],
    )
    self.assertEqual(values[0]["predicted_error"], 0)
    self.assertEqual(values[0]["relative_error"], 0)

  def test_linear_rule(self):
    scales = [1.0, 0.2, 0.2, 0.2, 0.04, 0.04]
    _, values = drive(BACKENDS["pmap"], scales, rule="linear", max_rank_step=8)
    self.assertEqual([v["rank"] for v in values[::4]], [0, 12, 12, 4, 4, 12])

  def test_warmup_paid_in_ranks(self):
    """The windows are the same, and so is H_ref: only the rung differs."""
    scales = [1.0, 0.2, 0.2, 0.2, 1.1]
    for warmup_rank, first in (("max", 12), (9, 8)):
      run, values = drive(BACKENDS["pmap"], scales, warmup_rank=warmup_rank)
      ranks = [v["rank"] for v in values]
      self.assertEqual(ranks[::4], [first, 12, 8, 4, 4])
      self.assertEqual(run.traces, 1)
      reference = np.ravel(run.state.controller.reference_entropy)[0]
      self.assertAlmostEqual(reference, GAUSSIAN, delta=0.02)
      residual = run.residual()["w"]
      self.assertGreater(np.abs(residual).max(), 0)

  @parameterized.parameters("stage", "matrix")
  def test_nothing_to_compress(self, granularity):
    """Vectors only: the reducer is an all-reduce, and says so."""
    params = {"b": jnp.zeros((8,))}
    tx = edgc(**OPTIONS | {"granularity": granularity})
    for backend in BACKENDS.values():
      with self.assertWarnsRegex(RuntimeWarning, "gradients are sent dense"):
        run = backend(tx, params)
      for step in range(6):
        gradients = gradients_like(params, seed=step)
        updates = run.step(gradients)
        np.testing.assert_allclose(
          updates["b"][0], np.mean(gradients["b"], 0), rtol=1e-6
        )
      values = edgc_jax.metrics(run.state)
      self.assertEqual(values["wire_bytes"], 4 * 8)
      chex.assert_tree_all_finite(values)

  def test_excluded_by_view(self):
    view = lambda path, shape: None  # noqa: E731
    tx = edgc(matrix_view=view, **OPTIONS)
    with self.assertWarnsRegex(RuntimeWarning, "`matrix_view`"):
      self.assertEmpty(jax.tree.leaves(tx.init(PARAMS).exchange))


@pytest.mark.filterwarnings("ignore:Gradients of float")
class DtypesTest(absltest.TestCase):
  def test_float16_overflow_does_not_stay(self):
    """What a float16 cannot hold is kept for later, and is finite."""
    params = {"w": jnp.zeros((32, 32), jnp.float16)}
    large = jnp.broadcast_to(4e4 * jnp.eye(32, dtype=jnp.float16), (4, 32, 32))
    large = large * jnp.array([1.0, 0.9, 1.1, 1.0], jnp.float16)[:, None, None]
    run = BACKENDS["pmap"](edgc_jax.powersgd(1), params)
    for _ in range(12):
      updates = run.step({"w": large})
      self.assertTrue(np.all(np.isfinite(updates["w"])))
      self.assertTrue(np.all(np.isfinite(run.residual()["w"])))
    self.assertEqual(edgc_jax.metrics(run.state)["skipped_steps"], 0)

  def test_narrow_dtypes_lose_nothing_to_rounding(self):
    for dtype in (jnp.bfloat16, jnp.float16):
      params = {"w": jnp.zeros((32, 48), dtype)}
      run = BACKENDS["pmap"](edgc_jax.powersgd(2), params)
      owed = np.zeros((32, 48))
      for step in range(5):
        gradients = gradients_like(params, seed=step)
        owed += np.asarray(gradients["w"], np.float64).mean(0)
        owed -= np.asarray(run.step(gradients)["w"][0], np.float64)
      np.testing.assert_allclose(run.residual()["w"].mean(0), owed, 1e-4, 1e-4)

  def test_with_64_bits_enabled(self):
    """State and wire stay float32, so a scan can carry the state."""
    with jax.enable_x64(True):
      for dtype, changes in (
        (jnp.float32, {"estimator": "histogram"}),
        (jnp.float64, {"granularity": "matrix", "curves": "energy"}),
        (jnp.float64, {"granularity": "matrix", "curves": "entropy"}),
        (jnp.float64, {"granularity": "matrix", "curves": "calibrated"}),
      ):
        with self.subTest(**changes):
          params = {"w": jnp.zeros((32, 48), dtype)}
          options = OPTIONS | {"rank_max": 4, "window": 1, "step_rate": 1}
          options |= changes
          run = BACKENDS["pmap"](edgc(**options), params)
          form = jax.tree.map(lambda x: x.dtype, run.state)
          for step in range(3):
            updates = run.step(gradients_like(params, seed=step))
          self.assertEqual(jax.tree.map(lambda x: x.dtype, run.state), form)
          self.assertEqual(updates["w"].dtype, dtype)

  def test_a_state_made_eagerly_can_be_donated(self):
    tx = edgc_jax.skip_nonfinite(edgc(rank_max=4))
    state = tx.init(PARAMS)
    leaves = jax.tree.leaves(state)
    pointers = {leaf.unsafe_buffer_pointer() for leaf in leaves}
    self.assertLen(pointers, len(leaves))

  def test_ranks_that_compress_nothing_are_left_out(self):
    """64 x 64 pays up to rank 16: that is the reference rank, not 32."""
    params = {"w": jnp.zeros((64, 64))}
    tx = edgc(
      window=2, warmup_steps=2, max_warmup_steps=2, step_rate=1,
      granularity="stage",
    )  # fmt: skip
    run = BACKENDS["pmap"](tx, params)
    for step in range(3):
      run.step(gradients_like(params, seed=step))
    values = edgc_jax.metrics(run.state)
    self.assertEqual(values["rank"], 16)
    self.assertLess(values["wire_bytes"], values["dense_bytes"])
    self.assertGreater(values["predicted_error"], 0.1)


if __name__ == "__main__":
  absltest.main()
