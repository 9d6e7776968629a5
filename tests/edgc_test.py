"""edgc as a whole: scripted gradients in, ranks and numbers out."""

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest
from meshes import BACKENDS, gradients_like

import edgc_jax

PARAMS = {"w": jnp.zeros((64, 128)), "b": jnp.zeros((8,))}
OPTIONS = {
  "rank_max": 12, "rank_min": 4, "window": 4, "warmup_steps": 4,
  "max_warmup_steps": 4, "step_rate": 0.5, "entry_rate": 1.0,
}  # fmt: skip
GAUSSIAN = 0.5 * np.log(2 * np.pi * np.e)


def drive(backend, scales, **options):
  """One window per scale of the gradients; metrics of every step."""
  run = backend(edgc_jax.edgc(**(OPTIONS | options)), PARAMS)
  values = []
  for step in range(4 * len(scales)):
    scale = scales[step // 4]
    run.step(gradients_like(PARAMS, seed=step, scale=scale))
    values.append(edgc_jax.metrics(run.state))
  return run, values


class EdgcTest(absltest.TestCase):
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

  def test_nothing_to_compress(self):
    """Vectors only: the reducer is an all-reduce, and says so."""
    params = {"b": jnp.zeros((8,))}
    for backend in BACKENDS.values():
      with self.assertWarnsRegex(RuntimeWarning, "all gradients travel dense"):
        run = backend(edgc_jax.edgc(**OPTIONS), params)
      for step in range(6):
        gradients = gradients_like(params, seed=step)
        updates = run.step(gradients)
        np.testing.assert_allclose(
          updates["b"][0], np.mean(gradients["b"], 0), rtol=1e-6
        )
      values = edgc_jax.metrics(run.state)
      self.assertEqual(values["wire_bytes"], 4 * 8)
      for name, value in values.items():
        self.assertTrue(np.isfinite(value), name)

  def test_excluded_by_view(self):
    view = lambda path, shape: None  # noqa: E731
    tx = edgc_jax.edgc(matrix_view=view, **OPTIONS)
    with self.assertWarnsRegex(RuntimeWarning, "`matrix_view`"):
      self.assertEmpty(jax.tree.leaves(tx.init(PARAMS).low_rank))


if __name__ == "__main__":
  absltest.main()
