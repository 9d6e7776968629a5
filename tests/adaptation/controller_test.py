"""Warm-up, windows and ranks for scripted entropies."""

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

from edgc_jax.adaptation.controller import DUE, MARKED, Controller, mark_rebase
from edgc_jax.adaptation.entropy import EntropySample
from edgc_jax.adaptation.error_model import lost_energy
from edgc_jax.adaptation.rank_rule import RankRule
from edgc_jax.plan.plan import make_plan

RANKS = (4, 8, 12, 16)


def make(rule="cqm", warmup=4, most=None, max_rank_step=4):
  plan = make_plan({"w": jnp.zeros((96, 192))}, (0, *RANKS))
  return Controller.for_plan(
    plan,
    window=4,
    warmup_steps=warmup,
    rule=RankRule(
      rule,
      max_rank_step=max_rank_step,
      max_warmup_steps=warmup if most is None else most,
      warmup_rank=None,
    ),
  )


def advance_of(controller):
  """Returns a function from the state after a step to the next step's."""

  @jax.jit
  def advance(state, count):
    return jax.lax.cond(
      controller.closes_window(count),
      controller.close_window,
      lambda state, _: state,
      state,
      count,
    )

  return advance


def log_loss(rank):
  return np.log(lost_energy(96, 192)[rank])


def drive(controller, entropies, weights=None):
  """Returns ranks by window, the state and ranks by step.

  Each window has one of the entropies.
  """
  advance, observe = advance_of(controller), jax.jit(controller.observe)
  state, ranks = controller.init(), []
  for count in range(4 * len(entropies)):
    state = advance(state, jnp.int32(count))
    ranks.append((0, *RANKS)[int(state.rung)])
    window = count // 4
    weight = 1.0 if weights is None else weights[window]
    # Within a window the samples scatter; only their mean counts.
    entropy = entropies[window] + (-1) ** count * 0.3
    state = observe(
      state,
      EntropySample(
        jnp.float32(entropy), jnp.ones(1), jnp.zeros(1), jnp.float32(weight)
      ),
    )
  return ranks[::4], state, ranks


class ControllerTest(parameterized.TestCase):
  def test_ranks_change_at_window_bounds_only(self):
    by_window, _, ranks = drive(make(), [0, 0, -1, -1, -1])
    self.assertEqual(ranks, [r for r in by_window for _ in range(4)])

  def test_falling_entropy(self):
    """Dense, then rank_max, then down by at most the step limit."""
    by_window, state, _ = drive(make(), [0, -1, -1, -1, -1, -1, -1])
    self.assertEqual(by_window, [0, 16, 12, 8, 4, 4, 4])
    self.assertAlmostEqual(float(state.reference_entropy), 0.0, places=5)

  def test_reference_is_fixed(self):
    """Ranks return to where they began: chained windows do not drift."""
    by_window, _, _ = drive(make(), [0, -1, -1, -1, 0.01, 0.01, 0.01, 0.01])
    self.assertEqual(by_window, [0, 16, 12, 8, 4, 8, 12, 16])

  @parameterized.parameters(0, 1, 3)
  def test_rebasing_moves_the_reference_by_the_change_at_the_mark(self, late):
    """Entropies are 0.2 higher from the mark on, and ranks do not see it."""
    controller = make()
    entropies = [0, -1, -1, -1, -0.7, -0.7, -0.3, 0.01]
    marked = 4 * 5 + late  # at a window's end, or within it
    advance, observe = advance_of(controller), jax.jit(controller.observe)
    state, ranks = controller.init(), []
    for count in range(4 * len(entropies)):
      if count == marked:
        state = mark_rebase(state)
      state = advance(state, jnp.int32(count))
      ranks.append((0, *RANKS)[int(state.rung)])
      entropy = entropies[count // 4] + 0.2 * (count >= marked)
      state = observe(
        state,
        EntropySample(
          jnp.float32(entropy), jnp.ones(1), jnp.zeros(1), jnp.float32(1)
        ),
      )
    state = advance(state, jnp.int32(4 * len(entropies)))
    plain, _, _ = drive(make(), entropies)
    self.assertEqual(int(state.rebase), 0)
    # The first whole window after the mark counts as the last one before it:
    # its own change of entropy is attributed to the mark.
    first = 5 if late == 0 else 6
    change = entropies[first] - entropies[first - 1 if late == 0 else 4]
    self.assertAlmostEqual(
      float(state.reference_entropy), 0.2 + change, places=5
    )
    self.assertEqual(ranks[:marked:4], plain[: (marked + 3) // 4])
    # The rank stays during that measurement.
    self.assertEqual(ranks[4 * (first + 1)], ranks[4 * 5 + 1])

  @parameterized.parameters(
    ((), lambda step: 0.0, 0.0),
    ((20,), lambda step: 0.2 * (step >= 20), 0.2),
    # Twice, the first time for one whole window: once more, and back.
    ((20, 24), lambda step: 0.2 * (step >= 20) + 0.2 * (step >= 24), 0.4),
    ((20, 24), lambda step: 0.2 * (20 <= step < 24), 0.0),
    ((20, 28), lambda step: 0.2 * (20 <= step < 28), 0.0),
    # And for parts of windows.
    ((20, 23), lambda step: 0.2 * (20 <= step < 23), 0.0),
    ((22, 24), lambda step: 0.2 * (22 <= step < 24), 0.0),
    (
      (21, 22, 23),
      lambda step: 0.2 * (21 <= step < 22) + 0.3 * (step > 22),
      0.3,
    ),
    (
      (20, 24, 26),
      lambda step: 0.2 * (20 <= step < 24) + 0.1 * (step > 25),
      0.1,
    ),
  )
  def test_rebasing_again(self, marks, offset, shift):
    """The rank stays: what moves is the batch, not the training."""
    controller, window = make(), 4
    state, ranks = controller.init(), []
    advance, observe = advance_of(controller), jax.jit(controller.observe)
    for count in range(12 * window):
      if count in marks:
        state = mark_rebase(state)
      state = advance(state, jnp.int32(count))
      ranks.append((0, *RANKS)[int(state.rung)])
      entropy = jnp.float32(-0.3 * (count >= 4) + offset(count))
      state = observe(
        state,
        EntropySample(entropy, jnp.ones(1), jnp.zeros(1), jnp.float32(1)),
      )
    self.assertAlmostEqual(float(state.reference_entropy), shift, 5)
    self.assertEqual(int(state.rebase), 0)
    self.assertLen(set(ranks[6 * window :]), 1)

  def test_rebasing_in_warm_up(self):
    """Warm-up ends by the fall of the entropy, not by the mark."""
    controller = make(warmup=4, most=40)
    state = mark_rebase(controller.init())
    self.assertEqual(int(state.rebase), MARKED)
    state = advance_of(controller)(state, jnp.int32(4))
    self.assertEqual(int(state.rebase), DUE)
    self.assertFalse(bool(state.is_warm))

  def test_wider_steps(self):
    by_window, _, _ = drive(make(max_rank_step=8), [0, -1, -1, 0.01, 0.01])
    self.assertEqual(by_window, [0, 16, 8, 4, 12])

  @parameterized.parameters((0, 1), (1, 1), (4, 1), (5, 2), (8, 2), (12, 3))
  def test_warmup_is_whole_windows(self, steps, windows):
    by_window, state, _ = drive(make(warmup=steps), [0] * 6)
    self.assertEqual(by_window[: windows + 1], [0] * windows + [16])
    self.assertTrue(bool(state.is_warm))

  def test_warmup_lasts_until_the_entropy_has_fallen(self):
    """rank_min must lose no more than rank_max would have lost at first."""
    gap = 0.5 * float(log_loss(RANKS[0]) - log_loss(RANKS[-1]))
    falling = [0, -0.5 * gap, -1.01 * gap, -1.01 * gap, -1.01 * gap]
    by_window, state, _ = drive(make(warmup=4, most=40), falling)
    self.assertEqual(by_window, [0, 0, 0, 16, 16])
    self.assertAlmostEqual(float(state.reference_entropy), -1.01 * gap, 5)

  def test_warmup_has_an_end(self):
    by_window, state, _ = drive(make(warmup=4, most=10), [0, 1, 2, 3, 4])
    self.assertEqual(by_window, [0, 0, 0, 16, 16])
    self.assertAlmostEqual(float(state.reference_entropy), 2.0, 5)

  def test_windows_without_samples_change_nothing(self):
    by_window, _, _ = drive(
      make(), [0, -1, -1, -9, -1, -1], weights=[1, 1, 1, 0, 1, 1]
    )
    self.assertEqual(by_window, [0, 16, 12, 8, 8, 4])

  def test_linear_rule(self):
    """The first change gives rank_max, no change gives rank_min."""
    by_window, state, _ = drive(
      make("linear", max_rank_step=12), [0, -1, -2, -2, -2.5, -2.5]
    )
    self.assertEqual(by_window, [0, 16, 16, 16, 4, 8])
    self.assertAlmostEqual(float(state.first_change), -1.0, places=5)

  def test_predicted_error_is_from_the_model(self):
    controller = make()
    _, state, _ = drive(controller, [0, 0])
    self.assertAlmostEqual(
      float(controller.predicted_error(state)),
      np.exp(log_loss(16)),
      places=4,
    )
    self.assertEqual(float(controller.predicted_error(controller.init())), 0.0)


if __name__ == "__main__":
  absltest.main()
