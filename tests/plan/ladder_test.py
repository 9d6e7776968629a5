"""Rank ladders, given or found."""

import jax.numpy as jnp
from absl.testing import absltest, parameterized

import edgc_jax
from edgc_jax.plan.ladder import Ladder, rank_ceiling
from edgc_jax.plan.link_model import CompressionModel, LinkModel
from edgc_jax.plan.plan import make_plan

FREE = CompressionModel(0.0, 0.0)
LINK = LinkModel(latency=1e-4, bandwidth=1e7)
PARAMS = {"w": jnp.zeros((768, 3072)), "b": jnp.zeros((3072,))}
PLAN = make_plan(PARAMS, (0,))


def ranks(rank_max=None, rank_min=None, multiple=4, link=None):
  ladder = Ladder(rank_max, rank_min, multiple, link, FREE)
  return ladder.given or ladder.ranks_on_link(PLAN)


class LadderTest(parameterized.TestCase):
  @parameterized.parameters(
    ((None, None), (0, 8, 12, 16, 20, 24, 28, 32)),
    ((16, None), (0, 4, 8, 12, 16)),
    ((8, 8), (0, 8)),
    ((24, 12, 6), (0, 12, 18, 24)),
    ((None, None, 10), (0, 10, 20, 30)),
    ((None, None, 64), (0, 64)),
  )
  def test_given(self, options, expected):
    self.assertEqual(ranks(*options), expected)

  def test_a_given_rank_stays_with_a_link(self):
    self.assertEqual(ranks(16, link=LINK), ranks(16))

  def test_found_from_the_link(self):
    """There are at most 16 ranks, up to the rank ceiling."""
    found = ranks(link=LINK)
    self.assertEqual(found[-1], rank_ceiling(PLAN, LINK, FREE))
    self.assertLessEqual(len(found), 1 + 16)
    self.assertEqual({b - a for a, b in zip(found[1:], found[2:])}, {16})  # noqa: B905, RUF007
    self.assertGreaterEqual(found[1], found[-1] // 4)

  def test_without_a_useful_rank_it_is_dense(self):
    """`init` warns, and the update is dense."""
    far = LinkModel(latency=10.0, bandwidth=1e9)
    with self.assertWarnsRegex(RuntimeWarning, "dense all-reduce is no slower"):
      self.assertEqual(ranks(link=far), (0,))
    with self.assertWarnsRegex(RuntimeWarning, "Use allreduce"):
      state = edgc_jax.edgc(link=far).init(PARAMS)
    self.assertEmpty(state.controller)

  def test_errors(self):
    with self.assertRaisesRegex(ValueError, r"`rank_min` must be at most.*32"):
      Ladder(None, 36, 4, None, FREE)
    with self.assertRaisesRegex(ValueError, "`rank_min` must be at most"):
      ranks(rank_min=400, link=LINK)
    with self.assertRaisesRegex(ValueError, "`rank_max` must be a multiple"):
      Ladder(30, None, 4, None, FREE)

  def test_step_limit_fits_the_ladder(self):
    """A found ladder may have wider steps than the default limit."""
    edgc_jax.edgc(link=LINK).init(PARAMS)
    rule = edgc_jax.RankRule(max_rank_step=4)
    with self.assertRaisesRegex(
      ValueError, r"`max_rank_step` must be at least the step of the ladder"
    ):
      edgc_jax.edgc(link=LINK, rule=rule).init(PARAMS)


if __name__ == "__main__":
  absltest.main()
