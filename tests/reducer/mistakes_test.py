"""Mistakes that would go unnoticed: each one works or raises an error."""

import functools
import warnings

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import float32
from helpers.flat_options import edgc
from helpers.meshes import (
  AXIS,
  BACKENDS,
  Pmap,
  ShardMap,
  assert_replicas_equal,
  find,
  gradients_like,
)
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import edgc_jax

PARAMS = {"w": jnp.zeros((16, 24)), "b": jnp.zeros((3,))}
QUICK = {
  "rank_max": 8,
  "rank_min": 4,
  "rank_multiple": 2,
  "window": 2,
  "warmup_steps": 2,
  "max_warmup_steps": 2,
  "step_rate": 1.0,
  "entry_rate": 1.0,
  "min_ratio": 1.0,
}


@functools.cache
def powersgd_run(backend):
  """Returns a run of four replicas, compiled once for all tests."""
  return BACKENDS[backend](float32.powersgd(4, min_ratio=0), PARAMS)


@pytest.mark.slow
@pytest.mark.parametrize("scale", [1e20, 1e-25])
def test_metrics_do_not_depend_on_the_scale(scale):
  """Squares of 1e20 are infinite, of 1e-25 zero."""
  seen, run = [], powersgd_run("pmap")
  for size in (1.0, scale):
    run.state = run.first_state
    for seed in range(3):
      run.step(gradients_like(PARAMS, seed, scale=size))
    values = edgc_jax.metrics(run.state)
    seen.append((values["relative_error"], values["residual_norm"] / size))
  np.testing.assert_allclose(seen[1], seen[0], rtol=1e-3)
  assert seen[0][0] > 0.01


@pytest.mark.slow
def test_a_huge_step_does_not_poison_the_ranks_of_matrices():
  params = {"a": jnp.zeros((32, 48)), "c": jnp.zeros((32, 48))}
  run = Pmap(edgc(**QUICK), params)
  for step in range(8):
    scale = 1e20 if step == 3 else 1.0
    run.step(gradients_like(params, step, scale=scale))
    allocation = find(run.state).allocation
    chex.assert_tree_all_finite(
      (allocation.sums.lost, allocation.predicted_errors)
    )
  ranks = edgc_jax.metrics(run.state)["matrix_rank"]
  assert min(ranks["a"] + ranks["c"]) >= 2


@functools.cache
def edgc_run(total_steps):
  """Returns a run of edgc, compiled once for all tests."""
  return Pmap(edgc(**QUICK, total_steps=total_steps), PARAMS)


def check(scales, message, total_steps=None, restarts=()):
  run = edgc_run(total_steps)
  run.state = run.first_state
  with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    for step, scale in enumerate(scales):
      if step in restarts:
        run.state = edgc_jax.restart_reference(run.state)
      run.step(gradients_like(PARAMS, step, scale=scale))
      edgc_jax.metrics(run.state)
  texts = [str(warning.message) for warning in caught]
  assert any(message in text for text in texts) == bool(message)
  assert bool(texts) == bool(message)


@pytest.mark.slow
def test_another_batch_size():
  """Eight times the batch has noise of an eighth of the variance."""
  scales = [1.0] * 8 + [8**-0.5] * 4
  check(scales, "batches several times")
  check(scales, "", restarts=(8,))


@pytest.mark.slow
def test_past_the_end():
  check([1.0] * 9, "past total_steps=8", total_steps=8)
  check([1.0] * 8, "", total_steps=8)


@pytest.mark.slow
def test_a_longer_run_continues():
  short, long = edgc_run(4), edgc_run(8)
  short.state = short.first_state
  for step in range(4):
    short.step(gradients_like(PARAMS, step))
  long.state = short.state
  for step in range(4):
    long.step(gradients_like(PARAMS, step))
    edgc_jax.metrics(long.state)  # warnings are errors here


@pytest.mark.parametrize("rows", [24, 4])
def test_init_outside_shard_map(rows):
  """With as many rows as replicas, the residual would broadcast."""
  params = {"w": jnp.zeros((rows, 40))}
  tx = float32.powersgd(1, min_ratio=0)
  run = ShardMap(tx, params)
  specs = edgc_jax.state_specs(tx, params)
  run.state = jax.tree.map(
    lambda x, spec: jax.device_put(x, NamedSharding(run.mesh, spec)),
    tx.init(params),
    specs,
  )
  with pytest.raises(
    ValueError,
    match=r"`state` must be the state of one .*w.*tx.init.*state_specs",
  ):
    run.step(gradients_like(params, 0))


def test_state_of_another_number_of_replicas():
  tx = float32.powersgd(4, min_ratio=0)
  before, after = ShardMap(tx, PARAMS, 4), ShardMap(tx, PARAMS, 2)
  after.state = jax.device_get(before.state)
  with pytest.raises(ValueError, match="resize_replicas"):
    after.step(gradients_like(PARAMS, 0, 2))


def test_state_of_another_rank():
  tx, other = float32.powersgd(4), float32.powersgd(2)
  update = jax.vmap(tx.update, axis_name=AXIS, in_axes=(0, None))
  params = {"w": jnp.zeros((64, 64))}
  with pytest.raises(
    ValueError, match=r"factors of 2 columns .* need 4; .*resize_shards"
  ):
    update(gradients_like(params, 0), other.init(params))


def test_resizing_over_an_axis_of_another_name():
  tx = float32.powersgd(2)
  specs = edgc_jax.state_specs(tx, PARAMS)
  with pytest.raises(ValueError, match=r"`axis_name`.*'data'"):
    edgc_jax.resize_replicas(tx.init(PARAMS), specs, 4, 2, "replica")


@pytest.mark.slow
def test_resizing_a_state_of_pmap():
  """Adam's moments are resized too, so training continues."""
  tx = optax.chain(float32.powersgd(4, min_ratio=0), optax.adam(1e-3))
  before, after = Pmap(tx, PARAMS, 4), Pmap(tx, PARAMS, 2)
  for seed in range(2):
    before.step(gradients_like(PARAMS, seed, 4))
  specs = edgc_jax.state_specs(tx, PARAMS)
  state = edgc_jax.resize_replicas(before.state, specs, 4, 2)
  chex.assert_trees_all_equal_shapes(state, after.state)
  after.state = state
  updates = after.step(gradients_like(PARAMS, 2, 2))
  assert_replicas_equal(updates)
  with pytest.raises(ValueError, match="`old` must be the number of"):
    edgc_jax.resize_replicas(before.state, specs, 3, 2)


def test_resizing_over_several_axes():
  found = edgc_jax.resize_replicas(
    np.arange(8.0), P(("host", "data")), 8, 4, ("host", "data")
  )
  np.testing.assert_array_equal(found, [0.5, 2.5, 4.5, 6.5])
  found = edgc_jax.resize_replicas(
    np.arange(8.0),
    P(("stage", "host", "data")),
    4,
    2,
    ("host", "data"),
    stages=2,
  )
  np.testing.assert_array_equal(found, [0.5, 2.5, 4.5, 6.5])


def test_masked_leaves_are_named():
  mask = {"w": True, "b": False}
  run = Pmap(optax.masked(float32.powersgd(4, min_ratio=0), mask), PARAMS)
  run.step(gradients_like(PARAMS, 0))
  with pytest.warns(RuntimeWarning, match="keeps 1 leaves .*matrix_view"):
    edgc_jax.metrics(run.state)
  decayed = optax.adamw(1e-3, mask=mask).init(PARAMS)
  with pytest.warns(RuntimeWarning, match="keeps 1 leaves"):
    edgc_jax.metrics((run.state, decayed))


@pytest.mark.parametrize(
  "wrap",
  [
    pytest.param(lambda tx: optax.masked(tx, {"w": True, "b": True}), id="all"),
    pytest.param(
      lambda tx: optax.partition(
        {"train": tx, "freeze": optax.set_to_zero()},
        {"w": "train", "b": "freeze"},
      ),
      id="frozen",
    ),
  ],
)
def test_leaves_of_other_transformations_are_not(wrap):
  edgc_jax.metrics(wrap(float32.powersgd(4)).init(PARAMS))


@pytest.mark.parametrize(
  "make",
  [
    pytest.param(
      lambda: optax.chain(*[float32.powersgd(2)] * 2), id="two_reducers"
    ),
    pytest.param(
      lambda: optax.MultiSteps(float32.powersgd(2), 2), id="multi_steps"
    ),
  ],
)
def test_the_error_names_the_cause(make):
  run = ShardMap(make(), PARAMS)
  with pytest.raises(
    ValueError, match=r"only one reducer.*MultiSteps.*edgc_jax.accumulate"
  ):
    run.step(gradients_like(PARAMS, 0))


@pytest.mark.parametrize(
  "wrap",
  [
    pytest.param(lambda tx: tx, id="alone"),
    pytest.param(lambda tx: optax.chain(tx, optax.adam(1e-3)), id="nested"),
    pytest.param(edgc_jax.skip_nonfinite, id="skip_nonfinite"),
    pytest.param(lambda tx: edgc_jax.accumulate(tx, 2), id="accumulate"),
    pytest.param(lambda tx: optax.named_chain(("first", tx)), id="named_chain"),
  ],
)
def test_a_link_before_the_reducer_is_named(wrap):
  clip, tx = optax.clip_by_global_norm(1.0), float32.powersgd(4)
  chain = wrap(optax.chain(clip, tx))
  with pytest.warns(RuntimeWarning, match="Put the reducer first"):
    edgc_jax.metrics(chain.init(PARAMS))
  before = edgc_jax.mean_over("fast")
  for right in (optax.chain(tx, clip), optax.chain(before, tx, clip)):
    edgc_jax.metrics(wrap(right).init(PARAMS))


def test_a_missing_gradient_raises():
  tx = float32.powersgd(2)
  gradients = {"w": jnp.ones((16, 24)), "b": None}
  update = jax.vmap(tx.update, axis_name=AXIS, in_axes=(0, None))
  gradients = jax.tree.map(lambda g: g[None], gradients)
  with pytest.raises(ValueError, match=r"none at \['b'\].*zeros"):
    update(gradients, tx.init(PARAMS))
  with pytest.raises(ValueError, match=r"one more at \['new'\]"):
    update(
      {**gradients, "b": jnp.ones((1, 3)), "new": jnp.ones((1, 2))},
      tx.init(PARAMS),
    )


def test_float16():
  params = {"w": jnp.zeros((16, 24), jnp.float16)}
  with pytest.warns(RuntimeWarning, match="float16.*Cast gradients"):
    float32.powersgd(2).init(params)


@pytest.mark.slow
def test_float16_gradients_of_wider_parameters():
  tx = float32.powersgd(2)
  gradients = {"w": jnp.ones((1, 16, 24), jnp.float16)}
  params = {"w": jnp.ones((16, 24))}
  update = jax.vmap(tx.update, axis_name=AXIS, in_axes=(0, None, None))
  with pytest.warns(RuntimeWarning, match="Cast gradients to float32"):
    update(gradients, tx.init(params), params)


@pytest.mark.parametrize("name", ["allreduce", "quantize", "powersgd"])
def test_float16_keeps_subnormal_means(name):
  """Gradients without a scale are below the least normal number, 6e-5."""
  options = {"powersgd": {"rank": 2, "wire_dtype": "float32"}}.get(name, {})
  tx = edgc_jax.REDUCERS[name](**options)
  values = jnp.array([3e-5, -1e-6, 6.2e-5, 6.1e-5, 0.0, 6e-8], jnp.float16)
  params = {"b": jnp.zeros_like(values)}
  update = jax.vmap(tx.update, axis_name=AXIS, in_axes=(0, None))
  with warnings.catch_warnings():
    warnings.simplefilter("ignore", RuntimeWarning)  # of float16
    state = tx.init(params)
  found, _ = update({"b": jnp.stack([values] * 2)}, state)
  np.testing.assert_array_equal(found["b"][0], values)


def test_float64():
  with jax.enable_x64(True):
    params = {"w": jnp.zeros((16, 24), jnp.float64)}
    with pytest.warns(RuntimeWarning, match="float64.*float32"):
      edgc_jax.allreduce().init(params)


PAIR = {"a": jnp.zeros((128, 256)), "c": jnp.zeros((96, 128))}


@functools.cache
def run_of_two():
  """Returns a run with one rank for all matrices, on two replicas."""
  tx = float32.edgc(
    window=2,
    warmup_steps=2,
    max_warmup_steps=2,
    sampling=edgc_jax.Sampling(step_rate=1.0, entry_rate=1.0),
    allocation="uniform",
  )
  return Pmap(tx, PAIR, replicas=2)


def restarted():
  run = run_of_two()
  run.state = run.first_state
  return run


@pytest.mark.slow
def test_white_gradients_of_constant_scale_keep_their_rank():
  run, ranks, moved = restarted(), set(), []
  draw = jax.jit(
    lambda key, scale: jax.tree.map(
      lambda p: scale * jax.random.normal(key, (2, *p.shape)), PAIR
    )
  )
  for step in range(2 * 103):
    run.step(draw(jax.random.key(step), 1.0))
    if step >= 2:
      ranks.add(int(find(run.state).budget.decision.rank[0]))
  assert len(ranks) == 1, "100 windows"
  rank = edgc_jax.metrics(run.state)["rank"]
  for step in range(2 * 4):
    run.step(draw(jax.random.key(1000 + step), np.exp(-0.1)))
    moved.append(edgc_jax.metrics(run.state)["rank"])
  assert moved[-1] < rank, "0.1 nats count"


def drive(scales):
  run = run_of_two()
  for step, scale in enumerate(scales):
    run.step(gradients_like(PAIR, step, 2, scale=scale))


@pytest.mark.slow
def test_an_announced_change_of_scale_moves_no_rank():
  run = restarted()
  drive([1.0] * 6)
  rank, owed = edgc_jax.metrics(run.state)["rank"], run.residual()
  before = run.state
  run.state = edgc_jax.restart_reference(before)
  chex.assert_trees_all_equal(run.residual(), owed)
  drive([0.5] * 6)
  assert edgc_jax.metrics(run.state)["rank"] == rank
  run.state = before
  drive([0.5] * 6)
  assert edgc_jax.metrics(run.state)["rank"] < rank
