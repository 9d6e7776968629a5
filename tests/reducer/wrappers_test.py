"""`accumulate` and `skip_nonfinite`: replicas decide together."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import float32
from helpers.meshes import AXIS, BACKENDS, Pmap, gradients_like, traced_once

import edgc_jax
from edgc_jax.measure import hlo

PARAMS = {"w": jnp.zeros((16, 24)), "b": jnp.zeros((3,)), "s": jnp.zeros(())}


def chain():
  return optax.chain(float32.powersgd(2), optax.adam(1e-3))


@pytest.mark.parametrize("backend", [*BACKENDS])
@pytest.mark.slow
def test_equals_one_step_on_the_mean(backend):
  """A nonfinite call skips one exchange only."""
  every = BACKENDS[backend](
    traced_once(edgc_jax.accumulate(chain(), 3)), PARAMS
  )
  single = BACKENDS[backend](chain(), PARAMS)
  for step in range(2):
    parts = [gradients_like(PARAMS, 3 * step + i) for i in range(3)]
    mean = jax.tree.map(lambda *g: sum(g) / 3, *parts)
    for part in parts[:2]:
      updates = every.step(part)
      chex.assert_trees_all_equal(updates, optax.tree.zeros_like(updates))
    chex.assert_trees_all_close(
      every.step(parts[2]), single.step(mean), rtol=1e-3, atol=1e-6
    )
  every.state = every.first_state
  bad = gradients_like(PARAMS, 0)
  bad["w"] = bad["w"].at[2, 0, 0].set(jnp.nan)
  for gradients in (bad, *(gradients_like(PARAMS, i) for i in (1, 2))):
    updates = every.step(gradients)
  np.testing.assert_array_equal(updates["b"], 0)
  for seed in range(3, 6):
    updates = every.step(gradients_like(PARAMS, seed))
  chex.assert_tree_all_finite(updates)
  assert np.abs(updates["b"]).max() > 0
  assert edgc_jax.metrics(every.state)["skipped_steps"] == 1


def test_calls_in_between_send_nothing():
  run = Pmap(edgc_jax.accumulate(chain(), 3), PARAMS)
  text = run.compiled(gradients_like(PARAMS, 0))
  assert hlo.wire_bytes_outside_branches(text) == 0
  outer = [sorted(x) for x in hlo.wire_bytes_of_branches(text)]
  exchange = float32.wire_bytes(PARAMS, 2)
  assert any(b[0] == 0 and b[-1] >= exchange for b in outer), outer


@pytest.mark.parametrize("backend", [*BACKENDS])
@pytest.mark.slow
def test_the_whole_chain_keeps_its_state(backend):
  tx = edgc_jax.skip_nonfinite(chain(), "data", max_consecutive=2)
  run = BACKENDS[backend](tx, PARAMS)
  run.step(gradients_like(PARAMS, 0))
  before = run.state.inner_state
  bad = gradients_like(PARAMS, 1)
  bad["b"] = bad["b"].at[3, 0].set(jnp.inf)  # on one replica only
  updates = run.step(bad)
  chex.assert_trees_all_equal(updates, optax.tree.zeros_like(updates))
  chex.assert_trees_all_equal(run.state.inner_state, before)
  values = edgc_jax.metrics(run.state)
  assert (values["skipped_steps"], values["consecutive_skips"]) == (1, 1)
  run.step(bad)
  with pytest.warns(RuntimeWarning, match="2 steps in a row"):
    edgc_jax.metrics(run.state)
  good = gradients_like(PARAMS, 2)
  updates = run.step(good)
  values = edgc_jax.metrics(run.state)
  assert (values["skipped_steps"], values["consecutive_skips"]) == (2, 0)

  # The bad steps leave no trace.
  run.state = run.first_state
  run.step(gradients_like(PARAMS, 0))
  chex.assert_trees_all_equal(run.step(good), updates)


@pytest.mark.parametrize(
  ("axis", "message"),
  [("replica", "'replica'"), (None, r"pass None in plain jax.jit only")],
)
def test_an_axis_that_does_not_fit(axis, message):
  tx = edgc_jax.skip_nonfinite(optax.sgd(1.0), axis)
  with pytest.raises(ValueError, match=message):
    Pmap(tx, PARAMS).step(gradients_like(PARAMS, 0))


@pytest.mark.parametrize(
  "shapes", [{}, {"w": (2, 4), "b": (3, 4)}, {"w": (2, 4), "scalar": ()}]
)
def test_one_device_without_a_reducer(shapes):
  params = {name: jnp.ones(shape) for name, shape in shapes.items()}
  tx = edgc_jax.skip_nonfinite(optax.sgd(1.0), None)
  for bad in (jnp.nan, 1.0):
    gradients = jax.tree.map(lambda x, bad=bad: bad * x, params)
    updates, state = jax.jit(tx.update)(gradients, tx.init(params))
    is_skipped = bool(params) and bool(jnp.isnan(bad))
    assert int(state.stats.skipped_steps) == is_skipped
    if is_skipped:
      chex.assert_trees_all_equal(updates, optax.tree.zeros_like(params))


def test_an_axis_is_not_bound_in_plain_jit():
  tx = edgc_jax.skip_nonfinite(optax.sgd(1.0))
  with pytest.raises(ValueError, match="None as the axis of skip_non"):
    jax.jit(tx.update)(PARAMS, tx.init(PARAMS))


@pytest.mark.parametrize("backend", list(BACKENDS))
@pytest.mark.parametrize(
  "make",
  [
    lambda: edgc_jax.accumulate(edgc_jax.skip_nonfinite(chain()), 2),
    lambda: edgc_jax.skip_nonfinite(edgc_jax.accumulate(chain(), 2)),
  ],
)
@pytest.mark.slow
def test_accumulate_and_skip_in_either_order(backend, make):
  run = BACKENDS[backend](make(), PARAMS)
  for step in range(4):
    updates = run.step(gradients_like(PARAMS, step))
  chex.assert_tree_all_finite(updates)
  assert np.abs(updates["b"]).max() > 0
  assert edgc_jax.metrics(run.state)["skipped_steps"] == 0


@pytest.mark.parametrize(("before", "after"), [(2, 4), (64, 2), (8, 1)])
def test_a_cycle_of_another_length_is_a_mean_of_its_calls(before, after):
  """The state is saved within a cycle, and restored with another `every`."""
  params = {"w": jnp.zeros(3)}
  ones = {"w": jnp.ones(3)}
  own, other = (
    edgc_jax.accumulate(optax.sgd(-1.0), n) for n in (before, after)
  )
  state = own.init(params)
  for _ in range(before - 1):
    updates, state = own.update(ones, state)
    chex.assert_trees_all_equal(updates, params)
  for _ in range(3 * after):
    updates, state = other.update(ones, state)
    assert float(updates["w"][0]) in (0.0, 1.0)
    if np.any(updates["w"]):
      break
  chex.assert_trees_all_equal(updates, ones)
  assert int(state.mini_step) == 0


@pytest.mark.parametrize(
  "make",
  [
    chain,
    lambda: edgc_jax.accumulate(chain(), 2),
    lambda: edgc_jax.skip_nonfinite(chain(), AXIS),
    lambda: edgc_jax.local_steps(optax.adam(1e-3), chain(), 2),
  ],
)
def test_optax_maps_moments_and_leaves_the_state_of_reducers(make):
  """`optax.tree.map_params`; what has no like is passed whole."""
  tx, whole = make(), []
  state = tx.init(PARAMS)
  found = optax.tree.map_params(
    tx, lambda x: x + 1.0, state,
    transform_non_params=lambda x: whole.append(x) or x,
  )  # fmt: skip
  kinds = [type(x).__name__ for x in whole]
  assert {"ReducerState", "LocalStepsState"} & set(kinds)
  chex.assert_trees_all_equal_structs(found, state)
  same = [
    a is b for a, b in zip(*map(jax.tree.leaves, (found, state)), strict=True)
  ]
  if "LocalStepsState" in kinds:  # the inner state is each replica's own
    assert all(same)
    return
  moments = jax.tree.leaves(optax.tree.get(found, "mu"))
  assert all(np.all(x == 1.0) for x in moments)
  assert same.count(False) == 2 * len(PARAMS)  # mu and nu
