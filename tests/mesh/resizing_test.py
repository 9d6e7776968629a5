"""States resized to another number of replicas."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import float32
from helpers.meshes import ShardMap, find, first_replica, gradients_like
from jax.sharding import PartitionSpec as P

import edgc_jax

PARAMS = {"w": jnp.zeros((3, 32, 48)), "bias": jnp.zeros((7,))}


@pytest.mark.parametrize(
  ("old", "new"), [(4, 2), (2, 4), (4, 1), (1, 4), (4, 3), (3, 4)]
)
def test_the_mean_over_replicas_stays(old, new):
  x = np.random.default_rng(0).normal(size=(old * 6, 5)).astype(np.float32)
  found = edgc_jax.resize_replicas(x, P("data"), old, new)
  assert found.shape == (new * 6, 5)
  assert found.dtype == np.float32
  means = (a.reshape(n, -1, 5).mean(0) for a, n in ((found, new), (x, old)))
  np.testing.assert_allclose(*means, atol=1e-6)


@pytest.mark.parametrize(
  ("x", "new", "expected"),
  [
    ([0.0, 1.0, 2.0, 3.0], 8, [0, 0, 1, 1, 2, 2, 3, 3]),  # copies
    ([0.0, 1.0, 2.0, 3.0], 2, [0.5, 2.5]),  # means of groups
    ([0.0, 1.0, 2.0, 3.0], 3, [1.5, 1.5, 1.5]),
    ([1, 2, 2, 2], 1, [2]),  # integers are rounded
  ],
)
def test_parts(x, new, expected):
  found = edgc_jax.resize_replicas(np.array(x), P("data"), 4, new)
  np.testing.assert_array_equal(found, expected)
  assert found.dtype == np.array(x).dtype


def test_growing_and_shrinking_is_exact():
  x = np.random.default_rng(1).normal(size=(2, 3, 4)).astype(np.float32)
  there = edgc_jax.resize_replicas(x, P("data"), 2, 8)
  back = edgc_jax.resize_replicas(there, P("data"), 8, 2)
  np.testing.assert_array_equal(back, x)


def test_stages_keep_their_own():
  """The leading axis is [S N m]: stages first, then replicas."""
  x = np.array([0.0, 2.0, 10.0, 14.0])
  found = edgc_jax.resize_replicas(x, P(("stage", "data")), 2, 1, stages=2)
  np.testing.assert_array_equal(found, [1.0, 12.0])


def test_replicated_leaves_stay():
  tree = {"a": np.ones(3), "b": np.ones((4, 2))}
  specs = {"a": P(), "b": P("stage")}
  found = edgc_jax.resize_replicas(tree, specs, 4, 2)
  assert found["a"] is tree["a"]
  assert found["b"] is tree["b"]
  for new in (2, 8):  # without entries
    found = edgc_jax.resize_replicas(np.ones((4, 0)), P("data"), 4, new)
    assert found.shape == (new, 0)


@pytest.mark.parametrize(
  ("size", "spec", "options", "message"),
  [
    (4, "data", {"new": 0}, r"`new` must be .*, got 0"),
    (6, "data", {}, r"`old` must be .*\(6,\), got 4"),
    (4, ("stage", "data"), {"stages": 0}, r"`stages` must be .*, got 0"),
    (4, ("stage", "data"), {}, r"`stages` must be given.*got None"),
  ],
)
def test_out_of_range(size, spec, options, message):
  options = {"old": 4, "new": 2} | options
  with pytest.raises(ValueError, match=message):
    edgc_jax.resize_replicas(np.ones(size), P(spec), **options)


def test_sums_are_of_a_replica():
  tx = edgc_jax.accumulate(edgc_jax.allreduce("replica"), 4)
  params = {"w": jnp.ones((4, 8))}
  specs = edgc_jax.state_specs(tx, params, "replica")
  with pytest.raises(ValueError, match="`axis_name`"):
    edgc_jax.resize_replicas(tx.init(params), specs, 4, 2)


def test_without_residuals_specs_need_not_name_the_replicas():
  tx = optax.chain(edgc_jax.allreduce(), optax.adam(0.1))
  params = {"w": jnp.ones((4, 8))}
  state = tx.init(params)
  specs = jax.tree.map(lambda x: P("shard") if x.ndim else P(), state)
  found = edgc_jax.resize_replicas(state, specs, 4, 2)
  chex.assert_trees_all_equal(found, state)


@pytest.mark.parametrize(("old", "new"), [(4, 2), (2, 4)])
@pytest.mark.slow
def test_the_next_update_is_the_same(old, new):
  """Gradients are regrouped; the exchange depends on means alone."""
  tx = float32.powersgd(4, min_ratio=1.0)
  before, after = (ShardMap(tx, PARAMS, n) for n in (old, new))
  for seed in range(3):
    before.step(gradients_like(PARAMS, seed, old))
  state = jax.device_get(before.state)
  after.state = edgc_jax.resize_replicas(state, before.specs, old, new)
  gradients = gradients_like(PARAMS, 9, old)
  regrouped = jax.tree.map(
    lambda g: edgc_jax.resize_replicas(g, P("data"), old, new), gradients
  )
  expected = before.step(gradients)
  found = after.step(regrouped)
  chex.assert_trees_all_close(
    first_replica(found), first_replica(expected), rtol=1e-4, atol=1e-6
  )


def test_marks_every_reducer_and_nothing_else():
  tx = edgc_jax.skip_nonfinite(float32.edgc(), "data")
  state = tx.init(PARAMS)
  before, after = find(state), find(edgc_jax.restart_reference(state))
  assert int(before.budget.restarts) == 0
  assert int(after.budget.restarts) > 0
  unmarked = after.budget._replace(restarts=before.budget.restarts)
  chex.assert_trees_all_equal(after._replace(budget=unmarked), before)
  # Without a budget there is nothing to mark.
  state = float32.powersgd(4).init(PARAMS)
  assert edgc_jax.restart_reference(state).budget is state.budget
