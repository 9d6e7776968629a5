"""Sketched norms against exact norms."""

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

from edgc_jax.compression import linear_algebra
from edgc_jax.plan.plan import SKETCH_VALUES

COUNT = 3


def stacks_of(rows, cols, rank, seed=0):
  """Returns M, P, Q and the exact squared norms of M - P Q^T."""
  random = np.random.default_rng(seed)
  p, q = (random.standard_normal((COUNT, side, rank)) for side in (rows, cols))
  scales = np.array([0.1, 1.0, 10.0])[:, None, None]
  rest = scales * random.standard_normal((COUNT, rows, cols))
  stack = p @ np.swapaxes(q, 1, 2) + rest
  arrays = [jnp.asarray(x, jnp.float32) for x in (stack, p, q)]
  return arrays, np.sum(rest**2, axis=(1, 2))


def sketch_of(arrays, seed):
  stack, p, q = arrays
  signs = linear_algebra.draw_signs(jax.random.key(seed), [stack.shape])
  row = signs[0][0] @ stack
  rows_p, rows_q = (jnp.swapaxes(x, 1, 2) for x in (p, q))
  return linear_algebra.residual_sketches(row, rows_p, rows_q, signs[0])


class SketchTest(parameterized.TestCase):
  @parameterized.parameters((40, 64, 3), (64, 40, 2), (12, 7, 2))
  def test_the_mean_of_many_is_the_norm(self, rows, cols, rank):
    arrays, exact = stacks_of(rows, cols, rank)
    sketches = jax.vmap(lambda seed: sketch_of(arrays, seed))(jnp.arange(2000))
    self.assertEqual(sketches.shape, (2000, COUNT, SKETCH_VALUES))
    ratios = np.sum(np.square(sketches), axis=2) / exact
    deviation = (2 / min(SKETCH_VALUES, cols)) ** 0.5
    # Five standard errors; narrow matrices deviate more, not less.
    np.testing.assert_allclose(
      ratios.mean(0), 1, atol=5 * deviation / 2000**0.5
    )
    self.assertLess(np.std(ratios), 1.3 * deviation)

  def test_sketches_average_as_the_residuals_do(self):
    """They give the norm of the mean, not the mean of the norms."""
    arrays, exact = stacks_of(40, 64, 3)
    stack, p, q = arrays
    rest = stack - p @ jnp.swapaxes(q, 1, 2)
    opposite = [p @ jnp.swapaxes(q, 1, 2) - rest, p, q]
    both = sketch_of(arrays, 0) + sketch_of(opposite, 0)
    scale = np.sqrt(exact)[:, None]
    np.testing.assert_allclose(both / scale, 0, atol=1e-4)

  def test_zero_residuals_have_zero_sketches(self):
    p = jnp.eye(8)[None]
    stack = jax.random.normal(jax.random.key(0), (1, 8, 20))
    z = sketch_of([stack, p, jnp.swapaxes(stack, 1, 2)], 3)
    np.testing.assert_allclose(z, 0, atol=1e-5)

  def test_no_matrices(self):
    self.assertEqual(linear_algebra.draw_signs(jax.random.key(0), []), [])


if __name__ == "__main__":
  absltest.main()
