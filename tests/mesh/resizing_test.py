"""States resized to another number of replicas."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import float32
from helpers.meshes import ShardMap, find, first_replica, gradients_like

import edgc_jax
from edgc_jax.state.state import PerReplica

PARAMS = {"w": jnp.zeros((3, 32, 48)), "bias": jnp.zeros((7,))}


def resized(x, new):
  """Returns an array of one part for each replica, on another number."""
  like = PerReplica(np.zeros((new, *x.shape[1:]), x.dtype))
  return edgc_jax.resize(PerReplica(x), like).values


@pytest.mark.parametrize(
  ("old", "new"), [(4, 2), (2, 4), (4, 1), (1, 4), (4, 3), (3, 4)]
)
def test_the_mean_over_replicas_stays(old, new):
  x = np.random.default_rng(0).normal(size=(old, 6, 5)).astype(np.float32)
  found = resized(x, new)
  assert found.shape == (new, 6, 5)
  assert found.dtype == np.float32
  np.testing.assert_allclose(found.mean(0), x.mean(0), atol=1e-6)


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
  found = resized(np.array(x), new)
  np.testing.assert_array_equal(found, expected)
  assert found.dtype == np.array(x).dtype


def test_growing_and_shrinking_is_exact():
  x = np.random.default_rng(1).normal(size=(2, 3, 4)).astype(np.float32)
  np.testing.assert_array_equal(resized(resized(x, 8), 2), x)


def test_arrays_that_are_equal_on_all_replicas_stay():
  tree = {"a": np.ones(3), "b": PerReplica(np.ones((4, 0)))}
  for new in (2, 8):
    like = {"a": np.zeros(3), "b": PerReplica(np.ones((new, 0)))}
    found = edgc_jax.resize(tree, like)
    np.testing.assert_array_equal(found["a"], tree["a"])
    assert found["b"].values.shape == (new, 0)


@pytest.mark.parametrize(
  ("change", "message"),
  [
    ({"a": np.ones(4)}, r"of the global shape \(3,\) at a, got \(4,\)"),
    ({"a": np.ones(3, np.float16)}, r"of the dtype float32 at a, got"),
    ({"a": None}, r"with all arrays of the state, of shape \(3,\), got 'a'"),
    ({"b": PerReplica(np.ones((4, 3)))}, r"shape \(2, 2\) at b.values, got"),
  ],
)
def test_other_arrays_are_refused(change, message):
  like = {"a": np.ones(3), "b": PerReplica(np.ones((2, 2)))}
  with pytest.raises(ValueError, match=f"`old` must be .*{message}"):
    edgc_jax.resize(like | change, like)


def test_types_are_enough_unless_something_starts_anew():
  params = {"w": np.ones((64, 64), np.float32)}
  states = [float32.powersgd(rank, min_ratio=0).init(params) for rank in (2, 4)]
  types = [jax.eval_shape(lambda s=state: s) for state in states]
  chex.assert_trees_all_equal(edgc_jax.resize(states[0], types[0]), states[0])
  with pytest.raises(ValueError, match="`like` must be a state with arrays"):
    edgc_jax.resize(states[0], types[1])


@pytest.mark.parametrize(("old", "new"), [(4, 2), (2, 4)])
@pytest.mark.slow
def test_the_next_update_is_the_same(old, new):
  """Gradients are regrouped; the exchange depends on means alone."""
  tx = float32.powersgd(4, min_ratio=1.0)
  before, after = (ShardMap(tx, PARAMS, n) for n in (old, new))
  for seed in range(3):
    before.step(gradients_like(PARAMS, seed, old))
  state = jax.device_get(before.state)
  after.state = edgc_jax.resize(state, after.state)
  gradients = gradients_like(PARAMS, 9, old)
  regrouped = jax.tree.map(
    lambda g: jnp.asarray(resized(np.asarray(g), new)), gradients
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


def test_nothing_of_a_state_is_dropped():
  reducer, params = float32.powersgd(4, min_ratio=0), {"w": np.ones((8, 8))}
  params["v"] = params["w"]
  state = optax.chain(reducer, optax.adam(0.1)).init(params)
  for tx, own, place in (
    (optax.chain(reducer, optax.sgd(0.1)), params, "1.0.count"),
    (optax.chain(reducer, optax.adam(0.1)), {"w": params["w"]}, "v"),
  ):
    with pytest.raises(ValueError, match=f"`like` must be .* at .*{place}"):
      edgc_jax.resize(state, tx.init(own))


def test_a_state_of_an_older_version_is_refused():
  like = float32.powersgd(2, min_ratio=0).init({"w": np.ones((8, 8))})
  kernel = like.leaves["w"]
  old = kernel._replace(residual=kernel.residual.values[0])
  with pytest.raises(ValueError, match=r"`old` must be .* an older version"):
    edgc_jax.resize(like._replace(leaves={"w": old}), like)


def test_keys_follow_the_replicas():
  """Of a chain, and in the inner state of each replica; under pmap, too."""
  noise = optax.add_noise(0.1, 0.5, jax.random.key(3))
  tx = edgc_jax.local_steps(noise, optax.chain(edgc_jax.allreduce(), noise), 2)
  params, states = {"w": jnp.ones((4, 4))}, {}
  for count in (4, 2):
    init = jax.pmap(
      lambda _: tx.init(params), "data", devices=jax.devices()[:count]
    )
    states[count] = init(jnp.arange(count))
  found = edgc_jax.resize(states[4], states[2])
  chex.assert_trees_all_equal_shapes(found, states[2])
  for a, b in zip(*map(jax.tree.leaves, (found, states[2])), strict=True):
    assert a.dtype == b.dtype
  other = {"k": jax.random.key(0, impl="rbg")}
  with pytest.raises(ValueError, match="`old` must be one with keys of"):
    edgc_jax.resize(other, {"k": jax.random.key(0)})


def test_states_of_several_seeds_are_not_those_of_pmap():
  tx = optax.chain(float32.powersgd(2, min_ratio=0), optax.trace(0.9))
  seeds = {"w": jnp.arange(3.0)[:, None, None] * jnp.ones((3, 8, 8))}
  state = jax.vmap(tx.init)(seeds)
  state = (state[0], state[1]._replace(trace=seeds))
  with pytest.raises(ValueError, match="`old` must be a state of pmap whose"):
    edgc_jax.resize(state, state)


def test_a_state_that_was_made_eagerly_goes_to_any_mesh():
  """As the optimiser of Flax NNX makes it; of another rank, and of NumPy."""
  params = {"w": jnp.ones((8, 8))}
  chains = [
    optax.chain(float32.powersgd(rank, min_ratio=0), optax.adam(0.1))
    for rank in (2, 4)
  ]
  old, like = (tx.init(params) for tx in chains)
  old = optax.tree.set(old, count=jnp.int32(1))
  found = edgc_jax.resize(old, like)
  assert not any(x.committed for x in jax.tree.leaves(found))
  found = edgc_jax.resize(old, jax.device_get(like))
  chex.assert_trees_all_equal_shapes(found, like)
