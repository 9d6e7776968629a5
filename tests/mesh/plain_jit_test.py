"""Steps in plain `jax.jit`: a reducer that was told the mesh."""

import functools
import re
import tempfile

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from helpers import float32, meshes
from helpers.collective_order import unordered
from helpers.meshes import AXIS, replicated
from helpers.reducers import variants
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import edgc_jax
from edgc_jax.measure import hlo

pytestmark = pytest.mark.usefixtures("without_cache")

REPLICAS = 4
PARAMS = {
  "w": 0.1 * jax.random.normal(jax.random.key(1), (64, 96)),
  "v": 0.1 * jax.random.normal(jax.random.key(2), (96, 64)),
  "b": jnp.zeros(96),
}
SHARDS = {"w": P("shard"), "v": P("shard"), "b": P("shard")}
NAMES = {1: (AXIS,), 2: ("replica", "shard")}  # by number of axes
# The shards of each replica, on a mesh of two replicas of two shards.
WITHIN = {frozenset({0, 1}), frozenset({2, 3})}
# Meshes on which `value_and_grad` binds the replicas by shard_map, and by vmap.
BINDERS = ((4,), ("replica",)), ((2, 2), ("replica", "shard"))


def mesh_of(shape=(REPLICAS,), names=(AXIS,), kind=AxisType.Auto):
  return meshes.mesh_of(shape, kind, names)


def placed(mesh):
  """Returns the parameters, sharded on a mesh."""
  shardings = jax.tree.map(lambda s: NamedSharding(mesh, s), SHARDS)
  return jax.device_put(PARAMS, shardings)


def loss_fn(params, x, cast=lambda h: h):
  """Has a scan, whose carry needs a cast of its type in `shard_map`."""

  def body(h, _):
    return jnp.tanh((h + x) @ params["w"] @ params["v"]), None

  h, _ = jax.lax.scan(body, cast(jnp.zeros(x.shape)), None, length=2)
  h = jnp.tanh((h + x) @ params["w"] + params["b"]) @ params["v"]
  return jnp.mean((h - x) ** 2)


def batch(step, rows=32):
  return jax.random.normal(jax.random.key(step), (rows, 64))


def train_plain(tx, mesh, params=PARAMS, axis_name=AXIS, steps=4):
  """Trains in plain jit; returns parameters, state and the step."""

  @jax.jit
  def step(params, opt_state, x):
    gradient = edgc_jax.value_and_grad(loss_fn, mesh, axis_name)
    loss, grads = gradient(params, x)
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss

  if params is PARAMS:  # else the second step would compile, too
    params = replicated(params, mesh)
  opt_state = jax.jit(tx.init)(params)
  for i in range(steps):
    params, opt_state, _ = step(params, opt_state, batch(i))
  return params, opt_state, step


def options_of(name):
  options = variants()[name][""]
  return {**options, "bits": 8} if name == "quantize" else options


@functools.cache
def train_by_hand(name, shape=(REPLICAS,)):
  """Trains with all axes bound, gathering any shards where they are read."""
  names = NAMES[len(shape)]
  mesh, (replicas, *shards) = mesh_of(shape, names), names
  own = SHARDS if shards else jax.tree.map(lambda _: P(), SHARDS)
  reducer = edgc_jax.REDUCERS[name](axis_name=replicas, **options_of(name))
  tx = optax.chain(reducer, optax.sgd(0.5))
  specs = edgc_jax.state_specs(tx, PARAMS, replicas, mesh=mesh, param_specs=own)

  def local_loss(params, x):
    gather = lambda p: jax.lax.all_gather(p, "shard", axis=0, tiled=True)  # noqa: E731
    whole = jax.tree.map(gather, params) if shards else params
    cast = lambda h: jax.lax.pcast(h, names, to="varying")  # noqa: E731
    return loss_fn(whole, x, cast) / (mesh.size // shape[0])

  def step(params, opt_state, x):
    local = jax.lax.pcast(params, replicas, to="varying")
    loss, grads = jax.value_and_grad(local_loss)(local, x)
    updates, opt_state = tx.update(grads, opt_state, params)
    loss = edgc_jax.after_update(loss, opt_state)
    loss = jax.lax.psum(loss, "shard") if shards else loss
    params = optax.apply_updates(params, updates)
    return params, opt_state, jax.lax.pmean(loss, replicas)

  on_mesh = functools.partial(jax.shard_map, mesh=mesh)
  init = on_mesh(tx.init, in_specs=(own,), out_specs=specs)
  step = on_mesh(
    step, in_specs=(own, specs, P(names)), out_specs=(own, specs, P())
  )
  params = placed(mesh) if shards else replicated(PARAMS, mesh)
  opt_state, step = jax.jit(init)(params), jax.jit(step)
  for i in range(4):
    params, opt_state, _ = step(params, opt_state, batch(i))
  return params, opt_state, step


def compiled(step, params, opt_state, x):
  return step.lower(params, opt_state, x).compile()


def sent_between(text, groups=None):
  """Returns the collectives of a program, except those inside the groups.

  Each as its name, and the types of what it returns.
  """
  found = []
  for line in filter(hlo.is_collective, text.splitlines()):
    own = set(map(frozenset, hlo.groups_of(line)))
    if groups is None or own != groups:
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


@pytest.mark.slow
@pytest.mark.parametrize(
  ("name", "shape"), [("edgc", (4,)), ("topk", (4,)), ("edgc", (2, 2))]
)
def test_equal_to_shard_map(name, shape):
  """The same parameters, and the same messages between the replicas."""
  names = NAMES[len(shape)]
  mesh, has_shards = mesh_of(shape, names), len(shape) > 1
  own = {"param_specs": SHARDS} if has_shards else {}
  make = edgc_jax.REDUCERS[name]
  reducer = make(axis_name=names[0], mesh=mesh, **own, **options_of(name))
  first = placed(mesh) if has_shards else PARAMS
  params, state, step = train_plain(
    optax.chain(reducer, optax.sgd(0.5)), mesh, first, names[0]
  )
  expected, other, step_by_hand = train_by_hand(name, shape)
  assert_near(params, expected)
  programs = (
    compiled(step, params, state, batch(0)),
    compiled(step_by_hand, expected, other, batch(0)),
  )
  inside = WITHIN if has_shards else None
  sent, sent_by_hand = (sent_between(p.as_text(), inside) for p in programs)
  assert sent == sent_by_hand
  if has_shards:
    return
  costs = [cost_of(program) for program in programs]
  np.testing.assert_array_less(costs[0], 1.03 * costs[1])
  found, wanted = map(edgc_jax.metrics, (state, other))
  assert found["wire_bytes"] == wanted["wire_bytes"]
  assert state[0].leaves["w"].residual.sharding.spec[0] == AXIS


@pytest.mark.slow
def test_skip_nonfinite():
  """A NaN on one replica; one flag is sent for all leaves."""
  mesh = mesh_of()
  chain = optax.chain(float32.powersgd(4, mesh=mesh), optax.adam(0.1))
  tx = edgc_jax.skip_nonfinite(chain, None)
  params, state, step = train_plain(tx, mesh, steps=1)
  broken = batch(1).at[0, 0].set(jnp.nan)
  same, skipped, _ = step(params, state, broken)
  assert_near(same, params)
  assert_near(skipped.inner_state, state.inner_state)
  values = edgc_jax.metrics(skipped)
  assert values["consecutive_skips"] == 1
  assert values["skipped_steps"] == 1
  sent = sent_between(compiled(step, params, state, broken).as_text())
  assert len([s for s in sent if s == ("all-reduce", [("pred", ())])]) == 1
  _, state, _ = step(params, skipped, batch(1))
  assert edgc_jax.metrics(state)["consecutive_skips"] == 0


@pytest.mark.slow
def test_accumulate():
  """Two calls are one call on the mean of both."""
  mesh = mesh_of()
  chain = optax.chain(float32.powersgd(4, mesh=mesh), optax.sgd(0.5))
  tx = edgc_jax.accumulate(chain, 2, mesh=mesh)
  params, state, step = train_plain(tx, mesh, steps=1)
  assert_near(params, PARAMS)
  assert state.accumulated.values["w"].shape == (4, 64, 96)
  assert state.accumulated.values["w"].sharding.spec[0] == AXIS
  params, state, _ = step(params, state, batch(1))
  grads = [
    edgc_jax.value_and_grad(loss_fn, mesh)(PARAMS, batch(i))[1]
    for i in range(2)
  ]
  mean = jax.tree.map(lambda *g: sum(g) / 2, *grads)
  updates, _ = jax.jit(chain.update)(mean, chain.init(PARAMS), PARAMS)
  assert_near(params, optax.apply_updates(PARAMS, updates))
  without = edgc_jax.accumulate(chain, 2)
  with pytest.raises(ValueError, match="pass mesh= to accumulate"):
    train_plain(without, mesh, steps=1)


@pytest.mark.slow
def test_explicit_axes():
  mesh = mesh_of(kind=AxisType.Explicit)
  params = replicated(PARAMS, mesh)
  tx = optax.chain(float32.powersgd(4, mesh=mesh), optax.sgd(0.5))
  found = train_plain(tx, mesh, params)[0]
  auto = mesh_of()
  tx = optax.chain(float32.powersgd(4, mesh=auto), optax.sgd(0.5))
  assert_near(found, train_plain(tx, auto)[0])


@pytest.mark.slow
def test_explicit_axes_of_shards():
  params = {"w": PARAMS["w"], "b": PARAMS["b"]}
  specs = {"w": P(None, "shard"), "b": P("shard")}

  def loss_fn(params, x):
    return jnp.mean(jnp.tanh(x @ params["w"] + params["b"]) ** 2)

  def train(mesh):
    how = {"mesh": mesh, "param_specs": specs}
    tx = optax.chain(
      float32.powersgd(4, min_ratio=1, **how), optax.sgd(0.5, momentum=0.9)
    )

    @jax.jit
    def step(params, opt_state, x):
      gradient = edgc_jax.value_and_grad(loss_fn, mesh, AXIS)
      updates, opt_state = tx.update(gradient(params, x)[1], opt_state, params)
      return optax.apply_updates(params, updates), opt_state

    places = jax.tree.map(lambda s: NamedSharding(mesh, s), specs)
    state = jax.device_put(params, places), None
    state = state[0], tx.init(state[0])
    for i in range(3):
      state = step(*state, batch(i))
    with tempfile.TemporaryDirectory() as folder:
      with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(f"{folder}/saved", state)
      again = edgc_jax.restore(
        f"{folder}/saved", tx, params, **how, axis_name=AXIS
      )
    return step(*again, batch(3))[0], tx

  shape = (2, 2), (AXIS, "shard")
  found, tx = train(mesh_of(*shape, kind=AxisType.Explicit))
  assert_near(found, train(mesh_of(*shape))[0])
  with pytest.raises(ValueError, match="parameters that lie on the mesh"):
    tx.init(params)


def test_keys_differ_by_replica_and_aux_is_averaged():
  mesh = mesh_of()

  def noisy(params, x, whole, key):
    noise = jax.random.normal(key, ())
    loss = params["b"].mean() * noise + 0 * x.mean()
    return loss, {"noise": noise, "count": whole + 1}

  value = edgc_jax.value_and_grad(
    noisy, mesh, has_aux=True, in_axes=(0, None, 0)
  )
  (_, aux), grads = jax.jit(value)(
    PARAMS, batch(0), jnp.arange(3), jax.random.key(5)
  )
  drawn = np.unique(np.asarray(grads["b"])[:, 0])
  assert len(drawn) == REPLICAS
  np.testing.assert_allclose(aux["noise"], 96 * drawn.mean(), rtol=1e-4)
  np.testing.assert_array_equal(aux["count"], [1, 2, 3])


def test_mistakes():
  mesh = mesh_of()
  tx = float32.powersgd(4, mesh=mesh)
  state = tx.init(PARAMS)
  with pytest.raises(ValueError, match=r"stacked as .*value_and_grad"):
    tx.update(PARAMS, state, PARAMS)
  value = edgc_jax.value_and_grad(loss_fn, mesh)
  with pytest.raises(ValueError, match="4 replicas divide"):
    value(PARAMS, batch(0, rows=6))
  with pytest.raises(TypeError, match=r"jax.random.key"):
    value(PARAMS, jax.random.PRNGKey(0))
  with pytest.raises(ValueError, match="an axis of the mesh"):
    edgc_jax.value_and_grad(loss_fn, mesh, "replica")
  with pytest.raises(ValueError, match="an axis of the mesh"):
    float32.powersgd(4, "replica", mesh=mesh)
  with pytest.raises(ValueError, match="`param_specs` must be None"):
    float32.powersgd(4, param_specs=P())
  with pytest.warns(RuntimeWarning, match="one replica"):
    edgc_jax.topk(mesh=mesh_of((1,)))
  with pytest.raises(ValueError, match="`wrt` must be None for param"):
    edgc_jax.value_and_grad(loss_fn, mesh, wrt="w")(PARAMS, batch(0))
  with pytest.raises(ValueError, match="`in_axes` must be 0 or None"):
    edgc_jax.value_and_grad(loss_fn, mesh, in_axes=([0],))(PARAMS, batch(0))
  with pytest.raises(TypeError, match=r"real floating leaves.*\['f'\]"):
    tx.init(PARAMS | {"f": jnp.tanh})
  with pytest.raises(ValueError, match="`args` must be an array or a key"):
    edgc_jax.value_and_grad(lambda p: loss_fn(p, batch(0)), mesh)(PARAMS)
  groups = {"own": optax.chain(tx, optax.sgd(0.1)), "rest": optax.sgd(0.1)}
  labels = {"w": "own", "v": "rest", "b": "rest"}
  with pytest.raises(ValueError, match=r"a mask over \['b'\], \['v'\]"):
    optax.partition(groups, labels).init(PARAMS)


def test_specs_are_as_the_parameters_lie():
  mesh = mesh_of((2, 2), (AXIS, "shard"))
  shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), SHARDS)
  params = placed(mesh)
  for specs in (None, SHARDS | {"w": P(None, "shard")}):
    tx = float32.powersgd(4, mesh=mesh, param_specs=specs)
    with pytest.raises(ValueError, match="lies on the mesh as"):
      tx.init(params)
  for specs in (SHARDS, shardings):
    tx = float32.powersgd(4, mesh=mesh, param_specs=specs)
    spec = tx.init(params).leaves["w"].residual.sharding.spec
    assert spec[0] == (AXIS, "shard")


def adam_on(shape, every):
  """Returns a mesh, and Adam on it after `every` accumulated calls."""
  mesh = mesh_of(shape, ("replica", "shard"))
  where = {"mesh": mesh, "param_specs": SHARDS}
  reducer = float32.powersgd(4, "replica", **where)
  tx = optax.chain(reducer, optax.adam(1e-2))
  if every > 1:
    tx = edgc_jax.accumulate(tx, every, "replica", **where)
  return mesh, tx


@functools.cache
def saved_run(every, folder):
  """Returns parameters and state after five calls, their folder, the step."""
  mesh, tx = adam_on((2, 2), every)
  params, state, step = train_plain(tx, mesh, placed(mesh), "replica", 5)
  folder = f"{folder}/every-{every}"
  with ocp.StandardCheckpointer() as checkpointer:
    checkpointer.save(folder, {"params": params, "opt_state": state})
  return params, state, folder, step


@pytest.fixture(scope="module")
def folder():
  with tempfile.TemporaryDirectory() as folder:
    yield folder


@pytest.mark.slow
def test_nothing_but_factors_crosses_the_slow_axis(folder):
  mesh, tx = adam_on((2, 2), 1)
  params, state, _, step = saved_run(1, folder)
  assert params["w"].sharding.spec[0] == "shard"
  text = step.lower(params, state, batch(0)).compile().as_text()
  between = [
    line.strip()
    for line in filter(hlo.is_collective, text.splitlines())
    if set(map(frozenset, hlo.groups_of(line))) != WITHIN
  ]
  sent = sum(
    4 * np.prod(shape, dtype=int)
    for line in between
    for _, shape in hlo.arrays_of(line.split(" all-reduce(")[0])
  )
  (part,) = edgc_jax.describe(tx, PARAMS, mesh=mesh, param_specs=SHARDS).parts
  # The compiler's own have no order, without edgc either; nor has the loss.
  factors = {
    line.split(" = ")[0].strip("% ").removeprefix("ROOT %")
    for line in between
    if "= f32[] " not in line
  }
  assert factors
  assert not factors & set(sum(unordered(text), ()))
  # Checks and the loss take some values more.
  assert part.wire_bytes[0] <= sent <= part.wire_bytes[0] + 100
  # One device computes the same, up to what two shards' own factors lose.
  alone = optax.chain(edgc_jax.allreduce(mesh=mesh_of((2,))), optax.sgd(0.5))
  sharded = edgc_jax.allreduce("replica", mesh=mesh, param_specs=SHARDS)
  found = train_plain(
    optax.chain(sharded, optax.sgd(0.5)), mesh,
    placed(mesh), "replica",
  )[0]  # fmt: skip
  assert_near(found, train_plain(alone, mesh_of((2,)))[0])


@pytest.mark.slow
def test_convolutions_gather_nothing():
  """They are bound by `shard_map`: the rows of an image stay."""
  mesh = mesh_of((2, 2), ("replica", "shard"))
  params = {"k": 0.1 * jnp.ones((3, 3, 4, 8)), "w": jnp.ones((8, 16))}
  specs = {"k": P(), "w": P(None, "shard")}

  def loss_fn(params, x):
    names = ("NHWC", "HWIO", "NHWC")
    x = jax.lax.conv_general_dilated(
      x, params["k"], (1, 1), "SAME", dimension_numbers=names
    )
    return jnp.mean(jnp.tanh(x @ params["w"]) ** 2)

  images = jax.random.normal(jax.random.key(0), (8, 8, 8, 4))
  gradient = edgc_jax.value_and_grad(loss_fn, mesh, "replica")
  shardings = jax.tree.map(
    lambda spec: NamedSharding(mesh, spec), (specs, P("replica"))
  )
  step = jax.jit(gradient, in_shardings=shardings)
  _, grads = step(params, images)
  expected = jax.grad(loss_fn)(params, images)
  assert_near(jax.tree.map(lambda g: g.mean(0), grads), expected)
  text = step.lower(params, images).compile().as_text()
  assert sent_between(text, WITHIN) == [("all-reduce", [("f32", ())])]


@pytest.mark.slow
def test_top_k_gathers_nothing():
  mesh = mesh_of((2, 2), ("replica", "shard"))

  def loss_fn(params, x):
    return jnp.mean(jax.lax.top_k(jnp.tanh(x @ params["w"]), 4)[0])

  place = lambda spec: NamedSharding(mesh, spec)  # noqa: E731
  params = jax.device_put(PARAMS, jax.tree.map(place, SHARDS))
  x = jax.device_put(batch(0), place(P(("replica", "shard"))))
  step = jax.jit(edgc_jax.value_and_grad(loss_fn, mesh, "replica"))
  text = step.lower(params, x).compile().as_text()
  crossing = [
    line for line in filter(hlo.is_collective, text.splitlines())
    if "source_target_pairs" not in line
    and set(map(frozenset, hlo.groups_of(line)))
    != WITHIN
  ]  # fmt: skip
  assert len(crossing) == 1
  assert "f32[] all-reduce(" in crossing[0]


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "names"), BINDERS)
def test_auxiliary_outputs(shape, names):
  """Of any kind, with either way of binding the axis."""
  mesh = mesh_of(shape, names)

  def loss_fn(params, x, key):
    aux = {
      "float": 2.5, "int": 3, "bool": True, "none": None, "key": key,
      "mean": x.mean(), "rows": jnp.array(x.shape[0]),
    }  # fmt: skip
    return params["b"].sum() * x.mean(), aux

  gradient = edgc_jax.value_and_grad(loss_fn, mesh, "replica", has_aux=True)
  (_, aux), _ = jax.jit(gradient)(PARAMS, batch(0), jax.random.key(1))
  np.testing.assert_allclose(aux["mean"], batch(0).mean(), rtol=1e-5)
  assert aux["rows"] == 32 // shape[0]
  assert (aux["float"], aux["int"], aux["bool"]) == (2.5, 3, True)
  assert aux["key"].shape == ()
  assert aux["none"] is None


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "names"), BINDERS)
def test_a_constraint_over_the_replicas(shape, names):
  mesh = mesh_of(shape, names)
  where = NamedSharding(mesh, P("replica"))

  def constrained(params, x):
    x = jax.lax.with_sharding_constraint(x, where)
    return jnp.mean(jnp.tanh(x @ params["w"])[jnp.arange(2)])

  with pytest.raises(ValueError, match=r"leave it out of jax.lax.with_sh"):
    edgc_jax.value_and_grad(constrained, mesh, "replica")(PARAMS, batch(0))


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(4, 1), (2, 2)])
def test_bare_specs(shape):
  mesh = mesh_of(shape, ("replica", "shard"))

  def constrained(params, x):
    w = jax.lax.with_sharding_constraint(params["w"], P(None, "shard"))
    return loss_fn(params | {"w": w[jnp.arange(64)]}, x)

  gradient = jax.jit(edgc_jax.value_and_grad(constrained, mesh, "replica"))
  loss, _ = gradient(PARAMS, batch(0))
  np.testing.assert_allclose(loss, loss_fn(PARAMS, batch(0)), rtol=1e-5)


@pytest.mark.slow
def test_several_axes_and_constraints():
  """As on one device, with constraints over the other axis."""
  mesh = mesh_of((2, 2, 2), ("pod", "data", "shard"))
  where = NamedSharding(mesh, P(None, "shard"))

  def constrained(params, x):
    whole = jax.lax.with_sharding_constraint(params["w"], where)
    loss = loss_fn(params | {"w": whole[jnp.arange(64)]}, x)
    return loss, jax.lax.pmean(loss, ("pod", "data"))

  axes = ("pod", "data")
  gradient = edgc_jax.value_and_grad(constrained, mesh, axes, has_aux=True)
  (loss, aux), grads = jax.jit(gradient)(PARAMS, batch(0))
  expected, whole = jax.value_and_grad(loss_fn)(PARAMS, batch(0))
  np.testing.assert_allclose((loss, aux), (expected, expected), rtol=1e-5)
  assert_near(jax.tree.map(lambda g: g.mean(0), grads), whole)
  assert grads["b"].shape == (4, 96)


@pytest.mark.slow
@pytest.mark.parametrize(
  ("shape", "every"),
  [((4, 2), 1), ((1, 2), 1), ((2, 4), 2)],
)
def test_restore_on_another_mesh(folder, shape, every):
  """Also in the middle of accumulated calls."""
  params, state, saved, _ = saved_run(every, folder)
  if shape[0] == 1:
    with pytest.warns(RuntimeWarning, match="one replica"):
      mesh, tx = adam_on(shape, every)
  else:
    mesh, tx = adam_on(shape, every)
  found, restored = edgc_jax.restore(
    saved, tx, PARAMS, mesh=mesh, axis_name="replica", param_specs=SHARDS
  )
  assert_near(found, params)
  if every > 1:
    sums = [np.asarray(s.accumulated.values["w"]) for s in (restored, state)]
    assert_near(*[x.reshape(-1, 64, 96).mean(0) for x in sums])
    assert len(sums[0]) == shape[0]
    train_plain_step = train_plain(tx, mesh, found, "replica", 0)[2]
    train_plain_step(found, restored, batch(5))
    restored, state = restored.inner_state, state.inner_state
  assert_near(restored[1], state[1])

  def owed(state, replicas):
    residual = np.asarray(state[0].leaves["w"].residual)
    return residual.reshape(replicas, *PARAMS["w"].shape).mean(0)

  np.testing.assert_allclose(
    owed(restored, shape[0]), owed(state, 2), rtol=1e-5, atol=1e-7
  )
  assert int(restored[0].count) == 5 // every


class Net(nnx.Module):
  def __init__(self, rngs):
    self.up = nnx.Linear(64, 96, rngs=rngs)
    self.norm = nnx.BatchNorm(96, momentum=0.0, rngs=rngs)
    self.drop = nnx.Dropout(0.5, rngs=rngs)
    self.down = nnx.Linear(96, 64, rngs=rngs)

  def __call__(self, x):
    return self.down(self.drop(jnp.tanh(self.norm(self.up(x)))))


def nnx_loss(model, x):
  return jnp.mean((model(x) - x) ** 2)


def nnx_step(mesh):
  """Returns a step of a module, which returns the loss and the gradients."""

  @nnx.jit
  def step(model, optimizer, x):
    loss, grads = edgc_jax.value_and_grad(nnx_loss, mesh)(model, x)
    optimizer.update(model, grads)
    return loss, grads

  return step


@pytest.mark.slow
def test_statistics_and_counts_are_kept():
  mesh = mesh_of()
  model = Net(nnx.Rngs(0))
  tx = optax.chain(float32.powersgd(4, mesh=mesh), optax.sgd(0.1))
  optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)

  step = nnx_step(mesh)
  same = jnp.tile(batch(0, 8), (REPLICAS, 1))  # for each replica
  hidden = model.up(same[:8])
  _, grads = step(model, optimizer, same)
  np.testing.assert_allclose(
    model.norm.mean.get_value(), hidden.mean(0), atol=1e-5
  )
  assert int(model.drop.rngs.count.get_value()) == 1
  kernel = np.asarray(grads["down"]["kernel"].get_value())
  assert kernel.shape == (REPLICAS, 96, 64)
  assert np.abs(kernel[0] - kernel[1]).max() > 0, "dropout"
  first = float(step(model, optimizer, batch(1))[0])
  for _ in range(20):
    last = float(step(model, optimizer, batch(1))[0])
  assert last < first
  assert int(model.drop.rngs.count.get_value()) == 22


@pytest.mark.slow
def test_scanned_layers_have_keys_of_their_own():
  """And a state of nnx continues after `restart_reference`."""
  mesh = mesh_of()

  class Deep(nnx.Module):
    def __init__(self):
      split = nnx.split_rngs(splits=3)

      @split
      @nnx.vmap
      def make(rngs):
        return nnx.Sequential(
          nnx.Linear(64, 64, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)
        )

      self.layers = make(nnx.Rngs(0))

    def __call__(self, x):
      return nnx.scan(
        lambda x, layer: x + layer(x), in_axes=(nnx.Carry, 0),
        out_axes=nnx.Carry,
      )(x, self.layers)  # fmt: skip

  model = Deep()
  tx = optax.chain(
    float32.edgc(rank_max=8, rank_min=8, mesh=mesh), optax.sgd(0.01)
  )
  optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)

  step = nnx_step(mesh)
  same = jnp.tile(batch(0, 8), (REPLICAS, 1))
  for grad in jax.tree.leaves(step(model, optimizer, same)[1]):
    assert np.abs(grad[0] - grad[1]).max() > 0, "dropout"
  optimizer.opt_state = edgc_jax.restart_reference(optimizer.opt_state)
  step(model, optimizer, same)
  restarts = optimizer.opt_state[0].budget.restarts
  assert int(restarts.get_value()) == 2


@pytest.mark.slow
def test_module_is_equal_to_shard_map():
  """By hand the module is split, and its other variables are averaged."""
  mesh, reducer = mesh_of(), edgc_jax.powersgd
  plain = optax.chain(reducer(4, mesh=mesh), optax.sgd(0.1))
  by_hand = optax.chain(reducer(4), optax.sgd(0.1))
  model, other = Net(nnx.Rngs(0)), Net(nnx.Rngs(0))

  step = nnx_step(mesh)
  graph, params, rest = nnx.split(other, nnx.Param, ...)
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
    left = jax.tree.map(
      lambda x, y: (
        jax.lax.pmean(x, AXIS)
        if jnp.issubdtype(x.dtype, jnp.floating)
        else y if is_key(x) else x
      ),
      left, rest,
    )  # fmt: skip
    return optax.apply_updates(params, updates), left, opt_state

  on_mesh = functools.partial(jax.shard_map, mesh=mesh, check_vma=False)
  opt_state = jax.jit(on_mesh(by_hand.init, in_specs=P(), out_specs=specs))(
    params
  )
  local_step = jax.jit(
    on_mesh(
      local_step,
      in_specs=(P(), P(), specs, P(AXIS)),
      out_specs=(P(), P(), specs),
    )
  )
  optimizer = nnx.Optimizer(model, plain, wrt=nnx.Param)
  for i in range(3):
    step(model, optimizer, batch(i))
    params, rest, opt_state = local_step(params, rest, opt_state, batch(i))
  assert_near(nnx.state(model, nnx.Param), params)
  left = nnx.filter_state(rest, nnx.BatchStat)
  assert_near(nnx.state(model, nnx.BatchStat), left)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["edgc", "quantize"])
def test_equal_to_shard_map_in_vmap(name):
  tx = optax.chain(edgc_jax.REDUCERS[name](**options_of(name)), optax.sgd(0.5))
  axes = edgc_jax.state_axes(tx, PARAMS)
  size = {"axis_name": AXIS, "axis_size": REPLICAS}
  init = jax.vmap(tx.init, in_axes=None, out_axes=axes, **size)
  update = jax.vmap(
    tx.update, in_axes=(0, axes, None), out_axes=(None, axes), axis_name=AXIS
  )

  @jax.jit
  def step(params, opt_state, x):
    parts = x.reshape(REPLICAS, -1, 64)
    grads = jax.vmap(jax.grad(loss_fn), in_axes=(None, 0))(params, parts)
    updates, opt_state = update(grads, opt_state, params)
    largest = jnp.stack([jnp.abs(u).max() for u in jax.tree.leaves(updates)])
    return optax.apply_updates(params, updates), opt_state, largest.max()

  params, opt_state = PARAMS, jax.jit(init)(PARAMS)
  text = step.lower(params, opt_state, batch(0)).compile().as_text()
  # Of dense and ranks, of windows and samples one branch runs.
  assert text.count(" conditional(") > (name == "edgc")
  largest = []
  for i in range(4):
    params, opt_state, size = step(params, opt_state, batch(i))
    largest.append(float(size))
  expected = train_by_hand(name)[0]
  if name == "quantize":  # few entries are rounded to the next level
    level = max(largest) / 127
    off = jax.tree.map(lambda a, b: np.abs(a - b), params, expected)
    off = np.concatenate([np.ravel(x) for x in jax.tree.leaves(off)])
    assert off.max() < level
    assert off.mean() < level / 100
  else:
    assert_near(params, expected)
  assert opt_state[0].count.shape == ()
  assert opt_state[0].leaves["w"].residual.shape == (4, 64, 96)
