"""Tests reducers on models that are sharded within each replica."""

import functools

import chex
import jax
import numpy as np
import optax
import pytest
from absl.testing import absltest, parameterized
from helpers import float32
from helpers.collective_order import unordered
from helpers.meshes import DIVERGED_BYTES, factors, find, residuals
from helpers.shard_runs import ShardedRun

import edgc_jax
from edgc_jax.budget import entropy
from edgc_jax.measure import hlo
from edgc_jax.wire import agreement

pytestmark = pytest.mark.slow

MESHES = {
  "one_device": {"data": 1},
  "replicas": {"data": 4},
  "fsdp": {"data": 4, "fsdp": 2},
  "tensor": {"data": 2, "tensor": 4},
  "both": {"data": 2, "fsdp": 2, "tensor": 2},
}
REDUCERS = {
  "allreduce": lambda: edgc_jax.allreduce(),
  "allreduce_bf16": lambda: edgc_jax.allreduce(wire_dtype="bfloat16"),
  "powersgd": lambda: float32.powersgd(4, check_every=2),
  "powersgd_int8": lambda: edgc_jax.powersgd(4, wire_dtype="int8"),
  "edgc": lambda: float32.edgc(
    rank_max=8, rank_min=2, rank_multiple=2, window=10, warmup_steps=10,
  ),
  "topk": lambda: edgc_jax.topk(0.1),
  "randomk": lambda: edgc_jax.randomk(0.1),
  "quantize": lambda: edgc_jax.quantize(8),
}  # fmt: skip


ON_SHARDS = [
  *((f"{name}_both", name, "both") for name in REDUCERS),
  *((f"{name}_fsdp", name, "fsdp") for name in ("allreduce", "edgc")),
]
LOSS_BYTES = 4  # averaged over the replicas by the step itself


def mean_only():
  """Returns a transformation that averages gradients and does no more."""
  return optax.stateless(lambda g, _: jax.lax.pmean(g, "data"))


def sum_of_bytes(text):
  """Returns the bytes of all collectives of a program, in branches, too."""
  branches = hlo.wire_bytes_of_branches(text)
  return hlo.wire_bytes_outside_branches(text) + sum(map(sum, branches))


def chain(tx):
  return optax.chain(tx, optax.adam(3e-3))


@functools.cache
def run_of(name, mesh):
  """Returns a run of a reducer and Adam, compiled once for all tests."""
  return ShardedRun(chain(REDUCERS[name]()), **MESHES[mesh])


@functools.cache
def plain_run(mesh):
  """Returns a run without a reducer."""
  return ShardedRun(mean_only(), **MESHES[mesh])


def losses_of(name, mesh, steps):
  return run_of(name, mesh).restart().train(steps)


class ShardsTest(parameterized.TestCase):
  @parameterized.named_parameters(
    (name, name) for name in MESHES if name != "one_device"
  )
  def test_dense_is_one_device(self, mesh):
    one = losses_of("allreduce", "one_device", 50)
    many = losses_of("allreduce", mesh, 50)
    np.testing.assert_allclose(many, one, rtol=1e-5)

  def test_full_rank_is_dense(self):
    dense = losses_of("allreduce", "one_device", 50)
    full = chain(float32.powersgd(64, min_ratio=0.0))
    many = ShardedRun(full, **MESHES["both"]).train(50)
    np.testing.assert_allclose(many, dense, rtol=1e-5)

  @parameterized.named_parameters(*ON_SHARDS)
  def test_sends_what_is_predicted(self, name, mesh):
    """Over the replicas to the byte; over the shards next to nothing."""
    run = run_of(name, mesh).restart()
    run.train(1)
    metrics = edgc_jax.metrics(run.state)
    text = run.compiled()
    found = hlo.over_axes(text, run.mesh, "data")
    sent = hlo.wire_bytes_outside_branches(found) - LOSS_BYTES
    for ladder in hlo.wire_bytes_by_rank(found):
      sent += ladder[-1]  # the warm-up has the largest rank
    # The first step also compares gradients, and updates or parameters.
    sent += agreement.CHECK_BYTES + DIVERGED_BYTES
    shards = [axis for axis in run.mesh.shape if axis != "data"]
    if name == "edgc":  # and samples the entropy
      self.assertEqual(metrics["rank"], 8)
      sent += entropy.sample_bytes(2, edgc_jax.Sampling())
    size = run.mesh.size // run.mesh.shape["data"]
    self.assertEqual(size * sent, metrics["wire_bytes"])
    plain = plain_run(mesh).compiled()
    axes = [*[(axis,) for axis in shards], tuple(shards)]
    inside, without = (
      sum(sum_of_bytes(hlo.over_axes(x, run.mesh, *own)) for own in set(axes))
      for x in (text, plain)
    )
    gradient = 4 * sum(x.size for x in jax.tree.leaves(run.params)) / size
    self.assertLess(inside - without, gradient / 100)

  @parameterized.named_parameters(*ON_SHARDS)
  def test_collectives_are_ordered(self, name, mesh):
    """The model's over the shards, then the reducer's, then the loss."""
    self.assertEmpty(unordered(run_of(name, mesh).compiled()))

  @parameterized.named_parameters((name, name) for name in REDUCERS)
  def test_reducers_train(self, name):
    losses = losses_of(name, "both", 60)
    self.assertLess(losses[-1], 0.8 * losses[0])

  def test_all_shards_have_one_rank(self):
    """The rank moves, and the matrices of each shard have columns of theirs."""
    run = run_of("edgc", "both").restart()
    ranks, own = set(), set()
    for window in range(8):
      run.train(10, start=10 * window)
      state = find(run.state)
      budget = state.budget
      ranks.add(int(budget.decision.rank))
      self.assertLen(np.unique(budget.window_entropy), 1)
      own.add(len(np.unique(np.asarray(state.allocation.ranks[0]), axis=0)))
    self.assertGreater(len(ranks), 1)
    self.assertGreater(max(own), 1)

  def test_edgc_trains_like_unsharded(self):
    one = losses_of("edgc", "replicas", 200)
    many = losses_of("edgc", "fsdp", 200)
    self.assertLess(np.mean(many[-20:]), 1.005 * np.mean(one[-20:]))

  @parameterized.named_parameters((name, name) for name in REDUCERS)
  def test_non_finite_shard(self, name):
    """One shard alone has a non-finite gradient: all skip the step."""
    self.assert_skips(run_of(name, "both").restart())

  def test_non_finite_shard_beside_whole_factors(self):
    """Only a leaf that all shards have is compressed."""
    view = lambda path, shape: (  # noqa: E731
      (1, *shape) if path == "['whole']" else None
    )
    tx = chain(float32.powersgd(4, matrix_view=view))
    self.assert_skips(ShardedRun(tx, **MESHES["both"]))

  def assert_skips(self, run):
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
    self.assertEqual(edgc_jax.metrics(run.state)["skipped_steps"], 1)

  def test_replicas_part_on_one_shard(self):
    """Parameters of one shard differ between replicas: it is noticed."""
    run = run_of("powersgd", "both").restart()
    run.train(2)
    up = run.params["up"]
    parts = [np.asarray(x.data).copy() for x in up.addressable_shards]
    parts[0] += 1.0
    arrays = [
      jax.device_put(part, x.device)
      for part, x in zip(parts, up.addressable_shards, strict=True)
    ]
    run.params["up"] = jax.make_array_from_single_device_arrays(
      up.shape, up.sharding, arrays
    )
    run.train(2, start=2)
    with self.assertWarnsRegex(RuntimeWarning, "different parameters"):
      self.assertEqual(edgc_jax.metrics(run.state)["diverged_steps"], 1)

  def test_metrics_are_of_a_replica(self):
    """Bytes are those of all shards; the ratio compares like with like."""
    run = run_of("powersgd", "both").restart()
    run.train(2)
    metrics = edgc_jax.metrics(run.state)
    sharded, whole = 2 * 64 * 128, 4 * (64 * 64 + 64)  # the latter on 4 devices
    self.assertEqual(metrics["dense_bytes"], 4 * (sharded + whole))
    self.assertEqual(metrics["rank"], 4)
    self.assertIsInstance(metrics["relative_error"], float)
    self.assertEqual(np.shape(metrics["matrix_rank"]["up"]), (4, 1))


if __name__ == "__main__":
  absltest.main()
