"""A state continues on another number of shards, and of replicas."""

import functools
import operator
import tempfile

import chex
import jax
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from helpers import float32
from helpers.meshes import find, residuals
from helpers.shard_runs import ShardedRun, mesh_of
from jax.sharding import PartitionSpec as P

import edgc_jax

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("without_cache")]

SHAPES = {"up": (64, 128), "down": (128, 64), "whole": (64, 64)}


def edgc():
  tx = float32.edgc(
    rank_max=8, rank_min=4, window=4, warmup_steps=4, min_ratio=1.0,
    sampling=edgc_jax.Sampling(step_rate=1.0),
  )  # fmt: skip
  return optax.chain(tx, optax.adam(3e-3))


def powersgd(rank=4, min_ratio=1.0):
  tx = float32.powersgd(rank, min_ratio=min_ratio)
  return optax.chain(tx, optax.adam(3e-3))


def coarse():
  return powersgd(8, 2.0)


def accumulated():
  return edgc_jax.accumulate(powersgd(), every=4)


@functools.cache
def run_on(make, **shape):
  """Returns a run on a mesh, compiled once for all tests."""
  return ShardedRun(make(), **shape)


def moved(run, make, **shape):
  """The run on another mesh, with its parameters and state converted."""
  then = run_on(make, **shape)
  params = jax.device_get(run.params)
  then.params = then.place(params, then.param_specs)
  then.state = edgc_jax.resize(jax.device_get(run.state), then.first_state)
  return then


@functools.cache
def trained(make):
  """Parameters and state after 10 steps on 4 replicas of 2 shards."""
  run = run_on(make, data=4, fsdp=2).restart()
  run.train(10)
  return run.params, run.state


def resumed(make):
  run = run_on(make, data=4, fsdp=2)
  run.params, run.state = trained(make)
  return run


def saved(params, state):
  """Returns the folder of a checkpoint."""
  folder = f"{tempfile.mkdtemp()}/saved"
  with ocp.StandardCheckpointer() as checkpointer:
    checkpointer.save(folder, (params, state))
  return folder


def state_on(tx, params, mesh, param_specs):
  """Returns the first state on a mesh."""
  how = {"mesh": mesh, "param_specs": param_specs}
  specs = edgc_jax.state_specs(tx, params, **how)
  init = jax.shard_map(
    tx.init, mesh=mesh, in_specs=(param_specs,), out_specs=specs
  )
  return jax.jit(init)(params)


def mean_residuals(state):
  residual = residuals(state)
  return {
    name: np.asarray(residual[name], np.float64).mean(0) for name in SHAPES
  }


@pytest.mark.parametrize(
  ("make", "shape"),
  [
    (edgc, {"data": 2, "fsdp": 4}),
    (powersgd, {"data": 8}),
    (powersgd, {"data": 2, "tensor": 2}),
  ],
)
def test_nothing_is_lost(make, shape):
  run = resumed(make)
  (last,) = run.train(1, start=10)
  run = resumed(make)
  then = moved(run, make, **shape)
  before, after = mean_residuals(run.state), mean_residuals(then.state)
  for name in SHAPES:
    np.testing.assert_allclose(after[name], before[name], rtol=1e-6, atol=1e-9)
  chex.assert_trees_all_equal(run.state[1], then.state[1])  # Adam's moments
  was, now = (edgc_jax.metrics(r.state) for r in (run, then))
  assert now["rank"] == was["rank"]
  assert int(then.state[0].count) == 10
  assert abs(now["compression_ratio"] - was["compression_ratio"]) <= 0.5e-4
  losses = then.train(8, start=10)
  assert abs(losses[0] - last) <= 1e-5 * last
  assert losses[-1] < last


def test_there_and_back():
  """What all shards have in common comes back as it was."""
  run = resumed(edgc)
  first = run.state
  there = moved(run, edgc, data=4)
  back = moved(there, edgc, data=4, fsdp=2)
  was, now = (find(state).budget for state in (first, back.state))
  for field in (
    "reference_entropy", "num_windows", "decision.is_warm", "first_rank",
    "decision.rank", "restarts",
  ):  # fmt: skip
    old, new = (np.ravel(operator.attrgetter(field)(x)) for x in (was, now))
    np.testing.assert_allclose(new, old.mean(), rtol=1e-6, err_msg=field)
  before, after = mean_residuals(first), mean_residuals(back.state)
  for name in SHAPES:
    np.testing.assert_array_equal(after[name], before[name])


def test_learns_as_if_nothing_had_happened():
  """Factors start anew: the loss is soon that of an uninterrupted run."""
  run = resumed(edgc)
  run.train(10, start=10)
  then = moved(run, edgc, data=2, fsdp=4)
  expected = run.train(40, start=20)
  found = then.train(40, start=20)
  assert abs(found[-1] / expected[-1] - 1.0) <= 0.02


def test_random_keys_stay():
  key = jax.random.key(3)
  tx = optax.chain(powersgd(), optax.add_noise(0.1, 0.5, key))
  mesh, params = mesh_of(data=2, fsdp=2), {"w": np.ones((64, 64), np.float32)}
  how = {"mesh": mesh, "param_specs": {"w": P("fsdp")}}
  state = state_on(tx, params, **how)
  folder = saved(params, state)
  _, restored = edgc_jax.restore(folder, tx, params, **how)
  resized = edgc_jax.resize(state, state)
  for found in (restored, resized):
    assert found[1].rng_key == key


@pytest.mark.parametrize(("before", "after"), [(16, 32), (32, 16)])
@pytest.mark.filterwarnings("ignore:Residuals of")
def test_another_rank(before, after):
  """At the higher rank the small matrix is sent dense."""
  shapes = {"a": (64, 64), "small": (20, 20), "z": (128, 64)}
  params = {name: np.ones(shape, np.float32) for name, shape in shapes.items()}
  how = {"mesh": mesh_of(data=2)}

  def tx_of(rank):
    reducer = edgc_jax.edgc(rank_max=rank, total_steps=100)
    return edgc_jax.on_mesh(reducer, **how)

  names = {16: ["a", "small", "z"], 32: ["a", "z"]}
  own = {"a": 1.0, "small": 2.0, "z": 3.0}
  state = tx_of(before).init(params)
  variances = np.array([own[name] for name in names[before]], np.float32)
  budget = state.budget._replace(reference_variance=variances)
  state = state._replace(count=state.count + 50, budget=budget)
  folder = saved(params, state)
  _, restored = edgc_jax.restore(folder, tx_of(after), params, **how)
  expected = tx_of(after).init(params)
  chex.assert_trees_all_equal_shapes(restored, expected)
  found = restored.budget.reference_variance
  assert (found[0], found[-1]) == (1.0, 3.0)


def test_refusals():
  """Of another method, of what is in flight, of other replicas."""
  params = {"w": np.ones((64, 64), np.float32)}
  how = {"mesh": mesh_of(data=2)}
  quantize, powersgd4, edgc, allreduce = (
    edgc_jax.on_mesh(reducer, **how)
    for reducer in (
      edgc_jax.quantize(4, error_feedback=True), edgc_jax.powersgd(4),
      edgc_jax.edgc(), edgc_jax.allreduce(),
    )
  )  # fmt: skip

  def local(overlap):
    outer = optax.chain(allreduce, optax.sgd(1.0))
    inner = optax.adam(1e-3)
    return edgc_jax.local_steps(inner, outer, 2, overlap=overlap, **how)

  for before, given, rule in (
    (quantize, powersgd4, "all arrays of the state"),
    (powersgd4, edgc, "all arrays of the state"),
    (local(1), local(0), "the state of overlap=0"),
    (local(0), local(1), "all arrays of the state"),
  ):
    folder = saved(params, before.init(params))
    with pytest.raises(ValueError, match=f"`path` must be .*{rule}"):
      edgc_jax.restore(folder, given, params, **how)


def test_leaves_that_are_not_compressed_any_more():
  """Parts of a quarter save too little: their residuals are lost, and told.

  On the way back they start from zero.
  """
  run = run_on(coarse, data=2, fsdp=2)
  run.train(2)
  assert np.any(residuals(run.state)["up"])
  with pytest.warns(RuntimeWarning, match="Residuals of . leaves"):
    then = moved(run, coarse, data=2, fsdp=4)
  assert find(then.state).leaves["up"].residual is None
  assert np.any(residuals(then.state)["whole"])
  back = moved(then, coarse, data=2, fsdp=2)
  assert not np.any(residuals(back.state)["up"])
  assert np.isfinite(back.train(2)).all()


@pytest.mark.parametrize("is_saved", [False, True])
@pytest.mark.filterwarnings("ignore:No leaf saves")
@pytest.mark.filterwarnings("ignore:Residuals of")
def test_the_only_compressed_leaf_may_become_dense_and_back(is_saved):
  """Its entropy and its window end and begin with it."""
  params = {"w": np.ones((16, 64), np.float32)}
  tx = float32.edgc(rank_max=8, rank_min=4)
  state, meshes = None, {n: mesh_of(data=2, fsdp=n) for n in (1, 2)}
  for shards in (1, 2, 1):
    how = {"mesh": meshes[shards], "param_specs": {"w": P("fsdp")}}
    if state is None:
      state = state_on(tx, params, **how)
      state = state._replace(count=state.count + 1)
    elif is_saved:
      folder = saved(params, state)
      _, state = edgc_jax.restore(folder, tx, params, **how)
    else:
      state = edgc_jax.resize(state, state_on(tx, params, **how))
    is_compressed = shards == 1
    assert bool(state.budget) == is_compressed
    assert (state.leaves["w"].residual is not None) == is_compressed
    state = jax.device_get(state)
  assert int(state.count) == 1


@pytest.mark.parametrize("make", [edgc, accumulated])
def test_before_the_first_exchange(make):
  """No rank was in use, and dense is not compiled: training goes on."""
  run = run_on(make, data=4, fsdp=2).restart()
  if make is accumulated:
    run.train(1)
  then = moved(run, make, data=2, fsdp=4)
  first = then.params["up"]
  then.train(4)
  assert edgc_jax.metrics(then.state)["rank"] > 0
  assert float(abs(then.params["up"] - first).max()) > 1e-4


def test_stacks_keep_their_entropies():
  """Shards that divide a stack of layers hold whole matrices."""
  params = {"stack": {"kernel": np.ones((4, 32, 32), np.float32)}}
  tx, specs = float32.edgc(rank_max=4, min_ratio=1.0), P("fsdp")
  state = state_on(tx, params, mesh_of(data=2, fsdp=2), specs)
  entropies = np.array([[[1.0, 2.0], [3.0, 4.0]]], np.float32)
  budget = jax.device_get(state).budget._replace(entropies=entropies)
  state = jax.device_get(state)._replace(count=np.int32(1), budget=budget)
  like = state_on(tx, params, mesh_of(data=2, fsdp=4), specs)
  found = edgc_jax.resize(state, like)
  np.testing.assert_array_equal(
    found.budget.entropies, [[[1.0], [2.0], [3.0], [4.0]]]
  )


def test_two_reducers_without_matrices_or_none():
  tx = optax.partition(
    {"m": edgc_jax.allreduce(), "v": edgc_jax.allreduce()},
    lambda tree: jax.tree.map(lambda p: "m" if p.ndim > 1 else "v", tree),
  )
  run, then = (ShardedRun(tx, data=2, fsdp=n) for n in (2, 4))
  state = jax.tree.map(lambda x: np.asarray(x) + 3, jax.device_get(run.state))
  found = edgc_jax.resize(state, then.state)
  assert jax.tree.structure(found) == jax.tree.structure(then.state)
  adam = optax.adam(1e-3)
  state = adam.init(run.params)
  chex.assert_trees_all_equal(edgc_jax.resize(state, state), state)


@pytest.mark.parametrize("is_apart", [False, True])
def test_folders_of_a_checkpoint_manager(is_apart, tmp_path):
  """The newest step, or one; as one item, or as one for each tree."""
  mesh, params = mesh_of(data=2), {"w": np.ones((64, 64), np.float32)}
  tx = optax.chain(powersgd(), optax.sgd(0.1))
  state = state_on(tx, params, mesh, P())
  with ocp.CheckpointManager(tmp_path / "run") as manager:
    for step in (9, 10):
      trees = {"params": {"w": step * params["w"]}, "opt_state": state}
      args = ocp.args.StandardSave(trees)
      if is_apart:
        items = {n: ocp.args.StandardSave(x) for n, x in trees.items()}
        args = ocp.args.Composite(**items)
      manager.save(step, args=args)
  for folder, step in (("run", 10), ("run/9", 9)):
    found, again = edgc_jax.restore(tmp_path / folder, tx, params, mesh=mesh)
    np.testing.assert_array_equal(found["w"], step * params["w"])
    chex.assert_trees_all_equal(again, state)
  (tmp_path / "empty").mkdir()
  with pytest.raises(ValueError, match="of an orbax checkpoint of a tree, got"):
    edgc_jax.restore(tmp_path / "empty", tx, params, mesh=mesh)
