"""Tests several axes of replicas, fast axes, and the refusals of meshes."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import float32
from helpers.meshes import Run, ShardMap, gradients_like, residuals
from helpers.shard_runs import ShardedRun, first_params, mesh_of
from jax.sharding import PartitionSpec as P

import edgc_jax

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("without_cache")]

PARAMS = {"bias": jnp.zeros((30,)), "kernel": jnp.zeros((2, 48, 64))}
REDUCERS = {
  "allreduce_bf16": lambda *a: edgc_jax.allreduce(*a, wire_dtype="bfloat16"),
  "edgc": lambda *a: float32.edgc(
    *a,
    rank_max=8,
    rank_min=8,
    window=2,
    warmup_steps=2,
    sampling=edgc_jax.Sampling(step_rate=1.0),
  ),
  "topk": lambda *a: edgc_jax.topk(0.1, *a),
}


def steps_on(mesh, tx, axis_name, gradients, check_vma=True):
  """Runs a step for each tree [devices, ...]; returns updates and metrics."""
  run = Run(tx, PARAMS, mesh, axis_name=axis_name, check_vma=check_vma)
  return [run.step(tree) for tree in gradients], run.metrics()


def means_of(gradients):
  """Returns the means of [8, ...] over groups of four, [2, ...]."""
  return jax.tree.map(
    lambda g: g.reshape(2, 4, *g.shape[1:]).mean(1), gradients
  )


@pytest.mark.parametrize("name", REDUCERS)
def test_two_axes_of_replicas(name):
  """Equal to one axis of as many replicas."""
  axes = ("pod", "data")
  gradients = [gradients_like(PARAMS, seed, 4) for seed in range(4)]
  found, metrics = steps_on(
    mesh_of(pod=2, data=2), REDUCERS[name](axes), axes, gradients
  )
  run = ShardMap(REDUCERS[name](), PARAMS, 4)
  for gradient, update in zip(gradients, found, strict=True):
    expected = jax.tree.map(lambda u: u[0], run.step(gradient))
    chex.assert_trees_all_close(update, expected, rtol=1e-5, atol=1e-6)
  one = edgc_jax.metrics(run.state)
  assert metrics["wire_bytes"] == one["wire_bytes"]


def test_mean_over_before_the_reducer():
  """Equal to fewer replicas with the mean of their gradients."""
  gradients = [gradients_like(PARAMS, seed, 8) for seed in range(4)]
  tx = optax.chain(edgc_jax.mean_over("fast"), float32.powersgd(8, "data"))
  found, metrics = steps_on(mesh_of(data=2, fast=4), tx, "data", gradients)
  run = ShardMap(float32.powersgd(8), PARAMS, 2)
  for gradient, update in zip(gradients, found, strict=True):
    expected = jax.tree.map(lambda u: u[0], run.step(means_of(gradient)))
    chex.assert_trees_all_close(update, expected, rtol=1e-4, atol=1e-6)
  one = edgc_jax.metrics(run.state)
  assert metrics["wire_bytes"] == one["wire_bytes"]


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
  mesh, own = mesh_of(data=2, fast=4), edgc_jax.allreduce()
  text = []
  for tx in (optax.chain(edgc_jax.mean_over("fast"), own), optax.chain(own)):

    def update(gradients, state, tx=tx):
      local = jax.tree.map(lambda g: g[0], gradients)
      return tx.update(jax.lax.pmean(local, "fast"), state)

    specs = edgc_jax.state_specs(tx, PARAMS, mesh=mesh)
    step = jax.shard_map(
      update,
      mesh=mesh,
      in_specs=(P(("data", "fast")), specs),
      out_specs=(P(), specs),
    )
    arguments = (
      gradients_like(PARAMS, 0, 8),
      jax.eval_shape(tx.init, PARAMS),
    )
    text.append(str(jax.make_jaxpr(step)(*arguments)))
  assert text[0].count("psum") == text[1].count("psum")


@pytest.mark.parametrize(
  "axis_name", ["", (), ("data", "data"), 3, ("data", "")]
)
def test_axis_name(axis_name):
  with pytest.raises(ValueError, match="`axis_name` must be the name"):
    edgc_jax.allreduce(axis_name)
  with pytest.raises(ValueError, match="`axis_name` must be the name"):
    edgc_jax.mean_over(axis_name)


def test_the_axis_of_mean_over_must_be_bound():
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


def test_axis_that_does_not_shard():
  """Gradients that vary over an axis of the batch: `mean_over` is named."""
  mesh, tx = mesh_of(data=2, fast=4), float32.powersgd(4)
  gradients = [gradients_like(PARAMS, 0, 8)]
  with pytest.raises(ValueError, match=r"with edgc_jax.mean_over"):
    steps_on(mesh, tx, "data", gradients)


def test_shards_without_types():
  """Without types nobody knows which leaves are sharded."""
  gradients = [gradients_like(PARAMS, 0, 8)]
  with pytest.raises(ValueError, match="`check_vma` must be True"):
    steps_on(
      mesh_of(data=2, fsdp=4), float32.powersgd(4), "data", gradients, False
    )


OVER_REPLICAS = {"bias": P(), "kernel": P(None, "data")}


@pytest.mark.parametrize(
  ("options", "message"),
  [
    ({"axis_name": "dta"}, "`axis_name` must be an axis of"),
    ({"axis_name": ("data", "pod")}, "`axis_name` must be an axis of"),
    ({"mesh": None}, "`mesh` must be given"),
    (
      {"param_specs": OVER_REPLICAS},
      "`param_specs` must be specs without the axes of the replicas",
    ),
  ],
)
def test_state_specs(options, message):
  own = {
    "axis_name": "data",
    "mesh": mesh_of(data=2, fsdp=2),
    "param_specs": {"bias": P(), "kernel": P(None, "fsdp")},
  } | options
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
  assert up.residual == P(("data", "fsdp"), "tensor")
  assert whole.residual == P(("data",))
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
  run = ShardedRun(
    optax.chain(
      float32.edgc(
        rank_max=8, rank_min=4, window=4, warmup_steps=4,
        sampling=edgc_jax.Sampling(step_rate=1.0),
      ),
      optax.adam(3e-3),
    ),
    data=2, fsdp=2,
  )  # fmt: skip
  expected = run.train(12)
  assert run.restart().train(6) == expected[:6]
  host = jax.device_get((run.params, run.state))
  run.params = run.place(host[0], run.param_specs)
  run.state = run.place(host[1], run.specs)
  assert run.train(6, start=6) == expected[6:]


@functools.cache
def trained():
  run = ShardedRun(float32.powersgd(4), data=2, fsdp=2)
  run.train(3)
  return run


@pytest.mark.parametrize("new", [1, 4])
def test_another_number_of_replicas(new):
  """The mean of the residuals stays, on every shard."""
  run, tx = trained(), float32.powersgd(4)
  resized = edgc_jax.resize_replicas(run.state, run.specs, 2, new)
  then = ShardedRun(tx, data=new, fsdp=2)
  then.state = then.place(resized, then.specs)
  for name, shape in (("up", (64, 128)), ("whole", (64, 64))):
    before, after = (
      np.asarray(residuals(state)[name], np.float64)  # exact means
      .reshape(-1, *shape)
      .mean(0)
      for state in (run.state, then.state)
    )
    np.testing.assert_allclose(after, before, rtol=1e-6, atol=1e-9)
  then.params = then.place(jax.device_get(run.params), then.param_specs)
  assert np.isfinite(then.train(1)).all()
