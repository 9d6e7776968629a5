"""Tests meshes whose sharding axes are left to the compiler."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import float32
from helpers.collective_order import unordered
from helpers.shard_runs import ShardedRun, batch_at, first_params, mesh_of
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from mesh.shards_test import REDUCERS, chain

import edgc_jax
from edgc_jax.measure import hlo

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("without_cache")]

# Inside the wrapper all axes are bound, so each kind of a method is enough.
WRAPPED = ("allreduce", "powersgd_int8", "edgc", "topk")
UNWRAPPED = ("allreduce", "powersgd")
REFUSED = {
  **{name: REDUCERS[name] for name in REDUCERS if name not in UNWRAPPED},
  "powersgd_default": lambda: edgc_jax.powersgd(4),
}
SHARDS = {frozenset(range(4)), frozenset(range(4, 8))}  # devices of a replica
MESH = {"data": 2, "fsdp": 4}


def partial_run(tx, **options):
  """Returns a run where only the axis of the replicas is bound."""
  return ShardedRun(tx, "replicas", **options, **MESH)


def within(reducer):
  return lambda mesh, param_specs: chain(
    edgc_jax.on_mesh(reducer, param_specs=param_specs)
  )


@functools.cache
def run_of(name):
  """Returns a run of a reducer in the wrapper, compiled once for all tests."""
  return partial_run(within(REDUCERS[name]()))


def bytes_over_shards(run):
  """Returns the bytes of each array that an update alone sends over shards."""

  def update(gradients, state, params):
    return run.tx.update(jax.tree.map(lambda g: g[0], gradients), state, params)

  step = jax.jit(
    run.on_mesh(
      update, in_specs=(P("data"), run.specs, P()), out_specs=(P(), run.specs)
    ),
    out_shardings=(run.named(run.param_specs), run.shardings),
  )
  gradients = jax.tree.map(
    lambda p, s: jax.device_put(
      jnp.ones((2, *p.shape)), NamedSharding(run.mesh, P("data", *s))
    ),
    run.params,
    run.param_specs,
  )
  text = step.lower(gradients, run.state, run.params).compile().as_text()
  sizes = []
  for line in filter(hlo.is_collective, text.splitlines()):
    is_permute = "source_target_pairs" in line
    groups = [] if is_permute else hlo.groups_of(line)
    assert not run.shardings or (groups and len(groups[0]) in (2, 4))
    if is_permute or set(map(frozenset, groups)) == SHARDS:
      types = line.split("(%")[0]
      sizes += [4 * np.prod(shape) for _, shape in hlo.arrays_of(types)]
  return sizes


@pytest.mark.parametrize("name", WRAPPED)
def test_equal_to_bound_axes(name):
  """The same numbers as where all axes are bound, and the same shards."""
  partial = run_of(name)
  bound = ShardedRun(chain(REDUCERS[name]()), **MESH)
  np.testing.assert_allclose(partial.train(12), bound.train(12), rtol=1e-3)
  for state in (partial.first_state, partial.state):
    for leaf, sharding in zip(
      *map(jax.tree.leaves, (state, partial.shardings)), strict=True
    ):
      assert leaf.sharding.is_equivalent_to(sharding, leaf.ndim)
  mine, theirs = map(edgc_jax.metrics, (partial.state, bound.state))
  for key in ("wire_bytes", "dense_bytes", "rank", "compression_ratio"):
    assert mine[key] == theirs[key]
  # Also the collectives that the compiler adds are in order.
  assert not unordered(partial.compiled())


@pytest.mark.parametrize("name", WRAPPED)
def test_nothing_is_gathered(name):
  """Over the shards an update sends less than a hundredth of a gradient."""
  gradient = 4 * sum(p.size for p in jax.tree.leaves(first_params()))
  assert 0 < sum(bytes_over_shards(run_of(name))) < gradient / 100


@pytest.mark.parametrize("name", REFUSED)
def test_refused_without_the_wrapper(name):
  """The compiler would gather gradients to read their entries."""
  with pytest.raises(ValueError, match="wrap the reducer with"):
    partial_run(REFUSED[name]())


def test_refused_with_a_state_from_elsewhere():
  tx = edgc_jax.quantize(8)
  update = jax.shard_map(
    lambda g, state: tx.update({"w": g["w"][0]}, state)[0],
    mesh=mesh_of(data=2, fsdp=2),
    in_specs=(P("data"), P()), out_specs=P(), axis_names={"data"},
  )  # fmt: skip
  stacked = {"w": jnp.ones((2, 64, 64))}
  with pytest.raises(ValueError, match="wrap the reducer with"):
    jax.eval_shape(update, stacked, tx.init({"w": jnp.ones((64, 64))}))


@pytest.mark.parametrize("name", UNWRAPPED)
def test_matrices_need_no_wrapper(name):
  """No sharded matrix is gathered, nor sent over the shards."""
  run = partial_run(chain(REDUCERS[name]()), whole=True)
  assert run.train(6)[-1] < 3.0
  assert max(bytes_over_shards(run), default=0) < run.params["up"].nbytes


def test_explicit_axes():
  kind = (AxisType.Auto, AxisType.Explicit)
  losses = partial_run(within(float32.powersgd(4)), kind=kind).train(6)
  assert losses[-1] < losses[0]


def test_bound_axes_need_nothing():
  """Where all axes are bound, the wrapper passes everything on."""
  wrap = lambda mesh, param_specs: edgc_jax.on_mesh(  # noqa: E731
    float32.powersgd(4), param_specs=param_specs
  )
  texts = [
    run.step_fn.lower(run.params, run.state, batch_at(0)).as_text()
    for run in (ShardedRun(tx, **MESH) for tx in (float32.powersgd(4), wrap))
  ]
  assert texts[0] == texts[1]


def test_outside_of_a_mesh():
  tx = edgc_jax.on_mesh(float32.powersgd(4), param_specs=P("fsdp"))
  with pytest.raises(
    ValueError, match="`param_specs` must be None without a mesh"
  ):
    tx.init(first_params())
