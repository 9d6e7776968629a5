"""Steps in plain `jax.jit`: a reducer that was told the mesh."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from helpers import float32
from helpers.collective_order import unordered
from helpers.meshes import AXIS, Run, gradients_like
from helpers.reducers import variants
from helpers.shard_runs import ShardedRun, batch_at, mesh_of
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import edgc_jax
from edgc_jax.measure import hlo

pytestmark = pytest.mark.usefixtures("without_cache")

REPLICAS = 4
SHARDED = {"data": 2, "fsdp": 2}
PARAMS = {
  "w": 0.1 * jax.random.normal(jax.random.key(1), (64, 96)),
  "v": 0.1 * jax.random.normal(jax.random.key(2), (96, 64)),
  "b": jnp.zeros(96),
}
# Meshes on which `value_and_grad` binds the replicas by shard_map, and by vmap.
BINDERS = {"data": 4}, SHARDED


def loss_fn(params, x, cast=lambda h: h):
  """Has a scan, whose carry needs a cast of its type in `shard_map`."""

  def body(h, _):
    return jnp.tanh((h + x) @ params["w"] @ params["v"]), None

  h, _ = jax.lax.scan(body, cast(jnp.zeros(x.shape)), None, length=2)
  h = jnp.tanh((h + x) @ params["w"] + params["b"]) @ params["v"]
  return jnp.mean((h - x) ** 2)


def batch(step, rows=32):
  return jax.random.normal(jax.random.key(step), (rows, 64))


def reducer_of(name, **where):
  options = variants()[name][""]
  options = {**options, "bits": 8} if name == "quantize" else options
  reducer = edgc_jax.REDUCERS[name](**options)
  return edgc_jax.on_mesh(reducer, **where)


def powersgd(rule, every=1, **options):
  """Returns a function that makes a chain for a mesh."""

  def make(**where):
    reducer = edgc_jax.on_mesh(float32.powersgd(4, **options), **where)
    tx = optax.chain(reducer, rule)
    return edgc_jax.accumulate(tx, every, **where) if every > 1 else tx

  return make


def crossing(text):
  """Returns the collectives of a program, except those inside the replicas.

  Each as its name, and the types of what it returns.
  """
  found = []
  for line in filter(hlo.is_collective, text.splitlines()):
    if set(map(frozenset, hlo.groups_of(line))) != {
      frozenset({0, 1}), frozenset({2, 3}),
    }:  # fmt: skip
      types, name = re.search(r"= (.*) ([a-z-]+)\(", line).groups()
      found.append((name, sorted(hlo.arrays_of(types))))
  return sorted(found)


def cost_of(program):
  """Returns operations, bytes read and written, and bytes of memory."""
  costs = program.cost_analysis()
  memory = program.memory_analysis().temp_size_in_bytes
  return np.array([costs["flops"], costs["bytes accessed"], memory])


def assert_near(first, second):
  for a, b in zip(*map(jax.tree.leaves, (first, second)), strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-3, atol=2e-5)


def mean_over_replicas(tree):
  return jax.tree.map(lambda g: g.mean(0), tree)


@pytest.mark.slow
@pytest.mark.parametrize(
  ("name", "mesh"),
  [
    ("edgc", {"data": 4}),
    ("topk", {"data": 4}),
    ("edgc", SHARDED),
    ("powersgd", SHARDED),
    ("allreduce", SHARDED),
  ],
)
def test_equal_to_shard_map(name, mesh):
  """The same parameters, and the same messages between the replicas."""
  make = lambda **where: optax.chain(  # noqa: E731
    reducer_of(name, **where), optax.sgd(0.5)
  )
  run = ShardedRun(make, "jit", **mesh)
  other = ShardedRun(make(), **mesh)
  np.testing.assert_allclose(run.train(4), other.train(4), rtol=1e-3)
  assert_near(run.params, other.params)
  assert crossing(run.compiled()) == crossing(other.compiled())
  if mesh is SHARDED:
    (part,) = edgc_jax.describe(
      run.tx, run.params, mesh=run.mesh, param_specs=run.param_specs
    ).parts
    text = hlo.over_axes(run.compiled(), run.mesh, AXIS)
    if name != "edgc":  # which has several ranks
      sent = hlo.wire_bytes_outside_branches(text)
      assert sent == part.wire_bytes[0] + 4  # the loss
    # The compiler's own have no order, without edgc either; nor has the loss.
    late = [f"{x} = " for x in sum(unordered(run.compiled()), ())]
    assert not any(
      x in line and "= f32[] " not in line
      for line in filter(hlo.is_collective, text.splitlines())
      for x in late
    )
    return
  found, wanted = (edgc_jax.metrics(r.state) for r in (run, other))
  assert found["wire_bytes"] == wanted["wire_bytes"]
  assert run.state[0].leaves["up"].residual.values.sharding.spec[0] == AXIS


@pytest.mark.slow
@pytest.mark.parametrize("name", ["edgc", "topk"])
def test_costs_no_more_than_shard_map(name):
  """Operations, traffic and memory of a step that returns the loss, too."""
  mesh = mesh_of(data=4)
  params = jax.device_put(PARAMS, NamedSharding(mesh, P()))

  def step_of(tx, value_and_grad):
    def step(params, state, x):
      loss, gradients = value_and_grad(params, x)
      updates, state = tx.update(gradients, state, params)
      return optax.apply_updates(params, updates), state, loss

    return step

  plain = optax.chain(reducer_of(name, mesh=mesh), optax.sgd(0.5))
  step = step_of(plain, edgc_jax.value_and_grad(loss_fn, mesh))
  found = jax.jit(step).lower(params, plain.init(params), batch(0))

  def by_hand(params, x):
    cast = lambda h: jax.lax.pcast(h, AXIS, to="varying")  # noqa: E731
    loss, gradients = jax.value_and_grad(loss_fn)(cast(params), x, cast)
    return jax.lax.pmean(loss, AXIS), gradients

  tx = optax.chain(reducer_of(name), optax.sgd(0.5))
  specs = edgc_jax.state_specs(tx, PARAMS, mesh=mesh)
  on_mesh = functools.partial(jax.shard_map, mesh=mesh)
  state = jax.jit(on_mesh(tx.init, in_specs=(P(),), out_specs=specs))(params)
  step = on_mesh(
    step_of(tx, by_hand),
    in_specs=(P(), specs, P(AXIS)),
    out_specs=(P(), specs, P()),
  )
  wanted = jax.jit(step).lower(params, state, batch(0))
  costs = [cost_of(lowered.compile()) for lowered in (found, wanted)]
  np.testing.assert_array_less(costs[0], 1.03 * costs[1])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["edgc", "quantize"])
def test_vmap_is_equal_to_shard_map(name):
  tx = optax.chain(reducer_of(name), optax.sgd(0.5))
  run, other = Run(tx, PARAMS, binding="vmap"), Run(tx, PARAMS)
  for i in range(4):
    gradients = gradients_like(PARAMS, i)
    # Of dense and ranks, of windows and samples one branch runs.
    assert run.compiled(gradients).count(" conditional(") > (name == "edgc")
    found, expected = run.step(gradients), other.step(gradients)
    for leaf, update in found.items():
      off = np.abs(update - expected[leaf])
      if name == "quantize":  # few entries are rounded to the next level
        level = max(np.abs(x).max() for x in found.values()) / 127
        assert off.max() < level
        assert off.mean() < level / 100
      else:
        np.testing.assert_allclose(off, 0, atol=2e-5)
  assert run.state[0].count.shape == ()
  assert run.state[0].leaves["w"].residual.values.shape == (4, 1, 64, 96)


@pytest.mark.slow
def test_skip_nonfinite():
  """A NaN on one replica; one flag is sent for all leaves."""
  make = powersgd(optax.adam(0.1))
  tx = lambda **where: edgc_jax.skip_nonfinite(make(**where), None)  # noqa: E731
  run = ShardedRun(tx, "jit", data=4)
  run.train(1)
  params, state = run.params, run.state
  x, y = batch_at(1)
  run.step((x.at[0, 0].set(jnp.nan), y))
  assert_near(run.params, params)
  assert_near(run.state.inner_state, state.inner_state)
  values = edgc_jax.metrics(run.state)
  assert values["consecutive_skips"] == values["skipped_steps"] == 1
  assert crossing(run.compiled()).count(("all-reduce", [("pred", ())])) == 1
  run.train(1, start=1)
  assert edgc_jax.metrics(run.state)["consecutive_skips"] == 0


@pytest.mark.slow
def test_accumulate():
  """Two calls are one call on the mean of both."""
  run = ShardedRun(powersgd(optax.sgd(0.5), every=2), "jit", data=4)
  run.train(1)
  assert_near(run.params, run.first_params)
  assert run.state.accumulated.values["up"].shape == (4, 64, 128)
  assert run.state.accumulated.values["up"].sharding.spec[0] == AXIS
  run.train(1, start=1)
  alone = ShardedRun(powersgd(optax.sgd(0.5)), "jit", data=4)
  both = jax.tree.map(lambda *x: jnp.concatenate(x), batch_at(0), batch_at(1))
  assert_near(run.params, alone.step_fn(alone.params, alone.state, both)[0])
  without = edgc_jax.accumulate(alone.tx, 2)
  stacked = jax.tree.map(lambda p: jnp.stack([p] * 4), alone.params)
  with pytest.raises(ValueError, match="pass mesh= to accumulate"):
    without.update(stacked, without.init(alone.params), alone.params)


SPECS = {"w": P(None, "fsdp"), "b": P("fsdp")}


@pytest.mark.slow
@pytest.mark.parametrize(
  ("shape", "specs"), [({"data": 4}, {"w": P(), "b": P()}), (SHARDED, SPECS)]
)
def test_explicit_axes_of_shards(shape, specs, tmp_path):
  """They train as Auto ones, also after a restart."""
  params = {"w": PARAMS["w"], "b": PARAMS["b"]}

  def loss_fn(params, x):
    return jnp.mean(jnp.tanh(x @ params["w"] + params["b"]) ** 2)

  results = []
  for kind in (AxisType.Auto, AxisType.Explicit):
    mesh = mesh_of(kind, **shape)
    how = {"mesh": mesh, "param_specs": specs}
    tx = powersgd(optax.sgd(0.5, momentum=0.9), min_ratio=1)(**how)

    @jax.jit
    def step(params, opt_state, x, mesh=mesh, tx=tx):
      grads = edgc_jax.value_and_grad(loss_fn, mesh)(params, x)[1]
      updates, opt_state = tx.update(grads, opt_state, params)
      return optax.apply_updates(params, updates), opt_state

    places = jax.tree.map(lambda s, m=mesh: NamedSharding(m, s), specs)
    state = jax.device_put(params, places)
    state = state, tx.init(state)
    for i in range(3):
      state = step(*state, batch(i))
    folder = tmp_path / kind.name
    with ocp.StandardCheckpointer() as checkpointer:
      checkpointer.save(folder, state)
    again = edgc_jax.restore(folder, tx, params, **how)
    results.append(step(*again, batch(3))[0])
  assert_near(*results)
  if shape is SHARDED:
    with pytest.raises(ValueError, match="parameters that lie on the mesh"):
      tx.init(params)


@pytest.mark.parametrize(
  "shape", [BINDERS[0], pytest.param(BINDERS[1], marks=pytest.mark.slow)]
)
def test_auxiliary_outputs(shape):
  """Floats are averaged, others are of any kind, and keys differ."""

  def noisy(params, x, whole, key):
    noise = jax.random.normal(key, ())
    aux = {
      "float": 2.5, "int": 3, "bool": True, "none": None, "key": key,
      "mean": x.mean(), "rows": jnp.array(x.shape[0]), "noise": noise,
      "count": whole + 1,
    }  # fmt: skip
    return params["b"].mean() * noise + 0 * x.mean(), aux

  value = edgc_jax.value_and_grad(
    noisy, mesh_of(**shape), has_aux=True, in_axes=(0, None, 0)
  )
  (_, aux), grads = jax.jit(value)(
    PARAMS, batch(0), jnp.arange(3), jax.random.key(5)
  )
  drawn = np.unique(np.asarray(grads["b"])[:, 0])
  assert len(drawn) == shape["data"]
  np.testing.assert_allclose(aux["noise"], 96 * drawn.mean(), rtol=1e-4)
  np.testing.assert_array_equal(aux["count"], [1, 2, 3])
  np.testing.assert_allclose(aux["mean"], batch(0).mean(), rtol=1e-5)
  assert aux["rows"] == 32 // shape["data"]
  assert (aux["float"], aux["int"], aux["bool"]) == (2.5, 3, True)
  assert aux["key"].shape == ()
  assert aux["none"] is None


def test_mistakes():
  mesh = mesh_of(data=4)
  tx = edgc_jax.on_mesh(float32.powersgd(4), mesh)
  value = edgc_jax.value_and_grad(loss_fn, mesh)
  with pytest.raises(ValueError, match="4 replicas divide"):
    value(PARAMS, batch(0, rows=6))
  with pytest.raises(ValueError, match="an axis of the mesh"):
    edgc_jax.on_mesh(float32.powersgd(4, "replica"), mesh, axis_name="replica")
  with pytest.warns(RuntimeWarning, match="one replica"):
    edgc_jax.on_mesh(edgc_jax.topk(), mesh_of(data=1))
  with pytest.raises(ValueError, match="`wrt` must be None for param"):
    edgc_jax.value_and_grad(loss_fn, mesh, wrt="w")(PARAMS, batch(0))
  with pytest.raises(TypeError, match=r"real floating leaves.*\['f'\]"):
    tx.init(PARAMS | {"f": jnp.tanh})
  with pytest.raises(ValueError, match="`args` must be an array or a key"):
    edgc_jax.value_and_grad(lambda p: loss_fn(p, batch(0)), mesh)(PARAMS)
  groups = {"own": optax.chain(tx, optax.sgd(0.1)), "rest": optax.sgd(0.1)}
  labels = {"w": "own", "v": "rest", "b": "rest"}
  with pytest.raises(ValueError, match=r"a mask over \['b'\], \['v'\]"):
    optax.partition(groups, labels).init(PARAMS)


def test_specs_are_as_the_parameters_lie():
  mesh, shards = mesh_of(**SHARDED), dict.fromkeys(PARAMS, P("fsdp"))
  shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), shards)
  params = jax.device_put(PARAMS, shardings)
  for specs in (None, shards | {"w": P(None, "fsdp")}):
    tx = edgc_jax.on_mesh(float32.powersgd(4), mesh, specs)
    with pytest.raises(ValueError, match="lies on the mesh as"):
      tx.init(params)
  for specs in (shards, shardings):
    tx = edgc_jax.on_mesh(float32.powersgd(4), mesh, specs)
    spec = tx.init(params).leaves["w"].residual.values.sharding.spec
    assert spec[:2] == (AXIS, "fsdp")


def test_leaves_split_over_other_axes():
  """One leaf is split over shards, and one is whole on all of them."""
  mesh, specs = mesh_of(**SHARDED), {"w": P("fsdp"), "v": P(), "b": P()}
  tx = reducer_of("edgc", mesh=mesh, param_specs=specs)
  shards = {k: NamedSharding(mesh, spec) for k, spec in specs.items()}
  state = tx.init(jax.device_put(PARAMS, shards))
  stacked = jax.tree.map(lambda w: jnp.stack([w] * SHARDED["data"]), PARAMS)
  updates, _ = jax.eval_shape(tx.update, stacked, state)
  assert jax.tree.map(jnp.shape, updates) == jax.tree.map(jnp.shape, PARAMS)


def convolution(params, x):
  names = ("NHWC", "HWIO", "NHWC")
  x = jax.lax.conv_general_dilated(
    x, params["k"], (1, 1), "SAME", dimension_numbers=names
  )
  return jnp.mean(jnp.tanh(x @ params["w"]) ** 2)


@pytest.mark.slow
@pytest.mark.parametrize(
  ("loss_fn", "shapes", "spec"),
  [
    (convolution, {"k": (3, 3, 4, 8), "w": (8, 16), "x": (8, 8, 8, 4)}, "data"),
    (
      lambda p, x: jnp.mean(jax.lax.top_k(jnp.tanh(x @ p["w"]), 4)[0]),
      {"w": (96, 64), "x": (32, 96)},
      ("data", "fsdp"),
    ),
  ],
)
def test_what_xla_gathers_under_vmap_crosses_nothing(loss_fn, shapes, spec):
  """It is bound by `shard_map`: the rows stay."""
  mesh = mesh_of(**SHARDED)
  keys = map(jax.random.key, range(3))
  params = {
    name: 0.1 * jax.random.normal(key, shape)
    for key, (name, shape) in zip(keys, shapes.items(), strict=False)
  }
  x = params.pop("x")
  specs = {"w": P(None, "fsdp")} | ({"k": P()} if "k" in params else {})
  places = jax.tree.map(lambda s: NamedSharding(mesh, s), (specs, P(spec)))
  step = jax.jit(edgc_jax.value_and_grad(loss_fn, mesh), in_shardings=places)
  _, grads = step(params, x)
  assert_near(mean_over_replicas(grads), jax.grad(loss_fn)(params, x))
  text = step.lower(params, x).compile().as_text()
  assert crossing(text) == [("all-reduce", [("f32", ())])]


@pytest.mark.slow
@pytest.mark.parametrize("shape", BINDERS)
def test_a_constraint_over_the_replicas(shape):
  mesh = mesh_of(**shape)

  def constrained(params, x):
    x = jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P("data")))
    return jnp.mean(jnp.tanh(x @ params["w"])[jnp.arange(2)])

  with pytest.raises(ValueError, match=r"leave it out of jax.lax.with_sh"):
    edgc_jax.value_and_grad(constrained, mesh)(PARAMS, batch(0))


@pytest.mark.slow
@pytest.mark.parametrize(
  ("shape", "axes", "is_bare"),
  [
    ({"data": 4, "fsdp": 1}, "data", True),
    (SHARDED, "data", True),
    ({"pod": 2, "data": 2, "fsdp": 2}, ("pod", "data"), False),
  ],
)
def test_constraints_over_other_axes(shape, axes, is_bare):
  """As on one device, also over several axes of replicas."""
  mesh, where = mesh_of(**shape), P(None, "fsdp")
  where = where if is_bare else NamedSharding(mesh, where)

  def constrained(params, x):
    whole = jax.lax.with_sharding_constraint(params["w"], where)
    loss = loss_fn(params | {"w": whole[jnp.arange(64)]}, x)
    return loss, jax.lax.pmean(loss, axes)

  gradient = edgc_jax.value_and_grad(constrained, mesh, axes, has_aux=True)
  (loss, aux), grads = jax.jit(gradient)(PARAMS, batch(0))
  expected, whole = jax.value_and_grad(loss_fn)(PARAMS, batch(0))
  np.testing.assert_allclose((loss, aux), (expected, expected), rtol=1e-5)
  assert_near(mean_over_replicas(grads), whole)
  assert grads["b"].shape == (mesh.size // shape["fsdp"], 96)


@functools.cache
def saved_run(every, folder):
  """Returns a run after five calls, and the folder of its checkpoint."""
  run = ShardedRun(powersgd(optax.adam(1e-2), every), "jit", **SHARDED)
  run.train(5)
  with ocp.StandardCheckpointer() as checkpointer:
    checkpointer.save(folder, {"params": run.params, "opt_state": run.state})
  return run, folder


@pytest.mark.slow
@pytest.mark.parametrize(
  ("data", "fsdp", "every"), [(4, 2, 1), (1, 2, 1), (2, 4, 2)]
)
@pytest.mark.filterwarnings("ignore:the mesh has one replica")
def test_restore_on_another_mesh(tmp_path_factory, data, fsdp, every):
  """Also in the middle of accumulated calls."""
  run, folder = saved_run(every, tmp_path_factory.getbasetemp() / f"{every}")
  then = ShardedRun(
    powersgd(optax.adam(1e-2), every), "jit", data=data, fsdp=fsdp
  )
  found, restored = edgc_jax.restore(
    folder, then.tx, run.first_params, mesh=then.mesh,
    param_specs=then.param_specs,
  )  # fmt: skip
  assert_near(found, run.params)
  state = run.state
  if every > 1:
    sums = [np.asarray(s.accumulated.values["up"]) for s in (restored, state)]
    assert len(sums[0]) == data
    assert_near(*[x.reshape(-1, 64, 128).mean(0) for x in sums])
    then.params, then.state = found, restored
    then.train(1, start=5)
    restored, state = restored.inner_state, state.inner_state
  assert_near(restored[1], state[1])
  owed = [
    np.asarray(s[0].leaves["up"].residual.values).mean(0)
    for s in (restored, state)
  ]
  np.testing.assert_allclose(*owed, rtol=1e-5, atol=1e-7)
  assert int(restored[0].count) == 5 // every


def nnx_loss(model, x):
  return jnp.mean((model(x) - x) ** 2)


def nnx_step(mesh):
  """Returns a step of a module, which returns the gradients."""

  @nnx.jit
  def step(model, optimizer, x):
    _, grads = edgc_jax.value_and_grad(nnx_loss, mesh)(model, x)
    optimizer.update(model, grads)
    return grads

  return step


@pytest.mark.slow
def test_scanned_layers_have_keys_of_their_own():
  """And a state of nnx continues after `restart_reference`."""
  mesh = mesh_of(data=4)

  class Deep(nnx.Module):
    def __init__(self):
      @nnx.split_rngs(splits=3)
      @nnx.vmap
      def make(rngs):
        return nnx.Sequential(
          nnx.Linear(64, 64, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)
        )

      self.layers = make(nnx.Rngs(0))

    def __call__(self, x):
      how = {"in_axes": (nnx.Carry, 0), "out_axes": nnx.Carry}
      return nnx.scan(lambda x, layer: x + layer(x), **how)(x, self.layers)

  reducer = edgc_jax.on_mesh(float32.edgc(rank_max=8, rank_min=8), mesh)
  model, tx = Deep(), optax.chain(reducer, optax.sgd(0.01))
  optimizer, step = nnx.Optimizer(model, tx, wrt=nnx.Param), nnx_step(mesh)
  same = jnp.tile(batch(0, 8), (REPLICAS, 1))
  for grad in jax.tree.leaves(step(model, optimizer, same)):
    assert np.abs(grad[0] - grad[1]).max() > 0, "dropout"
  optimizer.opt_state = edgc_jax.restart_reference(optimizer.opt_state)
  step(model, optimizer, same)
  restarts = optimizer.opt_state[0].budget.restarts
  assert int(restarts.get_value()) == 2


class Net(nnx.Module):
  def __init__(self):
    rngs = nnx.Rngs(0)
    self.up = nnx.Linear(64, 96, rngs=rngs)
    self.norm = nnx.BatchNorm(96, momentum=0.0, rngs=rngs)
    self.drop = nnx.Dropout(0.5, rngs=rngs)
    self.down = nnx.Linear(96, 64, rngs=rngs)

  def __call__(self, x):
    return self.down(self.drop(jnp.tanh(self.norm(self.up(x)))))


@pytest.mark.slow
def test_module_is_equal_to_shard_map():
  """By hand the module is split, and its other variables are averaged."""
  mesh, reducer = mesh_of(data=4), edgc_jax.powersgd
  plain = optax.chain(edgc_jax.on_mesh(reducer(4), mesh), optax.sgd(0.1))
  by_hand = optax.chain(reducer(4), optax.sgd(0.1))
  model, step = Net(), nnx_step(mesh)
  graph, params, rest = nnx.split(Net(), nnx.Param, ...)
  specs = edgc_jax.state_specs(by_hand, params)

  def local_step(params, rest, opt_state, x):
    index = jax.lax.axis_index(AXIS)

    def is_key(x):
      return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)

    def loss_of(params):
      own = jax.tree.map(
        lambda x: jax.random.fold_in(x, index) if is_key(x) else x, rest
      )
      model = nnx.merge(graph, params, own)
      return nnx_loss(model, x), nnx.state(model, nnx.Not(nnx.Param))

    grads, left = jax.grad(loss_of, has_aux=True)(params)
    updates, opt_state = by_hand.update(grads, opt_state, params)

    def joined(x, y):
      is_float = jnp.issubdtype(x.dtype, jnp.floating)
      return jax.lax.pmean(x, AXIS) if is_float else y if is_key(x) else x

    left = jax.tree.map(joined, left, rest)
    return optax.apply_updates(params, updates), left, opt_state

  on_mesh = functools.partial(jax.shard_map, mesh=mesh, check_vma=False)
  opt_state = jax.jit(on_mesh(by_hand.init, in_specs=P(), out_specs=specs))(
    params
  )
  how = {"in_specs": (P(), P(), specs, P(AXIS)), "out_specs": (P(), P(), specs)}
  local_step = jax.jit(on_mesh(local_step, **how))
  optimizer = nnx.Optimizer(model, plain, wrt=nnx.Param)
  for i in range(3):
    grads = step(model, optimizer, batch(i))
    params, rest, opt_state = local_step(params, rest, opt_state, batch(i))
  assert grads["down"]["kernel"].shape == (REPLICAS, 96, 64)
  assert_near(nnx.state(model, nnx.Param), params)
  for kind in (nnx.BatchStat, nnx.RngCount):
    assert_near(nnx.state(model, kind), nnx.filter_state(rest, kind))
  assert int(model.drop.rngs.count.get_value()) == 3


@pytest.mark.parametrize("shape", BINDERS)
def test_outputs_by_row_come_back_by_row(shape):
  """The canonical step of Flax: logits beside the loss, and counts."""

  def loss_fn(params, x, y):
    logits = x @ params["w"]
    right = jax.lax.psum(jnp.sum(y == jnp.argmax(logits, 1)), AXIS)
    loss = jnp.square(logits).mean()
    return loss, {"logits": logits, "right": right, "none": None}

  x, y = batch(0), jnp.arange(len(batch(0))) % 3
  mesh = mesh_of(**shape)
  by_row = {"logits": 0, "right": None, "none": None}
  value = edgc_jax.value_and_grad(loss_fn, mesh, has_aux=True, aux_axes=by_row)
  (loss, aux), _ = jax.jit(value)(PARAMS, x, y)
  expected = x @ PARAMS["w"]
  np.testing.assert_allclose(aux["logits"], expected, rtol=1e-5, atol=1e-6)
  np.testing.assert_allclose(loss, jnp.square(expected).mean(), rtol=1e-5)
  assert int(aux["right"]) == int(jnp.sum(y == jnp.argmax(expected, 1)))
  # By default they are refused, and averaged only if that is asked for.
  with pytest.raises(ValueError, match="`aux_axes` must be given for outputs"):
    edgc_jax.value_and_grad(loss_fn, mesh, has_aux=True)(PARAMS, x, y)
  with pytest.raises(ValueError, match="`aux_axes` must be 0 only for outputs"):
    edgc_jax.value_and_grad(loss_fn, mesh, has_aux=True, aux_axes=0)(
      PARAMS, x, y
    )
  value = edgc_jax.value_and_grad(loss_fn, mesh, has_aux=True, aux_axes=None)
  (_, aux), _ = jax.jit(value)(PARAMS, x, y)
  parts = expected.reshape(shape["data"], -1, *expected.shape[1:])
  np.testing.assert_allclose(aux["logits"], parts.mean(0), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("shape", BINDERS)
def test_gradients_outside_of_a_jitted_step(shape):
  """Every call compiles, so the first one says so."""
  value = edgc_jax.value_and_grad(loss_fn, mesh_of(**shape))
  expected = jax.jit(value)(PARAMS, batch(0))
  with pytest.warns(RuntimeWarning, match="outside of jax.jit"):
    found = value(PARAMS, batch(0))
  assert_near(found, expected)


@pytest.mark.parametrize("wrap", [lambda tx: tx, jax.jit])
def test_leaves_that_are_missing_or_new(wrap):
  """The check comes before `shard_map`, which says less."""
  tx = edgc_jax.on_mesh(edgc_jax.powersgd(4), mesh_of(data=4))
  state, update = tx.init(PARAMS), wrap(tx.update)
  gradients = gradients_like(PARAMS, 0)
  fewer = {k: v for k, v in PARAMS.items() if k != "b"}
  for own, params, message in (
    ({k: gradients[k] for k in fewer}, PARAMS, r"`updates` .* none at \['b'\]"),
    (gradients | {"c": gradients["b"]}, PARAMS, r"`updates` .* more at \['c'"),
    (gradients, fewer, r"`params` must have .* none at \['b'\]"),
  ):
    with pytest.raises(ValueError, match=message):
      update(own, state, params)
  with pytest.raises(TypeError, match="`state` must be a ReducerState"):
    update(gradients, None, PARAMS)


def ambient_run(kind, shape, how, wrap):
  """Trains four steps; returns parameters and bytes.

  Args:
    kind: The type of all axes.
    shape: The mesh, by axis.
    how: "given" to all functions, or "ambient".
    wrap: From a chain and the arguments of the mesh to what is trained.
  """
  mesh, specs = mesh_of(kind, **shape), {"w": P(), "b": P()}
  if "fsdp" in shape:
    specs = {"w": P(None, "fsdp"), "b": P("fsdp")}
  places = jax.tree.map(lambda s: NamedSharding(mesh, s), specs)
  params = jax.device_put({key: PARAMS[key] for key in specs}, places)
  where, meshes = ({"mesh": mesh}, (mesh,)) if how == "given" else ({}, ())
  if kind is AxisType.Auto or how == "given":
    where |= {"param_specs": specs}

  def loss_of(params, x):
    return jnp.mean(jnp.tanh(x @ params["w"] + params["b"]) ** 2)

  with jax.set_mesh(mesh):
    reducer = edgc_jax.on_mesh(edgc_jax.powersgd(4, min_ratio=1), **where)
    tx = wrap(optax.chain(reducer, optax.sgd(0.5)), where)
    opt_state = tx.init(params)
    is_local = "LocalSteps" in str(jax.tree.structure(opt_state))

    @jax.jit
    def step(params, opt_state, x):
      own, extra = params, {}
      if is_local:
        own = edgc_jax.local_params(params, opt_state, *meshes)
        extra = {"local_params": own}
      value = edgc_jax.value_and_grad(loss_of, *meshes, is_local=is_local)
      _, grads = value(own, x)
      updates, opt_state = tx.update(grads, opt_state, params, **extra)
      return optax.apply_updates(params, updates), opt_state

    for i in range(4):
      x = jax.device_put(batch(i), NamedSharding(mesh, P("data")))
      params, opt_state = step(params, opt_state, x)
    assert params["w"].sharding.is_equivalent_to(places["w"], 2)
    return params, edgc_jax.metrics(opt_state)["wire_bytes"]


@pytest.mark.slow
@pytest.mark.parametrize(
  "wrap",
  [
    lambda tx, where: tx,
    lambda tx, where: edgc_jax.accumulate(tx, 2, **where),
    lambda tx, where: edgc_jax.local_steps(optax.sgd(0.1), tx, 2, **where),
  ],
  ids=("reducer", "accumulate", "local_steps"),
)
@pytest.mark.parametrize("shape", BINDERS)
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_the_mesh_of_set_mesh(kind, shape, wrap):
  """As with a given mesh; specs of Explicit axes are read from types."""
  found, expected = (
    ambient_run(kind, shape, how, wrap) for how in ("ambient", "given")
  )
  assert found[1] == expected[1] > 0
  assert_near(found[0], expected[0])


def test_an_axis_that_no_mesh_has():
  mesh = jax.make_mesh((4,), ("model",), axis_types=(AxisType.Auto,))
  tx = edgc_jax.powersgd(4)
  with jax.set_mesh(mesh):
    state = tx.init(PARAMS)  # of one replica
    with pytest.raises(ValueError, match=r"call jax.set_mesh\(mesh\) before"):
      tx.update(PARAMS, state)
    with pytest.raises(ValueError, match="'data'"):
      edgc_jax.value_and_grad(loss_fn)(PARAMS, batch(0))
  with pytest.raises(ValueError, match="`mesh` must be given, or set before"):
    edgc_jax.value_and_grad(loss_fn)(PARAMS, batch(0))
