"""A residual that grows while gradients do not is reported."""

import jax
import numpy as np
import pytest
from helpers.meshes import AXIS

import edgc_jax
from edgc_jax.methods.entrywise import make_entrywise
from edgc_jax.wire.wire import Send

REPLICAS = 4


def too_much(m, key):
  """Sends 2.2 times M: the residual is multiplied by -1.2 a step."""
  reply = yield Send(2.2 * m)
  return reply.mean, reply.sent


def seen(tx, steps, scale=lambda step: 1.0):
  """Returns the doublings after each step, and the last state."""
  own = np.random.default_rng(0).standard_normal((REPLICAS, 40, 60))

  def of_replica(g):
    def step(state, i):
      _, state = tx.update({"w": scale(i) * g}, state)
      return state, edgc_jax.metrics(state)["residual_doublings"]

    return jax.lax.scan(step, tx.init({"w": g}), np.arange(steps))

  state, found = jax.jit(jax.vmap(of_replica, axis_name=AXIS))(
    own.astype(np.float32)
  )
  return np.asarray(found[0]), jax.tree.map(lambda x: x[0], state)


def test_a_residual_that_grows_is_warned_of():
  tx = make_entrywise(too_much, AXIS, check_every=5)
  doublings, state = seen(tx, 72)
  # Windows end at steps 5, 10, ...; the first one has nothing before it.
  assert not doublings[:10].any() and doublings[10:].all()
  found = np.diff(doublings[[50, 55, 60, 65, 70]])
  np.testing.assert_allclose(found, 5 * np.log2(1.2), rtol=0.01)
  with pytest.warns(RuntimeWarning, match="residual has grown .* diverges"):
    edgc_jax.metrics(state)


def test_gradients_that_grow_as_fast_are_no_divergence():
  tx = make_entrywise(too_much, AXIS, check_every=5)
  doublings, _ = seen(tx, 30, lambda step: 1.6**step)
  assert not doublings.any()


@pytest.mark.parametrize(
  "tx",
  [
    edgc_jax.topk(0.002, check_every=20),
    edgc_jax.quantize(1, error_feedback=True, check_every=20),
    edgc_jax.powersgd(1, min_ratio=1, check_every=20),
  ],
  ids=["topk", "1 bit", "powersgd"],
)
def test_residuals_that_fill_are_no_divergence(tx):
  doublings, _ = seen(tx, 600)
  assert doublings.max() <= 1.5
