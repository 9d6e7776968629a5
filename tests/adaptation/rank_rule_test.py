"""Ranks from entropies against exact decompositions."""

import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

from edgc_jax.adaptation import error_model, rank_rule
from edgc_jax.plan.plan import make_plan


def errors_of(shapes, rank_max, variance=None, min_ratio=0.0):
  """Returns ln G by rank for matrices of the given shapes."""
  tree = {str(i): jnp.zeros(s) for i, s in enumerate(shapes)}
  plan = make_plan(tree, (1, rank_max), min_ratio)
  table, sizes = error_model.loss_table(plan), plan.sizes
  if variance is None:
    variance = np.ones(len(sizes))
  return error_model.log_error(table, sizes, jnp.asarray(variance, jnp.float32))


class CqmTest(parameterized.TestCase):
  def test_constant_absolute_error_by_svd(self):
    """The exact rank is where a quieter matrix leaves the same error."""
    random = np.random.default_rng(0)
    drop, rank_max = 0.2, 64
    values = np.linalg.svd(random.standard_normal((192, 768)), compute_uv=False)
    tail = lambda s: np.append(np.cumsum((s**2)[::-1])[::-1], 0.0)  # noqa: E731
    allowed = tail(values)[rank_max]
    left = tail(values * np.exp(-drop))
    exact = np.interp(-allowed, -left, np.arange(len(left)))
    rank = rank_rule.cqm_rank(
      errors_of([(192, 768)], rank_max), rank_max, jnp.float32(-drop), 0.0
    )
    self.assertAlmostEqual(float(rank), exact, delta=0.5)
    self.assertAlmostEqual(float(rank), 31.9, delta=0.1)
    other = rank_rule.cqm_rank(
      errors_of([(192, 768)], rank_max), rank_max, jnp.float32(-drop), 0.0, 1.0
    )
    self.assertAlmostEqual(float(other), 48.5, delta=0.1)

  @parameterized.parameters((512, 2048, 32), (96, 96, 64), (64, 4096, 48))
  def test_inverts_the_model(self, rows, cols, rank_max):
    errors = errors_of([(rows, cols)], rank_max)
    for rank in range(1, rank_max + 1):
      # The entropy at which this very rank keeps the error.
      entropy = 0.5 * (errors[rank_max] - errors[rank])
      found = rank_rule.cqm_rank(errors, rank_max, entropy, 0.0)
      self.assertAlmostEqual(float(found), rank, delta=0.01)

  def test_falls_with_entropy_and_saturates(self):
    errors = errors_of([(64, 128), (128, 64), (32, 32)], 24)
    ranks = [
      float(rank_rule.cqm_rank(errors, 24, jnp.float32(h), 0.0))
      for h in np.linspace(-3, 1, 50)
    ]
    self.assertTrue(np.all(np.diff(ranks) >= 0))
    self.assertEqual((ranks[0], ranks[-1]), (0.0, 24.0))

  def test_error_of_several_shapes_is_their_sum(self):
    shapes, variance = [(64, 128), (32, 32)], [0.5, 3.0]
    both = np.exp(errors_of(shapes, 8, variance))
    single = [
      np.exp(errors_of([shape], 8, [v]))
      for shape, v in zip(shapes, variance, strict=True)
    ]
    np.testing.assert_allclose(both, sum(single), rtol=1e-5)
    self.assertAlmostEqual(both[0], 64 * 128 * 0.5 + 32 * 32 * 3.0, delta=0.1)

  def test_a_dense_shape_loses_nothing(self):
    """At ratio 2, 32 x 32 is dense above rank 8; 64 x 128 is not."""
    small = np.exp(errors_of([(32, 32)], 12, min_ratio=0.0))
    mixed = [(32, 32), (64, 128)]
    with_gate = np.exp(errors_of(mixed, 12, min_ratio=2.0))
    without = np.exp(errors_of(mixed, 12, min_ratio=0.0))
    np.testing.assert_allclose(with_gate[:9], without[:9], rtol=1e-5)
    np.testing.assert_allclose(
      without[9:] - with_gate[9:], small[9:], rtol=1e-3
    )


class LinearTest(parameterized.TestCase):
  @parameterized.parameters(
    (-5.0, -5.0, 8.0), (-5.5, -5.0, 20.0), (-4.0, -5.0, 32.0)
  )
  def test_in_proportion_to_the_first_change(self, entropy, previous, rank):
    found = rank_rule.linear_rank(
      8, 32, jnp.float32(entropy), jnp.float32(previous), jnp.float32(-1.0)
    )
    self.assertAlmostEqual(float(found), rank, places=5)

  def test_a_first_change_of_0_gives_rank_max(self):
    found = rank_rule.linear_rank(8, 32, *map(jnp.float32, (-5, -4, 0)))
    self.assertEqual(float(found), 32)


class RoundToLadderTest(parameterized.TestCase):
  def test_always_allowed_and_never_far(self):
    random = np.random.default_rng(0)
    for ranks, step in (((8, 12, 16, 20), 4), ((4, 8, 12), 8), ((5,), 4)):
      for _ in range(100):
        wish = jnp.float32(random.uniform(-5, 40))
        current = random.integers(len(ranks))
        index = int(
          rank_rule.round_to_ladder(wish, jnp.int32(current), ranks, step)
        )
        self.assertIn(index, range(len(ranks)))
        self.assertLessEqual(abs(ranks[index] - ranks[current]), step)
        step_up = ranks[1] - ranks[0] if len(ranks) > 1 else 1
        if index == current and wish >= ranks[index] - step_up / 2:
          continue  # not left for so little
        if ranks[0] <= wish and abs(wish - ranks[current]) < step:
          self.assertLessEqual(ranks[index], float(wish) + 1e-3)


if __name__ == "__main__":
  absltest.main()
