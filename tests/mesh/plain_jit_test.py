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
from absl.testing import absltest, parameterized
from flax import nnx
from helpers import float32
from helpers.collective_order import unordered
from helpers.meshes import AXIS, replicated
from helpers.reducers import variants
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import edgc_jax
from edgc_jax.measure import hlo

REPLICAS = 4
PARAMS = {
  "w": 0.1 * jax.random.normal(jax.random.key(1), (64, 96)),
  "v": 0.1 * jax.random.normal(jax.random.key(2), (96, 64)),
  "b": jnp.zeros(96),
}
SHARDS = {"w": P("shard"), "v": P("shard"), "b": P("shard")}
# The shards of each replica, on a mesh of two replicas of two shards.
WITHIN = {frozenset({0, 1}), frozenset({2, 3})}
# Meshes on which `value_and_grad` binds the replicas by shard_map, and by vmap.
BINDERS = ((4,), ("replica",)), ((2, 2), ("replica", "shard"))


def mesh_of(shape=(REPLICAS,), names=(AXIS,), kind=AxisType.Auto):
  devices = jax.devices()[: int(np.prod(shape))]
  return jax.make_mesh(shape, names, (kind,) * len(shape), devices=devices)


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


def train_by_hand(tx, mesh, steps=4):
  """Trains with the axis bound by `shard_map`."""
  specs = edgc_jax.state_specs(tx, PARAMS)

  def step(params, opt_state, x):
    local = jax.lax.pcast(params, AXIS, to="varying")

    cast = lambda h: jax.lax.pcast(h, AXIS, to="varying")  # noqa: E731
    grads = jax.grad(loss_fn)(local, x, cast)
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state

  init = jax.shard_map(tx.init, mesh=mesh, in_specs=P(), out_specs=specs)
  step = jax.shard_map(
    step, mesh=mesh, in_specs=(P(), specs, P(AXIS)), out_specs=(P(), specs)
  )
  params, step = replicated(PARAMS, mesh), jax.jit(step)
  opt_state = jax.jit(init)(params)
  for i in range(steps):
    params, opt_state = step(params, opt_state, batch(i))
  return params, opt_state, step


def train_sharded_by_hand(tx, mesh, params, steps=4):
  """Trains with all axes bound, gathering the shards where they are read."""
  specs = edgc_jax.state_specs(
    tx, params, "replica", mesh=mesh, param_specs=SHARDS
  )

  def local_loss(params, x):
    whole = jax.tree.map(
      lambda p: jax.lax.all_gather(p, "shard", axis=0, tiled=True), params
    )
    cast = lambda h: jax.lax.pcast(h, ("replica", "shard"), to="varying")  # noqa: E731
    return loss_fn(whole, x, cast) / jax.lax.axis_size("shard")

  def step(params, opt_state, x):
    local = jax.lax.pcast(params, "replica", to="varying")
    loss, grads = jax.value_and_grad(local_loss)(local, x)
    updates, opt_state = tx.update(grads, opt_state, params)
    loss = jax.lax.psum(edgc_jax.after_update(loss, opt_state), "shard")
    params = optax.apply_updates(params, updates)
    return params, opt_state, jax.lax.pmean(loss, "replica")

  on_mesh = functools.partial(jax.shard_map, mesh=mesh)
  init = on_mesh(tx.init, in_specs=(SHARDS,), out_specs=specs)
  rows = P(("replica", "shard"))
  step = on_mesh(
    step, in_specs=(SHARDS, specs, rows), out_specs=(SHARDS, specs, P())
  )
  opt_state, step = jax.jit(init)(params), jax.jit(step)
  for i in range(steps):
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


class ReplicasTest(parameterized.TestCase):
  @parameterized.parameters("edgc", "topk")
  @pytest.mark.slow
  def test_equal_to_shard_map(self, name):
    mesh, options = mesh_of(), variants()[name][""]
    make = edgc_jax.REDUCERS[name]
    plain = optax.chain(make(mesh=mesh, **options), optax.sgd(0.5))
    by_hand = optax.chain(make(**options), optax.sgd(0.5))
    params, state, step = train_plain(plain, mesh)
    expected, other, step_by_hand = train_by_hand(by_hand, mesh)
    assert_near(params, expected)
    programs = (
      compiled(step, params, state, batch(0)),
      compiled(step_by_hand, params, other, batch(0)),
    )
    sent, sent_by_hand = (sent_between(p.as_text()) for p in programs)
    # The mean of the loss comes with the plain form.
    self.assertEqual(
      sent, sorted([*sent_by_hand, ("all-reduce", [("f32", ())])])
    )
    costs = [cost_of(program) for program in programs]
    np.testing.assert_array_less(costs[0], 1.03 * costs[1])
    self.assertEqual(
      edgc_jax.metrics(state)["wire_bytes"],
      edgc_jax.metrics(other)["wire_bytes"],
    )
    residual = state[0].leaves["w"].residual
    self.assertEqual(residual.sharding.spec[0], AXIS)

  @pytest.mark.slow
  def test_skip_nonfinite(self):
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
    self.assertEqual(values["consecutive_skips"], 1)
    self.assertEqual(values["skipped_steps"], 1)
    sent = sent_between(compiled(step, params, state, broken).as_text())
    self.assertLen([s for s in sent if s == ("all-reduce", [("pred", ())])], 1)
    _, state, _ = step(params, skipped, batch(1))
    self.assertEqual(edgc_jax.metrics(state)["consecutive_skips"], 0)

  @pytest.mark.slow
  def test_accumulate(self):
    """Two calls are one call on the mean of both."""
    mesh = mesh_of()
    chain = optax.chain(float32.powersgd(4, mesh=mesh), optax.sgd(0.5))
    tx = edgc_jax.accumulate(chain, 2, mesh=mesh)
    params, state, step = train_plain(tx, mesh, steps=1)
    assert_near(params, PARAMS)
    self.assertEqual(state.accumulated.values["w"].shape, (4, 64, 96))
    self.assertEqual(state.accumulated.values["w"].sharding.spec[0], AXIS)
    params, state, _ = step(params, state, batch(1))
    grads = [
      edgc_jax.value_and_grad(loss_fn, mesh)(PARAMS, batch(i))[1]
      for i in range(2)
    ]
    mean = jax.tree.map(lambda *g: sum(g) / 2, *grads)
    updates, _ = jax.jit(chain.update)(mean, chain.init(PARAMS), PARAMS)
    assert_near(params, optax.apply_updates(PARAMS, updates))
    without = edgc_jax.accumulate(chain, 2)
    with self.assertRaisesRegex(ValueError, "pass mesh= to accumulate"):
      train_plain(without, mesh, steps=1)

  @pytest.mark.slow
  def test_explicit_axes(self):
    mesh = mesh_of(kind=AxisType.Explicit)
    params = replicated(PARAMS, mesh)
    tx = optax.chain(float32.powersgd(4, mesh=mesh), optax.sgd(0.5))
    found = train_plain(tx, mesh, params)[0]
    auto = mesh_of()
    tx = optax.chain(float32.powersgd(4, mesh=auto), optax.sgd(0.5))
    assert_near(found, train_plain(tx, auto)[0])

  @pytest.mark.slow
  def test_explicit_axes_of_shards(self):
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
        updates, opt_state = tx.update(
          gradient(params, x)[1], opt_state, params
        )
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
    with self.assertRaisesRegex(ValueError, "parameters that lie on the mesh"):
      tx.init(params)

  def test_keys_differ_by_replica_and_aux_is_averaged(self):
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
    self.assertLen(drawn, REPLICAS)
    np.testing.assert_allclose(aux["noise"], 96 * drawn.mean(), rtol=1e-4)
    np.testing.assert_array_equal(aux["count"], [1, 2, 3])

  def test_mistakes(self):
    mesh = mesh_of()
    tx = float32.powersgd(4, mesh=mesh)
    state = tx.init(PARAMS)
    with self.assertRaisesRegex(ValueError, "stacked as .*value_and_grad"):
      tx.update(PARAMS, state, PARAMS)
    value = edgc_jax.value_and_grad(loss_fn, mesh)
    with self.assertRaisesRegex(ValueError, "4 replicas divide"):
      value(PARAMS, batch(0, rows=6))
    with self.assertRaisesRegex(TypeError, "jax.random.key"):
      value(PARAMS, jax.random.PRNGKey(0))
    with self.assertRaisesRegex(ValueError, "an axis of the mesh"):
      edgc_jax.value_and_grad(loss_fn, mesh, "replica")
    with self.assertRaisesRegex(ValueError, "an axis of the mesh"):
      float32.powersgd(4, "replica", mesh=mesh)
    with self.assertRaisesRegex(ValueError, "`param_specs` must be None"):
      float32.powersgd(4, param_specs=P())
    with self.assertWarnsRegex(RuntimeWarning, "one replica"):
      edgc_jax.topk(mesh=mesh_of((1,)))
    with self.assertRaisesRegex(ValueError, "`wrt` must be None for param"):
      edgc_jax.value_and_grad(loss_fn, mesh, wrt="w")(PARAMS, batch(0))
    with self.assertRaisesRegex(ValueError, "`in_axes` must be 0 or None"):
      edgc_jax.value_and_grad(loss_fn, mesh, in_axes=([0],))(PARAMS, batch(0))
    with self.assertRaisesRegex(TypeError, r"real floating leaves.*\['f'\]"):
      tx.init(PARAMS | {"f": jnp.tanh})
    with self.assertRaisesRegex(ValueError, "`args` must be an array or a key"):
      edgc_jax.value_and_grad(lambda p: loss_fn(p, batch(0)), mesh)(PARAMS)
    groups = {"own": optax.chain(tx, optax.sgd(0.1)), "rest": optax.sgd(0.1)}
    labels = {"w": "own", "v": "rest", "b": "rest"}
    with self.assertRaisesRegex(ValueError, r"a mask over \['b'\], \['v'\]"):
      optax.partition(groups, labels).init(PARAMS)

  def test_specs_are_as_the_parameters_lie(self):
    mesh = mesh_of((2, 2), (AXIS, "shard"))
    shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), SHARDS)
    params = jax.device_put(PARAMS, shardings)
    for specs in (None, SHARDS | {"w": P(None, "shard")}):
      tx = float32.powersgd(4, mesh=mesh, param_specs=specs)
      with self.assertRaisesRegex(ValueError, "lies on the mesh as"):
        tx.init(params)
    for specs in (SHARDS, shardings):
      tx = float32.powersgd(4, mesh=mesh, param_specs=specs)
      spec = tx.init(params).leaves["w"].residual.sharding.spec
      self.assertEqual(spec[0], (AXIS, "shard"))


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
  """Returns parameters and state after five calls, and where they are saved."""
  mesh, tx = adam_on((2, 2), every)
  shardings = jax.tree.map(lambda s: NamedSharding(mesh, s), SHARDS)
  params = jax.device_put(PARAMS, shardings)
  params, state, _ = train_plain(tx, mesh, params, "replica", 5)
  folder = f"{folder}/every-{every}"
  with ocp.StandardCheckpointer() as checkpointer:
    checkpointer.save(folder, {"params": params, "opt_state": state})
  return params, state, folder


@pytest.mark.slow
class ShardsTest(parameterized.TestCase):
  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    cls.folder = tempfile.TemporaryDirectory()
    cls.addClassCleanup(cls.folder.cleanup)

  def test_nothing_but_factors_crosses_the_slow_axis(self):
    names = ("replica", "shard")
    mesh = mesh_of((2, 2), names)
    shardings = jax.tree.map(lambda s: NamedSharding(mesh, s), SHARDS)
    params = jax.device_put(PARAMS, shardings)
    reducer = float32.powersgd(4, "replica", mesh=mesh, param_specs=SHARDS)
    tx = optax.chain(reducer, optax.adam(1e-2))
    params, state, step = train_plain(tx, mesh, params, "replica")
    self.assertEqual(params["w"].sharding.spec[0], "shard")
    text = step.lower(params, state, batch(0)).compile().as_text()
    sent = 0
    for line in filter(hlo.is_collective, text.splitlines()):
      if set(map(frozenset, hlo.groups_of(line))) != WITHIN:
        shapes = hlo.arrays_of(line.split(" all-reduce(")[0])
        sent += sum(4 * np.prod(shape, dtype=int) for _, shape in shapes)
    (part,) = edgc_jax.describe(tx, PARAMS, mesh=mesh, param_specs=SHARDS).parts
    # The compiler's own have no order, without edgc either; nor has the loss.
    factors = {
      line.split(" = ")[0].strip("% ").removeprefix("ROOT %")
      for line in filter(hlo.is_collective, map(str.strip, text.splitlines()))
      if set(map(frozenset, hlo.groups_of(line))) != WITHIN
      and "= f32[] " not in line
    }
    self.assertNotEmpty(factors)
    self.assertEmpty(factors & set(sum(unordered(text), ())))
    # Checks and the loss take some values more.
    self.assertBetween(sent, part.wire_bytes[0], part.wire_bytes[0] + 100)
    # One device computes the same, up to what two shards' own factors lose.
    alone = optax.chain(edgc_jax.allreduce(mesh=mesh_of((2,))), optax.sgd(0.5))
    sharded = edgc_jax.allreduce("replica", mesh=mesh, param_specs=SHARDS)
    found = train_plain(
      optax.chain(sharded, optax.sgd(0.5)), mesh,
      jax.device_put(PARAMS, shardings), "replica",
    )[0]  # fmt: skip
    assert_near(found, train_plain(alone, mesh_of((2,)))[0])

  @parameterized.parameters("edgc", "powersgd")
  def test_equal_to_shard_map(self, name):
    """The same parameters, and the same messages between the replicas."""
    mesh = mesh_of((2, 2), ("replica", "shard"))
    shardings = jax.tree.map(lambda s: NamedSharding(mesh, s), SHARDS)
    first = jax.device_put(PARAMS, shardings)
    options = variants()[name][""] | {"axis_name": "replica"}
    make = edgc_jax.REDUCERS[name]
    both = make(**options, mesh=mesh, param_specs=SHARDS), make(**options)
    chains = [optax.chain(tx, optax.sgd(0.5)) for tx in both]
    params, state, step = train_plain(chains[0], mesh, first, "replica")
    found = train_sharded_by_hand(chains[1], mesh, first)
    assert_near(params, found[0])
    texts = [
      compiled(step, params, state, batch(0)).as_text(),
      compiled(found[2], *found[:2], batch(0)).as_text(),
    ]
    sent = [sent_between(text, WITHIN) for text in texts]
    self.assertEqual(*sent)

  def test_convolutions_gather_nothing(self):
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
    self.assertEqual(
      sent_between(text, WITHIN), [("all-reduce", [("f32", ())])]
    )

  def test_top_k_gathers_nothing(self):
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
    self.assertLen(crossing, 1)
    self.assertIn("f32[] all-reduce(", crossing[0])

  @parameterized.parameters(*BINDERS)
  def test_auxiliary_outputs(self, shape, names):
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
    self.assertEqual(aux["rows"], 32 // shape[0])
    self.assertEqual((aux["float"], aux["int"], aux["bool"]), (2.5, 3, True))
    self.assertEqual(aux["key"].shape, ())
    self.assertIsNone(aux["none"])

  @parameterized.parameters(*BINDERS)
  def test_a_constraint_over_the_replicas(self, shape, names):
    mesh = mesh_of(shape, names)
    where = NamedSharding(mesh, P("replica"))

    def constrained(params, x):
      x = jax.lax.with_sharding_constraint(x, where)
      return jnp.mean(jnp.tanh(x @ params["w"])[jnp.arange(2)])

    with self.assertRaisesRegex(ValueError, "leave it out of jax.lax.with_sh"):
      edgc_jax.value_and_grad(constrained, mesh, "replica")(PARAMS, batch(0))

  @parameterized.parameters(((4, 1),), ((2, 2),))
  def test_bare_specs(self, shape):
    mesh = mesh_of(shape, ("replica", "shard"))

    def constrained(params, x):
      w = jax.lax.with_sharding_constraint(params["w"], P(None, "shard"))
      return loss_fn(params | {"w": w[jnp.arange(64)]}, x)

    gradient = jax.jit(edgc_jax.value_and_grad(constrained, mesh, "replica"))
    loss, _ = gradient(PARAMS, batch(0))
    np.testing.assert_allclose(loss, loss_fn(PARAMS, batch(0)), rtol=1e-5)

  def test_several_axes_and_constraints(self):
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
    self.assertEqual(grads["b"].shape, (4, 96))

  @parameterized.parameters(
    ((4, 2), 1), ((1, 2), 1), ((2, 4), 1), ((4, 2), 2), ((2, 4), 2)
  )
  def test_restore_on_another_mesh(self, shape, every):
    """Also in the middle of accumulated calls."""
    params, state, folder = saved_run(every, self.folder.name)
    if shape[0] == 1:
      with self.assertWarnsRegex(RuntimeWarning, "one replica"):
        mesh, tx = adam_on(shape, every)
    else:
      mesh, tx = adam_on(shape, every)
    found, restored = edgc_jax.restore(
      folder, tx, PARAMS, mesh=mesh, axis_name="replica", param_specs=SHARDS
    )
    assert_near(found, params)
    if every > 1:
      sums = [np.asarray(s.accumulated.values["w"]) for s in (restored, state)]
      assert_near(*[x.reshape(-1, 64, 96).mean(0) for x in sums])
      self.assertEqual(len(sums[0]), shape[0])
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
    self.assertEqual(int(restored[0].count), 5 // every)


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
class NnxTest(absltest.TestCase):
  def test_statistics_and_counts_are_kept(self):
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
    self.assertEqual(int(model.drop.rngs.count.get_value()), 1)
    kernel = np.asarray(grads["down"]["kernel"].get_value())
    self.assertEqual(kernel.shape, (REPLICAS, 96, 64))
    self.assertGreater(np.abs(kernel[0] - kernel[1]).max(), 0, "dropout")
    first = float(step(model, optimizer, batch(1))[0])
    for _ in range(20):
      last = float(step(model, optimizer, batch(1))[0])
    self.assertLess(last, first)
    self.assertEqual(int(model.drop.rngs.count.get_value()), 22)

  def test_scanned_layers_have_keys_of_their_own(self):
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
      float32.edgc(rank_max=8, rank_min=4, mesh=mesh), optax.sgd(0.01)
    )
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)

    step = nnx_step(mesh)
    same = jnp.tile(batch(0, 8), (REPLICAS, 1))
    for grad in jax.tree.leaves(step(model, optimizer, same)[1]):
      self.assertGreater(np.abs(grad[0] - grad[1]).max(), 0, "dropout")
    optimizer.opt_state = edgc_jax.restart_reference(optimizer.opt_state)
    step(model, optimizer, same)
    restarts = optimizer.opt_state[0].budget.restarts
    self.assertEqual(int(restarts.get_value()), 2)

  def test_equal_to_shard_map(self):
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
class VmapTest(parameterized.TestCase):
  @parameterized.parameters("edgc", "quantize")
  def test_equal_to_shard_map(self, name):
    options = variants()[name][""]
    if name == "quantize":
      options = {**options, "bits": 8}
    tx = optax.chain(edgc_jax.REDUCERS[name](**options), optax.sgd(0.5))
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
    self.assertGreater(text.count(" conditional("), name == "edgc")
    largest = []
    for i in range(4):
      params, opt_state, size = step(params, opt_state, batch(i))
      largest.append(float(size))
    expected = train_by_hand(tx, mesh_of())[0]
    if name == "quantize":  # few entries are rounded to the next level
      level = max(largest) / 127
      off = jax.tree.map(lambda a, b: np.abs(a - b), params, expected)
      off = np.concatenate([np.ravel(x) for x in jax.tree.leaves(off)])
      self.assertLess(off.max(), level)
      self.assertLess(off.mean(), level / 100)
    else:
      assert_near(params, expected)
    self.assertEqual(opt_state[0].count.shape, ())
    self.assertEqual(opt_state[0].leaves["w"].residual.shape, (4, 64, 96))


if __name__ == "__main__":
  absltest.main()
