"""A residual that grows while gradients do not is reported."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.meshes import AXIS

import edgc_jax
from edgc_jax.methods.entrywise import make_entrywise
from edgc_jax.state import growth
from edgc_jax.state.growth import DIVERGING, WINDOW
from edgc_jax.wire.wire import Send

REPLICAS = 4
OWN = np.random.default_rng(0).standard_normal((REPLICAS, 40, 60))


def too_much(factor):
  """Sends 1 + factor times M: the residual is multiplied by -factor a step."""

  def average(m, key):
    reply = yield Send((1 + factor) * m)
    return reply.mean, reply.sent

  return make_entrywise(average, AXIS, check_every=10**6)


def seen(tx, windows, gradient=lambda step, own: own):
  """Returns the doublings at the end of each window, and the last state."""

  def of_replica(own):
    def step(state, i):
      _, state = tx.update({"w": gradient(i, own)}, state)
      return state, edgc_jax.metrics(state)["residual_doublings"]

    steps = np.arange(windows * WINDOW + 1)
    return jax.lax.scan(step, tx.init({"w": own}), steps)

  state, found = jax.jit(jax.vmap(of_replica, axis_name=AXIS))(
    OWN.astype(np.float32)
  )
  ends = np.asarray(found)[0, WINDOW::WINDOW]
  return ends, jax.tree.map(lambda x: x[0], state)


def test_a_residual_that_grows_is_warned_of():
  doublings, state = seen(too_much(1.1), 5)
  each = WINDOW * np.log2(1.1)
  np.testing.assert_allclose(doublings, [0, 0, each, 2 * each, 3 * each], 0.01)
  with pytest.warns(RuntimeWarning, match="residual has grown .* diverges"):
    found = edgc_jax.metrics(state)
  assert found["residual_doublings"] > DIVERGING


def test_slow_growth_adds_up():
  doublings, _ = seen(too_much(1.006), 10)
  assert doublings[-1] > DIVERGING
  assert (np.diff(doublings[1:]) > 0).all()


def test_it_grows_by_itself_after_the_gradients_have_ended():
  doublings, _ = seen(
    too_much(1.05), 5, lambda step, own: own * (step < WINDOW / 2)
  )
  assert doublings[-1] > DIVERGING


def test_gradients_that_grow_as_fast_are_no_divergence():
  doublings, _ = seen(too_much(1.05), 6, lambda step, own: own * 1.05**step)
  np.testing.assert_array_less(doublings, 1)


def test_gradients_that_shrink_are_no_divergence():
  doublings, _ = seen(
    edgc_jax.topk(0.01), 8, lambda step, own: own * 0.97**step
  )
  np.testing.assert_array_less(doublings, 1)


@pytest.mark.parametrize(
  "tx",
  [
    edgc_jax.topk(0.0005),
    edgc_jax.quantize(1, error_feedback=True),
    edgc_jax.powersgd(1, min_ratio=1, wire_dtype="int4"),
    # The dense steps end within a window.
    edgc_jax.powersgd(1, min_ratio=1, warmup_steps=WINDOW - 2),
    edgc_jax.edgc(total_steps=650, rank_max=8, rank_min=4, min_ratio=1),
  ],
  ids=["topk", "1 bit", "powersgd", "warm-up", "edgc"],
)
def test_residuals_that_fill_are_no_divergence(tx):
  doublings, _ = seen(tx, 12)
  assert doublings.max() < 2.5 < DIVERGING


def test_a_skipped_step_at_a_windows_end_leaves_the_state():
  def broken(step, own):
    return own * jnp.where(step == 3 * WINDOW, np.nan, 1.0)

  with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    doublings, state = seen(too_much(1.05), 4, broken)
  each = WINDOW * np.log2(1.05)
  # The next window's end is compared with the one before the skipped step.
  np.testing.assert_allclose(
    doublings, [0, 0, 0, 2 * each - np.log2(1.05)], 0.01
  )
  assert np.isfinite(state.growth.residual)


def test_nothing_is_kept_without_residuals():
  params = {"w": np.zeros((64, 64), np.float32)}
  for tx in (edgc_jax.allreduce(), edgc_jax.quantize(8)):
    state = tx.init(params)
    assert state.growth == ()
    assert "residual_doublings" not in edgc_jax.metrics(state)


def test_sums_are_zero_between_windows():
  one = np.full((3, 2), -2.0, np.float32)
  for due in (True, False):
    found = growth.sums([(one, 3 * one), (one, one)], np.array(due))
    np.testing.assert_array_equal(found, [48.0 * due, 24.0 * due])
