"""Warm-up, windows and ranks, driven by scripted entropies."""

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

from edgc_jax import comm_cost
from edgc_jax.controller import Controller
from edgc_jax.entropy import EntropySample
from edgc_jax.spectrum import lost_energy

RANKS = (4, 8, 12, 16)


def make(rule="cqm", warmup=4, most=None, max_rank_step=4):
  plan = comm_cost.make_plan({"w": jnp.zeros((96, 192))}, (0, *RANKS))
  return Controller.for_plan(
    plan, window=4, warmup_steps=warmup, rule=rule, exponent=2.0,
    max_warmup_steps=warmup if most is None else most,
    max_rank_step=max_rank_step,
  )  # fmt: skip


def log_loss(rank):
  return np.log(lost_energy(96, 192)[rank])


def drive(controller, entropies, weights=None):
  """Ranks in each step; one window per entropy."""
  advance, observe = jax.jit(controller.advance), jax.jit(controller.observe)
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
    """Dense, then rank_max, then down by the step limit at most."""
    by_window, state, _ = drive(make(), [0, -1, -1, -1, -1, -1, -1])
    self.assertEqual(by_window, [0, 16, 12, 8, 4, 4, 4])
    self.assertAlmostEqual(float(state.reference_entropy), 0.0, places=5)

  def test_reference_is_fixed(self):
    """The way back up ends where it began: no drift through chained windows."""
    by_window, _, _ = drive(make(), [0, -1, -1, -1, 0.01, 0.01, 0.01, 0.01])
    self.assertEqual(by_window, [0, 16, 12, 8, 4, 8, 12, 16])

  def test_wider_steps(self):
    by_window, _, _ = drive(make(max_rank_step=8), [0, -1, -1, 0.01, 0.01])
    self.assertEqual(by_window, [0, 16, 8, 4, 12])

  @parameterized.parameters((0, 1), (1, 1), (4, 1), (5, 2), (8, 2), (12, 3))
  def test_warmup_is_whole_windows(self, steps, windows):
    by_window, state, _ = drive(make(warmup=steps), [0] * 6)
    self.assertEqual(by_window[: windows + 1], [0] * windows + [16])
    self.assertTrue(bool(state.is_warm))

  def test_warmup_goes_on_until_the_entropy_has_fallen(self):
    """Until rank_min loses no more than rank_max would have at first."""
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
    """As much change as in the beginning is rank_max, none is rank_min."""
    by_window, state, _ = drive(
      make("linear", max_rank_step=12), [0, -1, -2, -2, -2.5, -2.5]
    )
    self.assertEqual(by_window, [0, 16, 16, 16, 4, 8])
    self.assertAlmostEqual(float(state.first_change), -1.0, places=5)

  def test_predicted_error_is_the_models(self):
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
