"""Tests several axes of replicas, fast axes, and the refusals of meshes."""

import chex
import jax
import jax.numpy as jnp
import optax
import pytest
from helpers import float32
from helpers.meshes import Run, ShardMap, gradients_like
from helpers.shard_runs import ShardedRun, first_params, mesh_of
from jax.sharding import PartitionSpec as P

import edgc_jax

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("without_cache")]

PARAMS = {"bias": jnp.zeros((30,)), "kernel": jnp.zeros((2, 48, 64))}
REDUCERS = {
  "allreduce_bf16": lambda *a: edgc_jax.allreduce(*a, wire_dtype="bfloat16"),
  "edgc": lambda *a: float32.edgc(
    *a, rank_max=8, rank_min=8, window=2, warmup_steps=2,
    sampling=edgc_jax.Sampling(step_rate=1.0),
  ),
  "topk": lambda *a: edgc_jax.topk(0.1, *a),
}  # fmt: skip


def steps_on(mesh, tx, axis_name, gradients, check_vma=True):
  """Runs a step for each tree [devices, ...]; returns updates and metrics."""
  run = Run(tx, PARAMS, mesh, axis_name=axis_name, check_vma=check_vma)
  return [run.step(tree) for tree in gradients], run.metrics()


def means_of(gradients):
  """Returns the means of [8, ...] over groups of four, [2, ...]."""
  return jax.tree.map(
    lambda g: g.reshape(2, 4, *g.shape[1:]).mean(1), gradients
  )


def assert_equal_to_one_axis(found, tx, gradients, rtol):
  """Compares updates and metrics with those of one axis of replicas."""
  run = ShardMap(tx, PARAMS, len(gradients[0]["bias"]))
  for gradient, update in zip(gradients, found[0], strict=True):
    expected = jax.tree.map(lambda u: u[0], run.step(gradient))
    chex.assert_trees_all_close(update, expected, rtol=rtol, atol=1e-6)
  assert found[1]["wire_bytes"] == run.metrics()["wire_bytes"]


@pytest.mark.parametrize("name", REDUCERS)
def test_two_axes_of_replicas(name):
  """Equal to one axis of as many replicas."""
  axes, make = ("pod", "data"), REDUCERS[name]
  gradients = [gradients_like(PARAMS, seed, 4) for seed in range(4)]
  found = steps_on(mesh_of(pod=2, data=2), make(axes), axes, gradients)
  assert_equal_to_one_axis(found, make(), gradients, 1e-5)


def test_mean_over_before_the_reducer():
  """Equal to fewer replicas with the mean of their gradients."""
  gradients = [gradients_like(PARAMS, seed, 8) for seed in range(4)]
  tx = optax.chain(edgc_jax.mean_over("fast"), float32.powersgd(8, "data"))
  found = steps_on(mesh_of(data=2, fast=4), tx, "data", gradients)
  means = list(map(means_of, gradients))
  assert_equal_to_one_axis(found, float32.powersgd(8), means, 1e-4)


@pytest.mark.parametrize("check_vma", [True, False])
def test_mean_over_alone(check_vma):
  """It averages over its own axes only, with types or without them."""
  mesh, tx = mesh_of(data=2, fast=4), edgc_jax.mean_over("fast")
  mean = jax.shard_map(
    lambda g: tx.update(g, tx.init(PARAMS))[0],
    mesh=mesh,
    in_specs=P(("data", "fast")),
    out_specs=P("data"),
    check_vma=check_vma,
  )
  gradients = gradients_like(PARAMS, 0, 8)
  chex.assert_trees_all_close(
    jax.jit(mean)(gradients), means_of(gradients), atol=1e-6
  )


def test_mean_over_an_axis_that_is_reduced_already():
  """The types show that: nothing is sent over the axis again."""
  text = []
  for first in (edgc_jax.mean_over("fast"), optax.identity()):
    tx = optax.chain(first, edgc_jax.allreduce())

    def update(gradients, state, _, tx=tx):
      local = jax.tree.map(lambda g: g[0], gradients)
      return tx.update(jax.lax.pmean(local, "fast"), state)

    run = Run(tx, PARAMS, mesh_of(data=2, fast=4), update=update)
    jaxpr = jax.make_jaxpr(run.step_fn)(gradients_like(PARAMS, 0, 8), run.state)
    text.append(str(jaxpr))
  assert text[0].count("psum") == text[1].count("psum")


def test_axes_that_are_not_bound():
  tx = optax.chain(edgc_jax.mean_over("ici"), edgc_jax.allreduce())
  with pytest.raises(
    ValueError, match=r"`axis_name` must be an axis bound.*'ici'"
  ):
    ShardMap(tx, PARAMS, 2).step(gradients_like(PARAMS, 0, 2))


def test_state_made_outside():
  """A state without the axis of shards is refused before anything is sent."""
  run = ShardedRun(float32.powersgd(4), data=2, fsdp=2)
  run.state = jax.eval_shape(run.tx.init, first_params())
  run.specs = jax.tree.map(lambda _: P(), run.state)
  step = jax.shard_map(
    run._step,
    mesh=run.mesh,
    in_specs=(run.param_specs, run.specs, (P("data"), P("data"))),
    out_specs=P(),
  )
  with pytest.raises(ValueError, match="leading axes for shards"):
    jax.eval_shape(step, run.params, run.state, (jnp.zeros((4, 64)),) * 2)


@pytest.mark.parametrize(
  ("check_vma", "message"),
  [(True, r"with edgc_jax.mean_over"), (False, "`check_vma` must be True")],
)
def test_shards_without_types(check_vma, message):
  """Types tell axes of the batch from shards; without them nobody knows."""
  with pytest.raises(ValueError, match=message):
    steps_on(
      mesh_of(data=2, fsdp=4), float32.powersgd(4), "data",
      [gradients_like(PARAMS, 0, 8)], check_vma,
    )  # fmt: skip


@pytest.mark.parametrize(
  ("options", "message"),
  [
    ({"axis_name": ("data", "pod")}, "`axis_name` must be an axis of"),
    ({"mesh": None}, "`mesh` must be given"),
    (
      {"param_specs": P("data")},
      "`param_specs` must be specs without the axes of the replicas",
    ),
  ],
)
def test_state_specs(options, message):
  own = {"mesh": mesh_of(data=2, fsdp=2), "param_specs": P()} | options
  with pytest.raises(ValueError, match=message):
    edgc_jax.state_specs(float32.powersgd(4), PARAMS, **own)


@pytest.mark.parametrize("embedding", [(65536, 8), (4096, 65)])
@pytest.mark.filterwarnings("ignore:.*bytes are sent dense")
def test_a_budget_sees_the_sharded_matrices(embedding):
  """A replicated leaf has more entries on a device, or is sent dense."""
  mesh = mesh_of(data=2, fsdp=4)
  shapes = {"emb": embedding, "down": (512, 1024), "up": (1024, 512)}
  params = {
    name: jax.ShapeDtypeStruct(shape, jnp.float32)
    for name, shape in shapes.items()
  }
  specs = {"emb": P(), "down": P(None, "fsdp"), "up": P("fsdp")}
  tx = edgc_jax.edgc(rank_max=16, total_steps=100)
  init = jax.shard_map(
    tx.init, mesh=mesh, in_specs=(specs,),
    out_specs=edgc_jax.state_specs(tx, params, mesh=mesh, param_specs=specs),
  )  # fmt: skip
  state = jax.eval_shape(init, params)
  assert state.budget.reference_variance.shape == (1, 4, 2)
  assert state.allocation.ranks.shape == (1, 4, 2)


def test_specs():
  run = ShardedRun(
    optax.chain(float32.edgc(), optax.adam(1e-3)), data=2, fsdp=2, tensor=2
  )
  reducer, adam = run.specs[0], run.specs[1][0]
  both = ("fsdp", "tensor")
  up, whole = reducer.leaves["up"], reducer.leaves["whole"]
  assert up.factor_q == P(both)
  assert whole.factor_q == P()
  assert up.residual.values == P("data", "fsdp", "tensor")
  assert whole.residual.values == P("data")
  assert up.stats.rank == P(None, both)
  assert reducer.budget.decision.rank == P()
  assert reducer.budget.window_entropy == P(None, both)
  assert reducer.budget.first_rank == P()
  assert reducer.allocation.ranks == P(None, both)
  assert reducer.stats.wire_bytes == P(None, both)
  assert reducer.stats.rank == P()
  assert adam.mu["down"] == P("tensor", "fsdp")


def test_continues_bit_for_bit():
  """A state that was fetched to the host and placed again."""
  tx = float32.edgc(
    rank_max=8, rank_min=4, window=4, warmup_steps=4,
    sampling=edgc_jax.Sampling(step_rate=1.0),
  )  # fmt: skip
  run = ShardedRun(optax.chain(tx, optax.adam(3e-3)), data=2, fsdp=2)
  expected = run.train(12)
  assert run.restart().train(6) == expected[:6]
  host = jax.device_get((run.params, run.state))
  run.params = run.place(host[0], run.param_specs)
  run.state = run.place(host[1], run.specs)
  assert run.train(6, start=6) == expected[6:]
