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
  Pmap,
  ShardMap,
  assert_replicas_equal,
  find,
  gradients_like,
)

import edgc_jax

PARAMS = {"w": jnp.zeros((16, 24)), "b": jnp.zeros((3,))}
QUICK = {
  "rank_max": 8, "rank_min": 4, "rank_multiple": 2, "window": 2,
  "warmup_steps": 2, "max_warmup_steps": 2, "step_rate": 1.0,
  "entry_rate": 1.0, "min_ratio": 1.0,
}  # fmt: skip


@pytest.mark.slow
def test_metrics_do_not_depend_on_the_scale():
  """Squares of 1e20 are infinite, of 1e-25 zero."""
  seen, run = [], Pmap(float32.powersgd(4, min_ratio=0), PARAMS)
  for size in (1.0, 1e20, 1e-25):
    run.state = run.first_state
    for seed in range(3):
      run.step(gradients_like(PARAMS, seed, scale=size))
    values = edgc_jax.metrics(run.state)
    seen.append((values["relative_error"], values["residual_norm"] / size))
  np.testing.assert_allclose(seen[1:], seen[:1] * 2, rtol=1e-3)
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


def drive(run, params, steps, replicas=4, scale=1.0):
  for step in steps:
    run.step(gradients_like(params, step, replicas, scale=scale))
    edgc_jax.metrics(run.state)  # warnings are errors here


@pytest.mark.slow
def test_another_batch_size():
  """Eight times the batch has noise of an eighth of the variance."""
  run = Pmap(edgc(**QUICK), PARAMS)
  drive(run, PARAMS, range(8))
  before = run.state
  with pytest.warns(RuntimeWarning, match="batches several times"):
    drive(run, PARAMS, range(8, 12), scale=8**-0.5)
  run.state = edgc_jax.restart_reference(before)
  drive(run, PARAMS, range(8, 12), scale=8**-0.5)


@pytest.mark.slow
def test_a_longer_run_continues_up_to_its_end():
  short, long = (Pmap(edgc(**QUICK, total_steps=n), PARAMS) for n in (4, 8))
  drive(short, PARAMS, range(4))
  long.state = short.state
  drive(long, PARAMS, range(4, 8))
  with pytest.warns(RuntimeWarning, match="past total_steps=8"):
    drive(long, PARAMS, [8])


def test_a_state_of_other_replicas():
  """With one part of two replicas, the residual would broadcast."""
  params, tx = {"w": jnp.zeros((4, 40))}, float32.powersgd(1, min_ratio=0)
  run, other = ShardMap(tx, params), ShardMap(tx, params, 8)
  run.state = jax.device_get(other.state)
  with pytest.raises(
    ValueError,
    match=r"`state` must be the state of one .*w.*tx.init.*edgc_jax.resize",
  ):
    run.step(gradients_like(params, 0))


def test_state_of_another_rank():
  tx, other = float32.powersgd(4), float32.powersgd(2)
  update = jax.vmap(tx.update, axis_name=AXIS, in_axes=(0, None))
  params = {"w": jnp.zeros((64, 64))}
  with pytest.raises(
    ValueError, match=r"factors of 2 columns .* need 4; .*edgc_jax.resize"
  ):
    update(gradients_like(params, 0), other.init(params))


@pytest.mark.slow
def test_resizing_a_state_of_pmap():
  """Adam's moments are resized too, so training continues."""
  tx = optax.chain(float32.powersgd(4, min_ratio=0), optax.adam(1e-3))
  before, after = Pmap(tx, PARAMS, 4), Pmap(tx, PARAMS, 2)
  for seed in range(2):
    before.step(gradients_like(PARAMS, seed, 4))
  state = edgc_jax.resize(before.state, after.state)
  chex.assert_trees_all_equal_shapes(state, after.state)
  after.state = state
  updates = after.step(gradients_like(PARAMS, 2, 2))
  assert_replicas_equal(updates)
  # A state of pmap goes on on a mesh, and back.
  there = edgc_jax.resize(before.state, ShardMap(tx, PARAMS).state)
  back = edgc_jax.resize(there, before.state)
  chex.assert_trees_all_equal(back, jax.device_get(before.state))


def test_masked_leaves_are_named():
  mask = {"w": True, "b": False}
  run = Pmap(optax.masked(float32.powersgd(4, min_ratio=0), mask), PARAMS)
  run.step(gradients_like(PARAMS, 0))
  with pytest.warns(RuntimeWarning, match="keeps 1 leaves .*matrix_view"):
    edgc_jax.metrics(run.state)
  decayed = optax.adamw(1e-3, mask=mask).init(PARAMS)
  with pytest.warns(RuntimeWarning, match="keeps 1 leaves"):
    edgc_jax.metrics((run.state, decayed))

  labels = {"w": "train", "b": "freeze"}
  parts = {"train": float32.powersgd(4), "freeze": optax.set_to_zero()}
  for right in (
    optax.masked(float32.powersgd(4), {"w": True, "b": True}),
    optax.partition(parts, labels),
  ):
    edgc_jax.metrics(right.init(PARAMS))


@pytest.mark.parametrize(
  "make",
  [
    lambda: optax.chain(*[float32.powersgd(2)] * 2),
    lambda: optax.MultiSteps(float32.powersgd(2), 2),
  ],
  ids=["two_reducers", "multi_steps"],
)
def test_the_error_names_the_cause(make):
  message = r"only one reducer.*MultiSteps.*edgc_jax.accumulate"
  with pytest.raises(ValueError, match=message):
    ShardMap(make(), PARAMS).step(gradients_like(PARAMS, 0))


@pytest.mark.parametrize(
  "wrap",
  [
    lambda tx: tx,
    lambda tx: optax.chain(tx, optax.adam(1e-3)),
    edgc_jax.skip_nonfinite,
    lambda tx: edgc_jax.accumulate(tx, 2),
    lambda tx: optax.named_chain(("first", tx)),
  ],
  ids=["alone", "nested", "skip_nonfinite", "accumulate", "named_chain"],
)
def test_a_link_before_the_reducer_is_named(wrap):
  tx, before = float32.powersgd(4), edgc_jax.mean_over("fast")
  for link in (optax.clip_by_global_norm(1.0), optax.adam(1e-3)):
    with pytest.warns(RuntimeWarning, match="Put the reducer first"):
      edgc_jax.metrics(wrap(optax.chain(link, tx)).init(PARAMS))
    for right in (optax.chain(tx, link), optax.chain(before, tx, link)):
      edgc_jax.metrics(wrap(right).init(PARAMS))


@pytest.mark.parametrize(
  ("dtype", "message"),
  [("float16", "float16.*Cast gradients"), ("float64", "float64.*float32")],
)
def test_dtypes_that_lose(dtype, message):
  with jax.enable_x64(dtype == "float64"):
    params = {"w": jnp.zeros((16, 24), dtype)}
    with pytest.warns(RuntimeWarning, match=message):
      edgc_jax.allreduce().init(params)


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


PAIR = {"a": jnp.zeros((128, 256)), "c": jnp.zeros((96, 128))}


@functools.cache
def run_of_two():
  """Returns a run with one rank for all matrices, on two replicas."""
  tx = float32.edgc(
    window=2, warmup_steps=2, max_warmup_steps=2, allocation="uniform",
    sampling=edgc_jax.Sampling(step_rate=1.0, entry_rate=1.0),
  )  # fmt: skip
  return Pmap(tx, PAIR, replicas=2)


@pytest.mark.slow
def test_white_gradients_of_constant_scale_keep_their_rank():
  run, ranks = run_of_two(), set()
  run.state = run.first_state
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
  assert edgc_jax.metrics(run.state)["rank"] < rank, "0.1 nats count"


@pytest.mark.slow
def test_an_announced_change_of_scale_moves_no_rank():
  run = run_of_two()
  run.state = run.first_state
  drive(run, PAIR, range(6), 2)
  rank, owed = edgc_jax.metrics(run.state)["rank"], run.residual()
  before = run.state
  run.state = edgc_jax.restart_reference(before)
  chex.assert_trees_all_equal(run.residual(), owed)
  drive(run, PAIR, range(6), 2, scale=0.5)
  assert edgc_jax.metrics(run.state)["rank"] == rank
  run.state = before
  with pytest.warns(RuntimeWarning, match="or the loss has another scale"):
    drive(run, PAIR, range(6), 2, scale=0.5)
  assert edgc_jax.metrics(run.state)["rank"] < rank


@pytest.mark.parametrize(
  "tx",
  [
    edgc_jax.edgc(total_steps=100),
    edgc_jax.powersgd({0: 4, 5: 12}, min_ratio=1.0),
    edgc_jax.accumulate(edgc_jax.allreduce(), 2),
    edgc_jax.local_steps(
      optax.sgd(0.1), optax.chain(edgc_jax.allreduce(), optax.sgd(1.0)), every=2
    ),
  ],
  ids=["edgc", "powersgd", "accumulate", "local_steps"],
)
def test_runs_under_vmap_inside_pmap(tx):
  """A conditional would become a selection; mapped in turn, none does."""
  params = {"w": jnp.zeros((3, 64, 96))}  # of three runs

  def trace(map_runs):
    def step(params):
      run = lambda one: tx.update(*one, one[0], local_params=one[0])  # noqa: E731
      return map_runs(run, (params, jax.vmap(tx.init)(params)))

    step = jax.pmap(step, "data", devices=jax.devices()[:2])
    stacked = jax.tree.map(lambda p: jnp.stack([p, p]), params)
    return jax.eval_shape(step, stacked)

  with pytest.raises(ValueError, match="in place of jax"):
    trace(lambda run, runs: jax.vmap(run)(runs))
  trace(jax.lax.map)
