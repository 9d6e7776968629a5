"""Ranks from entropies against exact decompositions."""

import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

from edgc_jax.budget import error_model
from edgc_jax.budget.rules import Window, cqm, round_to_ladder
from edgc_jax.leaves.leaf import leaves_in
from edgc_jax.methods.low_rank import with_factors


def errors_of(shapes, rank_max, variance=None, min_ratio=0.0):
  """Returns ln G by rank for matrices of the given shapes."""
  tree = {f"{i:02}": jnp.zeros(shape) for i, shape in enumerate(shapes)}
  matrices = with_factors(leaves_in(tree), (1, rank_max), min_ratio, None)
  table = error_model.loss_table(matrices, rank_max)
  sizes = np.array([leaf.size for leaf in matrices], np.float32)
  if variance is None:
    variance = np.ones(len(sizes))
  return error_model.log_error(table, sizes, jnp.asarray(variance, jnp.float32))


def rank_for(errors, entropy, **options):
  """Returns the rank of the rule, with a reference entropy of 0."""
  zero = jnp.zeros(())
  window = Window(
    entropy=jnp.float32(entropy),
    previous=zero,
    reference=zero,
    first=zero,
    first_change=zero,
    errors=errors,
    rank_min=1,
    rank_max=len(errors) - 1,
  )
  return float(cqm(window, **options))


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
    errors = errors_of([(192, 768)], rank_max)
    rank = rank_for(errors, -drop)
    self.assertAlmostEqual(rank, exact, delta=0.5)
    self.assertAlmostEqual(rank, 31.9, delta=0.1)
    other = rank_for(errors, -drop, exponent=1.0)
    self.assertAlmostEqual(other, 48.5, delta=0.1)

  @parameterized.parameters((512, 2048, 32), (96, 96, 64), (64, 4096, 48))
  def test_inverts_the_model(self, rows, cols, rank_max):
    errors = errors_of([(rows, cols)], rank_max)
    for rank in range(1, rank_max + 1):
      # The entropy at which this very rank keeps the error.
      entropy = 0.5 * (errors[rank_max] - errors[rank])
      self.assertAlmostEqual(rank_for(errors, entropy), rank, delta=0.01)

  def test_only_the_change_since_the_reference_counts(self):
    errors = errors_of([(64, 128)], 24)
    window = Window(
      entropy=jnp.float32(-5.1),
      previous=jnp.float32(8.0),
      reference=jnp.float32(-5.0),
      first=jnp.float32(7.0),
      first_change=jnp.float32(-6.0),
      errors=errors,
      rank_min=9,
      rank_max=24,
    )
    rank = float(cqm(window))
    self.assertAlmostEqual(rank, rank_for(errors, -0.1), places=3)
    self.assertBetween(rank, 1, 23)

  def test_falls_with_entropy_and_saturates(self):
    errors = errors_of([(64, 128), (128, 64), (32, 32)], 24)
    ranks = [rank_for(errors, h) for h in np.linspace(-3, 1, 50)]
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

  def test_a_capped_shape_loses_what_it_loses_at_its_cap(self):
    """At ratio 2, 32 x 32 has at most 8 columns; 64 x 128 has up to 21."""
    small = np.exp(errors_of([(32, 32)], 12, min_ratio=0.0))
    mixed = [(32, 32), (64, 128)]
    with_cap = np.exp(errors_of(mixed, 12, min_ratio=2.0))
    without = np.exp(errors_of(mixed, 12, min_ratio=0.0))
    np.testing.assert_allclose(with_cap[:9], without[:9], rtol=1e-5)
    np.testing.assert_allclose(
      with_cap[9:] - without[9:], small[8] - small[9:], rtol=1e-3
    )


class RoundToLadderTest(parameterized.TestCase):
  def test_a_rule_that_finds_no_number_keeps_the_rank(self):
    for current in range(4):
      index = round_to_ladder(
        jnp.float32(jnp.nan), jnp.int32(current), (8, 12, 16, 20), 4
      )
      self.assertEqual(int(index), current)

  def test_always_allowed_and_never_far(self):
    random = np.random.default_rng(0)
    for ranks, step in (((8, 12, 16, 20), 4), ((4, 8, 12), 8), ((5,), 4)):
      for _ in range(100):
        wish = jnp.float32(random.uniform(-5, 40))
        current = random.integers(len(ranks))
        index = int(round_to_ladder(wish, jnp.int32(current), ranks, step))
        self.assertIn(index, range(len(ranks)))
        self.assertLessEqual(abs(ranks[index] - ranks[current]), step)
        step_up = ranks[1] - ranks[0] if len(ranks) > 1 else 1
        if index == current and wish >= ranks[index] - step_up / 2:
          continue  # not left for so little
        if ranks[0] <= wish and abs(wish - ranks[current]) < step:
          self.assertLessEqual(ranks[index], float(wish) + 1e-3)


if __name__ == "__main__":
  absltest.main()
