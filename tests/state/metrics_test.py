"""`metrics` finds the reducer's state anywhere in a state."""

import warnings

import jax
import jax.numpy as jnp
import optax
from absl.testing import absltest, parameterized
from helpers import float32
from helpers.meshes import Pmap, gradients_like

import edgc_jax

PARAMS = {"w": jnp.zeros((16, 24))}
ALWAYS = {
  "rank", "wire_bytes", "dense_bytes", "compression_ratio",
  "relative_error", "residual_norm", "skipped_steps", "identical_gradients",
  "diverged_steps",
}  # fmt: skip
LOW_RANK = ALWAYS | {"matrix_rank", "matrix_error"}
EDGC = LOW_RANK | {
  "entropy", "predicted_error", "matrix_entropy", "matrix_predicted_error",
}  # fmt: skip


class MetricsTest(parameterized.TestCase):
  def test_keys(self):
    of = lambda tx: set(edgc_jax.metrics(tx.init(PARAMS)))  # noqa: E731
    self.assertEqual(of(edgc_jax.allreduce()), ALWAYS)
    self.assertEqual(of(float32.powersgd(2)), LOW_RANK)
    self.assertEqual(of(float32.edgc(rank_max=4)), EDGC)
    skipping = edgc_jax.skip_nonfinite(float32.powersgd(2))
    self.assertEqual(of(skipping), LOW_RANK | {"consecutive_skips"})

  @parameterized.named_parameters(
    ("chain", lambda tx: optax.chain(tx, optax.adam(1e-3))),
    ("named", lambda tx: optax.named_chain(("a", tx), ("b", optax.sgd(1.0)))),
    ("masked", lambda tx: optax.masked(tx, {"w": True})),
    ("multi_steps", lambda tx: optax.MultiSteps(tx, 2)),
    ("accumulate", lambda tx: edgc_jax.accumulate(tx, 2)),
    ("skip", lambda tx: edgc_jax.skip_nonfinite(optax.chain(tx))),
  )
  def test_found_inside(self, wrap):
    tx = wrap(float32.powersgd(2))
    values = edgc_jax.metrics(tx.init(PARAMS))
    self.assertEqual(values["dense_bytes"], 4 * 16 * 24)

  @parameterized.parameters(
    (optax.clip_by_global_norm(1.0), True),
    (optax.adam(1e-3), True),
    (edgc_jax.mean_over("fast"), False),
  )
  def test_a_link_before_the_reducer(self, link, warns):
    state = optax.chain(link, float32.powersgd(2), optax.sgd(1.0)).init(PARAMS)
    with warnings.catch_warnings(record=True) as caught:
      warnings.simplefilter("always")
      edgc_jax.metrics(state)
    texts = [str(warning.message) for warning in caught]
    self.assertEqual(any("Put the reducer first" in t for t in texts), warns)

  def test_python_scalars_from_a_stacked_state(self):
    run = Pmap(optax.chain(float32.powersgd(2), optax.sgd(1.0)), PARAMS)
    run.step(gradients_like(PARAMS, 0))
    values = edgc_jax.metrics(run.state)
    self.assertEqual(values.pop("matrix_rank"), {"w": [2]})
    self.assertAlmostEqual(
      values.pop("matrix_error")["w"][0], values["relative_error"]
    )
    for name, value in values.items():
      self.assertIsInstance(value, int | float, name)
    self.assertEqual(values["rank"], 2)
    self.assertBetween(values["relative_error"], 0.01, 1.0)

  def test_inside_a_compiled_function(self):
    state = float32.edgc(rank_max=4).init(PARAMS)
    inside = jax.jit(edgc_jax.metrics)(state)
    self.assertEqual(set(inside), set(edgc_jax.metrics(state)))

  def test_no_reducer(self):
    with self.assertRaisesRegex(ValueError, "exactly one reducer.*got 0"):
      edgc_jax.metrics(optax.adam(1e-3).init(PARAMS))


if __name__ == "__main__":
  absltest.main()
