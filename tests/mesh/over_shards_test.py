"""Tests meshes whose sharding axes are left to the compiler."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import float32
from helpers.collective_order import unordered
from helpers.meshes import factors, residuals
from helpers.shard_runs import ShardedRun, batch_at, first_params
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from mesh.shards_test import REDUCERS

import edgc_jax
from edgc_jax.measure import hlo

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("without_cache")]

SPECS = {
  "bias": P(),
  "down": P(None, "fsdp"),
  "up": P("fsdp"),
  "whole": P(),
}
# Inside the wrapper all axes are bound, so each kind of a method is enough.
WRAPPED = ("allreduce", "powersgd_int8", "edgc", "topk")
REPLICAS = {"data"}
SHARDS = {frozenset(range(4)), frozenset(range(4, 8))}  # devices of a replica


class PartialRun(ShardedRun):
  """The model of `ShardedRun`; only the replicas are bound."""

  def __init__(self, make, axis_type=AxisType.Auto, sharded=True):
    types = AxisType.Auto, axis_type
    self.mesh = jax.make_mesh((2, 4), ("data", "fsdp"), types)
    self.bound = {"data": 2}
    self.param_specs = SPECS
    self.tx = tx = make(self.param_specs)
    params = first_params()
    how = {
      "mesh": self.mesh,
      "param_specs": self.param_specs if sharded else None,
    }
    specs = edgc_jax.state_specs(tx, params, **how)
    self.shardings = self.named(specs) if sharded else None
    self.specs = edgc_jax.state_specs(tx, params, **how, axis_names=REPLICAS)
    self.params = jax.device_put(params, self.named(self.param_specs))
    init = jax.shard_map(
      tx.init,
      mesh=self.mesh,
      in_specs=P(),
      out_specs=self.specs,
      axis_names=REPLICAS,
    )
    init = jax.jit(init, out_shardings=self.shardings)
    self.first_state = self.state = init(self.params)
    self.step_fn = jax.jit(
      jax.shard_map(
        self._step,
        mesh=self.mesh,
        in_specs=(P(), self.specs, P("data")),
        out_specs=(P(), self.specs, P()),
        axis_names=REPLICAS,
      ),
      out_shardings=(
        self.named(self.param_specs),
        jax.tree.map(lambda x: x.sharding, self.state),
        None,
      ),
    )

  def named(self, specs):
    return jax.tree.map(lambda s: NamedSharding(self.mesh, s), specs)

  def compiled_update(self):
    """Returns the text of an update alone, without a model."""

    def update(gradients, state, params):
      local = jax.tree.map(lambda g: g[0], gradients)
      return self.tx.update(local, state, params)

    step = jax.jit(
      jax.shard_map(
        update,
        mesh=self.mesh,
        in_specs=(P("data"), self.specs, P()),
        out_specs=(P(), self.specs),
        axis_names=REPLICAS,
      ),
      out_shardings=(self.named(self.param_specs), self.shardings),
    )
    gradients = jax.tree.map(
      lambda p, s: jax.device_put(
        jnp.ones((2, *p.shape)), NamedSharding(self.mesh, P("data", *s))
      ),
      self.params,
      self.param_specs,
    )
    return step.lower(gradients, self.state, self.params).compile().as_text()


def within(reducer):
  return lambda specs: optax.chain(
    edgc_jax.over_shards(reducer, specs), optax.adam(3e-3)
  )


@functools.cache
def run_of(name):
  """Returns a run of a reducer in the wrapper, compiled once for all tests."""
  return PartialRun(within(REDUCERS[name]()))


@pytest.mark.parametrize("name", WRAPPED)
def test_equal_to_bound_axes(name):
  """The same numbers as where all axes are bound, and the same shards."""
  partial = run_of(name)
  bound = ShardedRun(
    optax.chain(REDUCERS[name](), optax.adam(3e-3)), data=2, fsdp=4
  )
  np.testing.assert_allclose(partial.train(12), bound.train(12), rtol=1e-3)
  for leaf, sharding in zip(
    jax.tree.leaves(partial.state),
    jax.tree.leaves(partial.shardings),
    strict=True,
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
  text = run_of(name).compiled_update()
  lines = list(filter(hlo.is_collective, text.splitlines()))
  assert all(len(hlo.groups_of(line)[0]) in (2, 4) for line in lines)
  sent = sum(
    4 * int(np.prod(shape))
    for line in lines
    if set(map(frozenset, hlo.groups_of(line))) == SHARDS
    for _, shape in hlo.arrays_of(line.split(" all-")[0])
  )
  gradient = 4 * sum(p.size for p in jax.tree.leaves(first_params()))
  assert sent > 0
  assert sent < gradient / 100


UNWRAPPED = ("allreduce", "powersgd")
REFUSED = {
  **{name: REDUCERS[name] for name in REDUCERS if name not in UNWRAPPED},
  "powersgd_default": lambda: edgc_jax.powersgd(4),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_without_the_wrapper(name):
  """The compiler would gather gradients to read their entries."""
  with pytest.raises(ValueError, match="wrap the reducer with"):
    PartialRun(lambda _: REFUSED[name]())


def test_refused_with_a_state_from_elsewhere():
  mesh = jax.make_mesh((2, 2), ("data", "fsdp"), (AxisType.Auto,) * 2)
  params = {"w": jnp.ones((64, 64))}
  tx = edgc_jax.quantize(8)
  update = jax.shard_map(
    lambda g, state: tx.update({"w": g["w"][0]}, state)[0],
    mesh=mesh, in_specs=(P("data"), P()), out_specs=P(), axis_names={"data"},
  )  # fmt: skip
  stacked = {"w": jnp.ones((2, 64, 64))}
  with pytest.raises(ValueError, match="wrap the reducer with"):
    jax.eval_shape(update, stacked, tx.init(params))


@pytest.mark.parametrize("name", UNWRAPPED)
def test_matrices_need_no_wrapper(name):
  """No sharded matrix is gathered, nor sent over the shards."""
  run = PartialRun(
    lambda _: optax.chain(REDUCERS[name](), optax.adam(3e-3)), sharded=False
  )
  assert run.train(6)[-1] < 3.0
  matrix = run.params["up"].nbytes
  for line in filter(hlo.is_collective, run.compiled_update().splitlines()):
    is_permute = "source_target_pairs" in line
    if is_permute or set(map(frozenset, hlo.groups_of(line))) == SHARDS:
      sizes = [4 * np.prod(s) for _, s in hlo.arrays_of(line.split("(%")[0])]
      assert max(sizes) < matrix


def test_state_is_born_sharded():
  state = run_of("edgc").first_state
  assert residuals(state)["up"].sharding.spec == P(("data", "fsdp"))
  assert factors(state)["down"].sharding.spec == P("fsdp")
  assert state[1][0].mu["up"].sharding.spec == P("fsdp")


def test_explicit_axes():
  run = PartialRun(within(float32.powersgd(4)), AxisType.Explicit)
  losses = run.train(6)
  assert losses[-1] < losses[0]


def test_bound_axes_need_nothing():
  """Where all axes are bound, the wrapper passes everything on."""
  plain = ShardedRun(float32.powersgd(4), data=2, fsdp=4)
  wrapped = ShardedRun(
    edgc_jax.over_shards(float32.powersgd(4), SPECS), data=2, fsdp=4
  )
  texts = [
    run.step_fn.lower(run.params, run.state, batch_at(0)).as_text()
    for run in (plain, wrapped)
  ]
  assert texts[0] == texts[1]


def test_outside_of_a_mesh():
  tx = edgc_jax.over_shards(float32.powersgd(4), P("fsdp"))
  with pytest.raises(ValueError, match="`param_specs` must be specs over"):
    tx.init(first_params())
