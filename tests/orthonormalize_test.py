"""Orthonormal or zero, whatever comes in; best columns first."""

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

from edgc_jax.orthonormalize import orthonormalize

ROWS, COLS = 200, 24


def spectrum(values, seed=0):
  """A matrix [ROWS, COLS] with given singular values."""
  random = np.random.default_rng(seed)
  u, _ = np.linalg.qr(random.standard_normal((ROWS, COLS)))
  v, _ = np.linalg.qr(random.standard_normal((COLS, COLS)))
  return (u * values) @ v.T


def gaussian(seed=0):
  return np.random.default_rng(seed).standard_normal((ROWS, COLS))


INPUTS = {
  "gaussian": (gaussian(), COLS),
  "conditioned_1e2": (spectrum(np.logspace(0, -2, COLS)), COLS),
  "conditioned_1e4": (spectrum(np.logspace(0, -4, COLS)), None),
  "rank_5": (gaussian()[:, :5] @ gaussian(1)[:5], 5),
  "rank_1": (np.outer(np.arange(ROWS), np.ones(COLS)), 1),
  "zero_columns": (gaussian() * (np.arange(COLS) % 2), COLS // 2),
  "tiny": (gaussian() * 1e-18, COLS),
  "denormal": (gaussian() * 1e-36, COLS),
  "huge": (gaussian() * 1e30, COLS),
  "zero": (np.zeros((ROWS, COLS)), 0),
}


class OrthonormalizeTest(parameterized.TestCase):
  @parameterized.named_parameters(
    (name, y, rank) for name, (y, rank) in INPUTS.items()
  )
  def test_orthonormal_or_zero(self, y, rank):
    p = jax.jit(orthonormalize)([jnp.asarray(y, jnp.float32)[None]])[0]
    p = np.asarray(p[0], np.float64)
    gram = p.T @ p
    live = np.diagonal(gram) > 0.5
    np.testing.assert_allclose(gram, np.diag(live * 1.0), 0, 2e-6)
    if rank is not None:
      self.assertEqual(live.sum(), rank)
    # Nothing of substance is outside the span.
    scale = max(np.abs(y).max(), 1e-300)
    rest = y / scale - p @ (p.T @ (y / scale))
    self.assertLess(
      np.linalg.norm(rest), 2e-3 * np.linalg.norm(y / scale) + 1e-30
    )

  def test_columns_come_sorted_by_energy(self):
    """The first k columns hold as much energy as any k directions can."""
    values = np.logspace(0, -2, COLS)
    y = spectrum(values)
    p = orthonormalize([jnp.asarray(y, jnp.float32)[None]])[0][0]
    held = np.linalg.norm(np.asarray(p).T @ y, axis=1)
    np.testing.assert_allclose(held, values, rtol=1e-3)

  def test_batches_of_many_shapes(self):
    stacks = [
      jnp.asarray(np.random.default_rng(i).standard_normal(shape), jnp.float32)
      for i, shape in enumerate(((2, 30, 4), (1, 50, 4), (3, 20, 7), (1, 9, 1)))
    ]
    for y, p in zip(stacks, orthonormalize(stacks), strict=True):
      self.assertEqual(y.shape, p.shape)
      alone = orthonormalize([y])[0]
      # Up to sign, which the eigenvectors leave open.
      project = lambda b: b @ jnp.swapaxes(b, 1, 2)  # noqa: E731
      np.testing.assert_allclose(project(p), project(alone), 0, 1e-5)

  def test_second_pass_is_needed(self):
    """One pass alone is far from orthonormal on a conditioned input."""
    from edgc_jax.orthonormalize import principal_columns

    y = jnp.asarray(spectrum(np.logspace(0, -2.9, COLS)), jnp.float32)[None]
    once = np.asarray(principal_columns([y])[0][0][0], np.float64)
    self.assertGreater(np.abs(once.T @ once - np.eye(COLS)).max(), 1e-4)


if __name__ == "__main__":
  absltest.main()
