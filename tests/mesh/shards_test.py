"""Tests reducers on models that are sharded within each replica."""

import functools

import chex
import jax
import numpy as np
import optax
import pytest
from helpers import float32
from helpers.collective_order import unordered
from helpers.meshes import (
  CHECK_BYTES,
  DIVERGED_BYTES,
  factors,
  find,
  residuals,
  sample_bytes,
)
from helpers.shard_runs import ShardedRun

import edgc_jax
from edgc_jax.measure import hlo

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("without_cache")]

MESHES = {
  "one_device": {"data": 1},
  "replicas": {"data": 2},
  "fsdp": {"data": 2, "fsdp": 2},
  "tensor": {"data": 2, "tensor": 2},
  "both": {"data": 2, "fsdp": 2, "tensor": 2},
}
REDUCERS = {
  "allreduce": lambda: edgc_jax.allreduce(),
  "allreduce_bf16": lambda: edgc_jax.allreduce(wire_dtype="bfloat16"),
  "powersgd": lambda: float32.powersgd(4, check_every=2),
  "powersgd_int8": lambda: edgc_jax.powersgd(4, wire_dtype="int8"),
  "edgc": lambda: float32.edgc(
    rank_max=8, rank_min=4, rank_multiple=4, window=10, warmup_steps=10,
  ),
  "topk": lambda: edgc_jax.topk(0.1),
  "randomk": lambda: edgc_jax.randomk(0.1),
  "quantize": lambda: edgc_jax.quantize(8),
}  # fmt: skip
LOSS_BYTES = 4  # averaged over the replicas by the step itself


def sum_of_bytes(text):
  branches = hlo.wire_bytes_of_branches(text)
  return hlo.wire_bytes_outside_branches(text) + sum(map(sum, branches))


def chain(tx):
  return optax.chain(tx, optax.adam(3e-3))


@functools.cache
def run_of(name, mesh="both"):
  """Returns a run of a reducer and Adam, compiled once for all tests."""
  return ShardedRun(chain(REDUCERS[name]()), **MESHES[mesh])


@functools.cache
def plain_run(mesh):
  """Returns a run without a reducer."""
  mean = optax.stateless(lambda g, _: jax.lax.pmean(g, "data"))
  return ShardedRun(mean, **MESHES[mesh])


@functools.cache
def losses_of(name, mesh, steps):
  return run_of(name, mesh).restart().train(steps)


@pytest.mark.parametrize("mesh", ["replicas", "fsdp", "tensor", "both"])
def test_dense_is_one_device(mesh):
  one = losses_of("allreduce", "one_device", 50)
  many = losses_of("allreduce", mesh, 50)
  np.testing.assert_allclose(many, one, rtol=1e-5)


def test_full_rank_is_dense():
  dense = losses_of("allreduce", "one_device", 50)
  full = chain(float32.powersgd(64, min_ratio=0.0))
  many = ShardedRun(full, **MESHES["both"]).train(50)
  np.testing.assert_allclose(many, dense, rtol=1e-5)


def assert_sends_what_is_predicted(run, name):
  """Over the replicas to the byte; over the shards next to nothing."""
  metrics = edgc_jax.metrics(run.state)
  text = run.compiled()
  found = hlo.over_axes(text, run.mesh, "data")
  sent = hlo.wire_bytes_outside_branches(found) - LOSS_BYTES
  for ladder in hlo.wire_bytes_by_rank(found):
    sent += ladder[-1]  # the warm-up has the largest rank
  # The first step also compares gradients, and updates or parameters.
  sent += CHECK_BYTES + DIVERGED_BYTES
  shards = [axis for axis in run.mesh.shape if axis != "data"]
  if name == "edgc":  # and samples the entropy
    assert metrics["rank"] == 8
    sent += sample_bytes(2, edgc_jax.Sampling())
  size = run.mesh.size // run.mesh.shape["data"]
  assert size * sent == metrics["wire_bytes"]
  plain = plain_run("both" if len(shards) > 1 else "fsdp").compiled()
  axes = [*[(axis,) for axis in shards], tuple(shards)]
  inside, without = (
    sum(sum_of_bytes(hlo.over_axes(x, run.mesh, *own)) for own in set(axes))
    for x in (text, plain)
  )
  gradient = 4 * sum(x.size for x in jax.tree.leaves(run.params)) / size
  assert inside - without < gradient / 100
  # The model's over the shards, then the reducer's, then the loss.
  assert not unordered(text)


@pytest.mark.parametrize("name", ["allreduce", "edgc"])
def test_sends_what_is_predicted_on_one_axis_of_shards(name):
  run = run_of(name, "fsdp").restart()
  run.train(1)
  assert_sends_what_is_predicted(run, name)


@pytest.mark.parametrize("name", REDUCERS)
def test_trains_on_shards(name):
  """It learns, sends what is predicted in order, and skips as one."""
  run = run_of(name).restart()
  losses = run.train(1)
  assert_sends_what_is_predicted(run, name)
  losses += run.train(59, start=1)
  assert losses[-1] < 0.8 * losses[0]
  assert_skips(run.restart())


def assert_skips(run):
  """Raises unless all skip a step that is not finite on one shard."""
  run.train(2)
  params, (reducer, (adam, _)) = run.params, run.state
  up = np.asarray(params["up"]).copy()
  up[0, 0] = np.inf  # the hidden entries of one part of "tensor"
  run.params = {**params, "up": jax.device_put(up, params["up"].sharding)}
  run.train(1, start=2)
  for part in (factors, residuals):
    chex.assert_trees_all_equal(part(run.state), part(reducer))
  # Adam sees zeros: its means decay, and no more.
  chex.assert_trees_all_close(
    run.state[1][0].mu, jax.tree.map(lambda m: 0.9 * m, adam.mu), rtol=1e-6
  )
  assert edgc_jax.metrics(run.state)["skipped_steps"] == 1


def test_non_finite_shard_beside_whole_factors():
  """Only a leaf that all shards have is compressed."""
  view = lambda path, shape: (  # noqa: E731
    (1, *shape) if path == "['whole']" else None
  )
  tx = chain(float32.powersgd(4, matrix_view=view))
  assert_skips(ShardedRun(tx, **MESHES["fsdp"]))


def test_all_shards_have_one_rank():
  """The rank moves, and the matrices of each shard have columns of theirs."""
  run = run_of("edgc").restart()
  ranks, own = set(), set()
  for window in range(8):
    run.train(10, start=10 * window)
    state = find(run.state)
    ranks.add(int(state.budget.decision.rank))
    assert len(np.unique(state.budget.window_entropy)) == 1
    own.add(len(np.unique(np.asarray(state.allocation.ranks[0]), axis=0)))
  assert len(ranks) > 1
  assert max(own) > 1


def test_edgc_trains_like_unsharded():
  one = losses_of("edgc", "replicas", 200)
  many = losses_of("edgc", "fsdp", 200)
  assert np.mean(many[-20:]) < 1.005 * np.mean(one[-20:])


def test_replicas_part_on_one_shard():
  """Parameters of one shard differ between replicas: it is noticed."""
  run = run_of("powersgd").restart()
  run.train(2)
  up = run.params["up"]
  parts = [jax.device_put(x.data, x.device) for x in up.addressable_shards]
  parts[0] += 1.0
  run.params["up"] = jax.make_array_from_single_device_arrays(
    up.shape, up.sharding, parts
  )
  run.train(2, start=2)
  with pytest.warns(RuntimeWarning, match="different parameters"):
    metrics = edgc_jax.metrics(run.state)
  assert metrics["diverged_steps"] == 1
  # Bytes are those of all shards; the ratio compares like with like.
  sharded, whole = 2 * 64 * 128, 4 * (64 * 64 + 64)  # the latter on 4 devices
  assert metrics["dense_bytes"] == 4 * (sharded + whole)
  assert metrics["rank"] == 4
  assert isinstance(metrics["relative_error"], float)
  assert np.shape(metrics["matrix_rank"]["up"]) == (4, 1)
