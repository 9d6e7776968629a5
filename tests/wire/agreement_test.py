"""Replicas that diverge are detected, for any cause, and can be repaired."""

import functools
from unittest import mock

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import float32
from helpers.meshes import (
  AXIS,
  Pmap,
  Run,
  ShardMap,
  assert_replicas_equal,
  factors,
  find,
  first_replica,
  gradients_like,
  with_field,
)

import edgc_jax
from edgc_jax.wire import agreement, collectives
from edgc_jax.wire.channel import Channel

pytestmark = pytest.mark.slow
PARAMS = {"w": jnp.ones((40, 60)), "b": jnp.full((30,), 1e-3)}


class Trained(Pmap):
  """Parameters of each replica, which a test can change."""

  def __init__(self, wrap=lambda tx: tx, **options):
    tx = optax.chain(float32.powersgd(4, **options), optax.adam(1e-3))
    tx = wrap(tx)

    def update(gradients, params, state):
      updates, state = tx.update(gradients, state, params)
      return optax.apply_updates(params, updates), state

    pmap = functools.partial(
      jax.pmap, axis_name=AXIS, devices=jax.devices()[:4]
    )
    start = pmap(lambda _: (PARAMS, tx.init(PARAMS)))
    self.params, self.state = self.first = start(jnp.arange(4))
    self.update = pmap(update)
    self.follow = pmap(
      lambda *state: edgc_jax.follow_first_replica(state, AXIS)
    )

  def step(self, seed, gradients=None):
    gradients = gradients or gradients_like(PARAMS, seed)
    self.params, self.state = self.update(gradients, self.params, self.state)

  def change(self, name, replica, index, value):
    self.params[name] = self.params[name].at[(replica, *index)].set(value)

  @property
  def diverged(self):
    return int(find(self.state).checks.diverged_steps[0])


_compiled = functools.cache(lambda every: Trained(check_every=every))


def trained(check_every):
  """Returns a run before its first step, compiled once for all tests."""
  run = _compiled(check_every)
  params, run.state = run.first
  run.params = dict(params)
  return run


def seen(one, other, count=0):
  """Returns what each of two replicas finds if it compares with the other."""
  compare = jax.pmap(
    lambda x: agreement.have_diverged(x, True, jnp.int32(count), Channel(AXIS)),
    AXIS,
    devices=jax.devices()[:2],
  )
  return compare(jax.tree.map(lambda *x: jnp.stack(x), one, other)).tolist()


@pytest.mark.parametrize(
  ("name", "index", "value"),
  [
    ("w", (3, 4), 2.0**64),  # a flipped exponent
    ("w", (3, 4), -1.0),  # a flipped sign
    ("b", (0,), 0.01),  # in a small leaf
    ("w", (0, 0), np.nan),
    ("b", (7,), np.inf),
  ],
)
def test_one_wrong_number_on_one_replica(name, index, value):
  run = trained(check_every=3)
  run.step(0)
  assert run.diverged == 0
  run.change(name, 2, index, value)
  run.step(1)
  run.step(2)
  assert run.diverged == 0, "the check is not due"
  run.step(3)
  assert run.diverged == 1
  with pytest.warns(RuntimeWarning, match="at 1 of the steps"):
    assert edgc_jax.metrics(run.state)["diverged_steps"] == 1


def test_equal_replicas_and_rounding_do_not_count():
  run = trained(check_every=1)
  for step in range(6):
    run.step(step)
  noise = np.random.default_rng(0).standard_normal((40, 60))
  for size, expected in ((1e-5, 0), (1e-2, 1)):
    run.params["w"] = run.params["w"].at[1].mul(1 + size * noise)
    run.step(6)
    assert run.diverged == expected


def test_rounding_of_narrow_parameters_does_not_count():
  params = jnp.ones((64, 64), jnp.bfloat16)
  flips = np.random.default_rng(0).random((64, 64)) < 0.05
  ulp = jnp.where(flips, jnp.bfloat16(1 / 128), 0)
  assert seen(params, params + ulp) == [0, 0]
  assert seen(params, params.at[:8].set(3)) == [1, 1]


@pytest.mark.parametrize(("scale", "seed"), [(1e-12, 0), (1.0, 1), (1e12, 2)])
def test_differences_are_detected_at_any_scale(scale, seed):
  random = np.random.default_rng(seed)
  x = np.float32(scale * random.standard_normal((7, 30, 20)))
  noise = random.standard_normal(x.shape)
  for size, expected in ((0, 0), (1e-4, 0), (1e-2, 1)):
    for other in (x * (1 + size), x * (1 + size * noise)):
      assert seen(x, np.float32(other), seed) == [expected] * 2


def test_without_parameters_updates_are_compared():
  tx = edgc_jax.allreduce(check_every=1)
  update = lambda g: tx.update(g, tx.init(PARAMS))[1].checks.diverged_steps  # noqa: E731
  run = lambda: jax.vmap(update, axis_name=AXIS)(gradients_like(PARAMS, 0))  # noqa: E731
  assert run().tolist() == [0] * 4
  # This all-reduce returns different values on each replica.
  with mock.patch.object(collectives, "mean", lambda tree, _: tree):
    assert run().tolist() == [1] * 4


def test_many_leaves():
  """Sums over leaves hide no difference, and rounding is none."""
  params = {f"{i:04}": jnp.full((3,), 1e-3 * i) for i in range(500)}
  assert seen(params, jax.tree.map(lambda p: p * (1 + 2e-7), params)) == [0, 0]
  wrong = params | {"0499": params["0499"].at[1].mul(1.05)}
  assert seen(params, wrong) == [1, 1]


@pytest.mark.parametrize("value", [np.nan, 1e3])
def test_detected_inside_skip_nonfinite(value):
  """A non-finite parameter on one replica makes all skip."""
  run = Trained(edgc_jax.skip_nonfinite, check_every=100)
  run.step(0)
  run.change("w", 1, (0, 0), value)
  gradients = gradients_like(PARAMS, 1)
  if np.isnan(value):
    gradients["w"] = gradients["w"].at[1, 0, 0].set(value)
  run.step(1, gradients)
  assert run.diverged == int(np.isnan(value)), "or it is not due"


def test_following_the_first_replica():
  """All parameters are equal again; residuals stay."""
  run = trained(check_every=1)
  run.step(0)
  run.change("w", 1, (0,), 7.0)
  run.change("b", 2, (0,), 7.0)
  run.step(1)
  assert run.diverged == 1
  before, first = run.residual(), first_replica(run.params)
  run.params, run.state = run.follow(run.params, run.state)
  assert_replicas_equal(run.params)
  chex.assert_trees_all_equal(first_replica(run.params), first)
  chex.assert_trees_all_equal(run.residual(), before)
  run.step(2)
  assert run.diverged == 1, "none since"


def test_following_under_shard_map_and_accumulate():
  tx = optax.chain(
    edgc_jax.accumulate(float32.powersgd(4), 2),
    optax.add_noise(0.1, 0.5, jax.random.key(3)),
  )
  run = ShardMap(tx, PARAMS)
  run.step(gradients_like(PARAMS, 0))

  def follow(state):
    own = jax.lax.axis_index(AXIS)
    part = lambda x: x + jnp.where(own > 0, 1, 0).astype(x.dtype)  # noqa: E731
    inner = state[0].inner_state
    q = jax.tree.map(part, factors(inner))
    inner = with_field(inner, "factor_q", q)
    return edgc_jax.follow_first_replica(
      (state[0]._replace(inner_state=inner), state[1]), AXIS
    )

  on_mesh = jax.shard_map(
    follow, mesh=run.mesh, in_specs=(run.specs,), out_specs=run.specs
  )
  chex.assert_trees_all_equal(jax.jit(on_mesh)(run.state), run.state)


def test_detected_without_check_vma():
  """check_vma=False turns off JAX's tracking, not this check."""
  tx = float32.powersgd(4, check_every=1)

  def update(gradients, state, params):
    own = 1.0 + jax.lax.axis_index(AXIS)  # different parameters everywhere
    params = jax.tree.map(lambda p: p * own, params)
    return tx.update(first_replica(gradients), state, params)

  run = Run(tx, PARAMS, update=update, check_vma=False)
  run.step(gradients_like(PARAMS, 0))
  assert int(find(run.state).checks.diverged_steps) == 1
