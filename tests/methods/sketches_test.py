"""Sketched norms against exact norms."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from edgc_jax.leaves.leaf import Leaf
from edgc_jax.leaves.views import MatrixView
from edgc_jax.methods import sketches
from edgc_jax.methods.sketches import SKETCH_VALUES
from edgc_jax.reducer.rounds import Draws

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


def draws_of(shape, seed):
  """Draws the signs for a stack [k, m, n], along its smaller side and Q."""
  short, long = sorted(shape[1:])
  key = jax.random.key(seed)
  sign = lambda i, *shape: jax.random.rademacher(  # noqa: E731
    jax.random.fold_in(key, i), shape, jnp.float32
  )
  return Draws(key, sign(0, shape[0], 1, short), sign(1, shape[0], long), None)


def sketch_of(arrays, seed):
  """Sketches M - P Q^T of stacks with P on the smaller side."""
  stack, p, q = arrays
  draws = draws_of(stack.shape, seed)
  rows_p, rows_q = (jnp.swapaxes(x, 1, 2) for x in (p, q))
  u, v = draws.short, draws.long
  return jax.vmap(sketches.residual_sketch)(
    (u @ stack)[:, 0], rows_p, rows_q, u[:, 0], v
  )


@pytest.mark.parametrize(
  ("rows", "cols", "rank"), [(40, 64, 3), (40, 640, 2), (7, 12, 2)]
)
def test_the_mean_of_many_is_the_norm(rows, cols, rank):
  arrays, exact = stacks_of(rows, cols, rank)
  found = jax.vmap(lambda seed: sketch_of(arrays, seed))(jnp.arange(2000))
  assert found.shape == (2000, COUNT, SKETCH_VALUES)
  squares = sketches.squared(found.reshape(-1, SKETCH_VALUES), 0.5) / 4
  ratios = squares.reshape(2000, COUNT) / exact
  deviation = (2 / min(SKETCH_VALUES, cols)) ** 0.5
  # Five standard errors; narrow matrices deviate more, not less.
  np.testing.assert_allclose(ratios.mean(0), 1, atol=5 * deviation / 2000**0.5)
  assert np.std(ratios) < 1.3 * deviation


def test_sketches_average_as_the_residuals_do():
  """They give the norm of the mean, not the mean of the norms."""
  arrays, exact = stacks_of(40, 64, 3)
  stack, p, q = arrays
  rest = stack - p @ jnp.swapaxes(q, 1, 2)
  opposite = [p @ jnp.swapaxes(q, 1, 2) - rest, p, q]
  both = sketch_of(arrays, 0) + sketch_of(opposite, 0)
  scale = np.sqrt(exact)[:, None]
  np.testing.assert_allclose(both / scale, 0, atol=1e-4)


@pytest.mark.parametrize("shape", [(2, 24, 40), (2, 40, 24)])
def test_a_formed_residual_has_the_same_sketch(shape):
  """Also of a tall matrix, whose factors are those of its transpose."""
  arrays, _ = stacks_of(*sorted(shape[1:]), rank=3)
  m, p, q = (x[:2] for x in arrays)
  rest = m - p @ jnp.swapaxes(q, 1, 2)
  rest = jnp.swapaxes(rest, 1, 2) if shape[1] > shape[2] else rest
  leaf = Leaf("", shape, jnp.float32, MatrixView(*shape))
  draws = draws_of(shape, 5)
  np.testing.assert_allclose(
    sketches.sketch(leaf, rest, draws),
    sketch_of([m, p, q], 5),
    rtol=1e-3,
    atol=1e-3,
  )
