"""States resized to another number of replicas."""

import functools

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


TX = float32.powersgd(4, min_ratio=1.0)


@functools.cache
def run_on(replicas):
  """Returns a run, compiled once for all tests."""
  return ShardMap(TX, PARAMS, replicas)


def parts_of(x, replicas):
  return x.reshape(replicas, -1, *x.shape[1:])


@pytest.mark.parametrize(
  ("old", "new"), [(4, 2), (2, 4), (4, 1), (1, 4), (4, 3), (3, 4)]
)
def test_the_mean_over_replicas_stays(old, new):
  x = np.random.default_rng(0).normal(size=(old * 6, 5)).astype(np.float32)
  found = edgc_jax.resize_replicas(x, P("data"), old, new)
  assert found.shape == (new * 6, 5)
  assert found.dtype == np.float32
  np.testing.assert_allclose(
    parts_of(found, new).mean(0), parts_of(x, old).mean(0), atol=1e-6
  )


def test_multiples_are_copies_and_groups_are_means():
  x = np.arange(4.0)
  more = edgc_jax.resize_replicas(x, P("data"), 4, 8)
  np.testing.assert_array_equal(more, [0, 0, 1, 1, 2, 2, 3, 3])
  less = edgc_jax.resize_replicas(x, P("data"), 4, 2)
  np.testing.assert_array_equal(less, [0.5, 2.5])
  neither = edgc_jax.resize_replicas(x, P("data"), 4, 3)
  np.testing.assert_array_equal(neither, [1.5, 1.5, 1.5])


def test_means_of_integers_are_rounded():
  found = edgc_jax.resize_replicas(np.array([1, 2, 2, 2]), P("data"), 4, 1)
  np.testing.assert_array_equal(found, [2])
  assert found.dtype == np.int64


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


def test_arrays_without_entries():
  for new in (2, 8):
    found = edgc_jax.resize_replicas(np.ones((4, 0)), P("data"), 4, new)
    assert found.shape == (new, 0)


def test_out_of_range():
  with pytest.raises(ValueError, match=r"`new` must be .*, got 0"):
    edgc_jax.resize_replicas(np.ones(4), P("data"), 4, 0)
  with pytest.raises(ValueError, match=r"`old` must be .*\(6,\), got 4"):
    edgc_jax.resize_replicas(np.ones(6), P("data"), 4, 2)
  with pytest.raises(ValueError, match=r"`stages` must be .*, got 0"):
    edgc_jax.resize_replicas(np.ones(4), P(("stage", "data")), 2, 1, stages=0)


def test_stages_are_not_mixed():
  with pytest.raises(ValueError, match=r"`stages` must be given.*got None"):
    edgc_jax.resize_replicas(np.ones(4), P(("stage", "data")), 2, 1)


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
  before, after = run_on(old).restart(), run_on(new)
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


def test_nothing_to_mark():
  state = float32.powersgd(4).init(PARAMS)
  assert edgc_jax.restart_reference(state).budget is state.budget
