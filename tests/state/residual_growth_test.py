"""A residual that outgrows the gradients is reported, and no other."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.meshes import AXIS

import edgc_jax
from edgc_jax import extend
from edgc_jax.state import growth
from edgc_jax.state.growth import DIVERGING, WINDOW
from edgc_jax.wire.channel import Channel
from edgc_jax.wire.wire import Send

REPLICAS = 4
OWN = np.random.default_rng(0).standard_normal((REPLICAS, 40, 60))


def too_much(factor):
  """Sends 1 + factor times M: the residual is multiplied by -factor a step."""

  def average(m, key):
    reply = yield Send((1 + factor) * m)
    return reply.mean, reply.sent

  return extend.reducer(extend.entrywise(average), AXIS, check_every=10**6)


def steady(step, own):
  return own


def noise(step, own):
  key = jax.random.fold_in(jax.random.key(0), step)
  return jax.random.normal(key, own.shape) + 0.1 * own


def seen(tx, steps, gradient=steady):
  """Returns the diverging windows after each step, and the last state."""

  def of_replica(own):
    def step(state, i):
      _, state = tx.update({"w": gradient(i, own)}, state)
      return state, edgc_jax.metrics(state)["diverging_windows"]

    return jax.lax.scan(step, tx.init({"w": own}), np.arange(steps))

  state, found = jax.jit(jax.vmap(of_replica, axis_name=AXIS))(
    OWN.astype(np.float32)
  )
  return np.asarray(found)[0], jax.tree.map(lambda x: x[0], state)


@pytest.mark.parametrize(
  ("factor", "latest"),
  [(2.0, 2), (1.28, 2), (1.1, 3), (1.02, 9), (1.006, 31)],
)
def test_a_residual_that_multiplies_is_warned_of(factor, latest):
  """`latest` is the window by whose end it is."""
  windows, state = seen(too_much(factor), latest * WINDOW + 1)
  assert windows[-1] >= DIVERGING
  with pytest.warns(RuntimeWarning, match="residual has grown.* diverges"):
    edgc_jax.metrics(state)


def test_it_multiplies_after_the_gradients_have_ended():
  windows, _ = seen(
    too_much(1.05), 8 * WINDOW, lambda step, own: own * (step < 30)
  )
  assert windows[-1] >= DIVERGING


def test_it_multiplies_beside_noise():
  """The norm of gradients differs by factors from step to step."""

  def gradient(step, own):
    key = jax.random.fold_in(jax.random.key(1), step)
    return own * jnp.exp(0.4 * jax.random.normal(key))

  windows, _ = seen(too_much(1.02), 10 * WINDOW, gradient)
  assert windows[-1] >= DIVERGING


@pytest.mark.slow
@pytest.mark.parametrize("gradient", [steady, noise])
@pytest.mark.parametrize(
  "tx",
  [
    edgc_jax.topk(0.0005),
    edgc_jax.quantize(1, error_feedback=True),
    # Dense steps in a code leave a small residual, which ranks then fill.
    edgc_jax.powersgd({0: 0, 150: 1}, min_ratio=1),
    edgc_jax.powersgd({0: 16, 310: 1}, min_ratio=1, wire_dtype="int8"),
    edgc_jax.edgc(total_steps=650, rank_max=8, rank_min=4, min_ratio=1),
  ],
  ids=["topk", "1 bit", "warm-up", "schedule", "edgc"],
)
def test_residuals_that_fill_are_no_divergence(tx, gradient):
  windows, _ = seen(tx, 12 * WINDOW, gradient)
  assert not windows.any()


@pytest.mark.slow
@pytest.mark.parametrize(
  "gradient",
  [
    lambda step, own: own * 0.97**step,
    lambda step, own: own * 1.02**step,
    lambda step, own: noise(step, own) * jnp.where(step < 300, 1, 1000),
    lambda step, own: noise(step, own) * jnp.where(step < 310, 1, 1000),
    lambda step, own: noise(step, own) * jnp.where(step < 300, 0, 1),
    lambda step, own: noise(step, own) * jnp.where(step == 349, 1000, 1),
    lambda step, own: jnp.where(step < 400, noise(step, own), own),
  ],
  ids=["shrink", "grow", "scale", "scale later", "thaw", "spike", "turn"],
)
@pytest.mark.parametrize(
  "tx",
  [
    edgc_jax.topk(0.01),
    edgc_jax.quantize(4, error_feedback=True),
    edgc_jax.powersgd(1, min_ratio=1),
  ],
  ids=["topk", "4 bits", "powersgd"],
)
def test_gradients_that_change_are_no_divergence(tx, gradient):
  windows, _ = seen(tx, 12 * WINDOW, gradient)
  assert windows.max() < DIVERGING


def test_small_gradients_at_every_end_of_a_window_are_no_divergence():
  windows, _ = seen(
    edgc_jax.randomk(0.01),
    8 * WINDOW,
    lambda step, own: own * jnp.where(step % 10, 1.0, 0.01),
  )
  assert not windows.any()


def test_a_skipped_step_at_a_windows_end():
  """It leaves the state."""

  def broken(step, own):
    return own * jnp.where(step == 3 * WINDOW, jnp.nan, 1.0)

  with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    windows, state = seen(too_much(1.1), 4 * WINDOW + 1, broken)
  assert windows[3 * WINDOW] == 1 and windows[-1] == 2
  norm = np.linalg.norm(OWN, axis=(1, 2)).mean()
  np.testing.assert_allclose(state.growth.gradients, 200 * norm, 1e-5)


def test_a_state_whose_residual_is_unknown():
  """As on another number of shards: it counts once."""
  state = growth.init()._replace(residual=jnp.float32(-1))
  for step, residual in ((20, 0.0), (50, 900.0), (70, 0.0), (100, 905.0)):
    due = growth.is_due(jnp.array(step))
    state = growth.update(state, jnp.array([residual, 1.0]), due)
  assert float(state.gradients) == 900 + 4
  assert int(state.windows) == 0
  state = growth.update(state, jnp.array([2000.0, 1.0]), jnp.array(True))
  assert int(state.windows) == 1


def test_nothing_is_kept_without_residuals():
  params = {"w": np.zeros((64, 64), np.float32)}
  for tx in (edgc_jax.allreduce(), edgc_jax.quantize(8)):
    state = tx.init(params)
    assert state.growth == ()
    assert "diverging_windows" not in edgc_jax.metrics(state)


@pytest.mark.parametrize("scale", [1e-15, 1.0, 1e15])
def test_norms_at_the_end_of_a_window(scale):
  one = np.full((3, 2), -2.0 * scale, np.float32)
  for due in (True, False):
    found = growth.norms(
      [(one, 3 * one), (one, one)], np.array(due), Channel("data")
    )
    expected = [2 * scale * (6 * 10) ** 0.5 * due, 2 * scale * 12**0.5]
    np.testing.assert_allclose(found, expected, 1e-6)


@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_scales_whose_squares_are_out_of_range(scale):
  windows, _ = seen(
    edgc_jax.topk(0.01), 4 * WINDOW, lambda step, own: scale * own
  )
  assert not windows.any()
