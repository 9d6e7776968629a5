"""`split_local_steps`: exchanges in a thread, beside the inner steps."""

import threading

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers import float32
from helpers.local_model import (
  NESTEROV,
  PARAMS,
  REPLICAS,
  batch,
  loss_fn,
  mesh_of,
)
from helpers.meshes import AXIS

import edgc_jax
from edgc_jax.measure import hlo

PAIRS = mesh_of((REPLICAS, 2), (AXIS, "shard"))


def chains(mesh=None):
  """Returns inner and outer chain; factors are continuous in what is sent.

  Of codes of few bits an entry between two of them may take either one, where
  two programs round differently by one ulp.
  """
  outer = optax.chain(edgc_jax.on_mesh(float32.powersgd(8), mesh), NESTEROV)
  return optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2)), outer


def step_of(tx, mesh=None, averages=False):
  """One step under `jax.pmap`, or in plain `jax.jit` with a mesh."""

  def step(params, state, x):
    local = edgc_jax.local_params(params, state, mesh)
    differentiated = jax.value_and_grad(loss_fn)
    if mesh is not None:
      differentiated = edgc_jax.value_and_grad(
        loss_fn, mesh, AXIS, is_local=True, averages=averages
      )
    loss, grads = differentiated(local, x)
    updates, state = tx.update(grads, state, params, local_params=local)
    return optax.apply_updates(params, updates), state, loss

  return step


def plain_step(*arguments):
  """A step in plain `jax.jit` that consumes its state."""
  return jax.jit(step_of(*arguments), donate_argnums=(0, 1))


def start(tx):
  params = jax.tree.map(jnp.copy, PARAMS)  # which the first step consumes
  return params, tx.init(params)


def started(**options):
  """Returns step and exchange in plain `jax.jit`, parameters and state."""
  mesh = mesh_of()
  tx, exchange = edgc_jax.split_local_steps(*chains(mesh), mesh=mesh, **options)
  return plain_step(tx, mesh, False), exchange, *start(tx)


def advanced(step, exchange, params, state, steps):
  for i in steps:
    params, state, _ = step(params, state, batch(i))
    params, state = exchange(params, state)
  return params, state


def in_one_program(steps, **options):
  """Returns losses, and parameters and metrics after each step."""
  mesh = mesh_of()
  tx = edgc_jax.local_steps(*chains(mesh), mesh=mesh, **options)
  step, found = plain_step(tx, mesh, True), []
  params, state = start(tx)
  for i in range(steps):
    params, state, loss = step(params, state, batch(i))
    found.append((float(loss), jax.device_get(params), edgc_jax.metrics(state)))
  return found


def split_plain(steps, **options):
  """The same of two programs in plain `jax.jit`."""
  step, exchange, params, state = started(**options)
  found = []
  for i in range(steps):
    params, state, losses = step(params, state, batch(i))
    assert losses.shape == (REPLICAS,)
    params, state = exchange(params, state)
    params_now, metrics = jax.device_get(params), edgc_jax.metrics(state)
    found.append((losses.mean(), params_now, metrics))
  return found


def split_pmapped(steps, **options):
  """The same of two programs under `jax.pmap`."""
  tx, exchange = edgc_jax.split_local_steps(*chains(), **options)
  step = jax.pmap(step_of(tx), axis_name=AXIS, donate_argnums=(0, 1))
  stack = lambda tree: jax.tree.map(lambda x: jnp.stack([x] * REPLICAS), tree)  # noqa: E731
  (params, state), found = map(stack, start(tx)), []
  for i in range(steps):
    x = batch(i).reshape(REPLICAS, -1, 48)
    params, state, losses = step(params, state, x)
    params, state = exchange(params, state)
    first = jax.tree.map(lambda x: np.asarray(x[0]), params)
    found.append((losses.mean(), first, edgc_jax.metrics(state)))
  return found


@pytest.mark.parametrize(
  ("run", "every", "overlap"), [(split_pmapped, 3, 3), (split_plain, 3, 2)]
)
@pytest.mark.slow
def test_equals_one_program(run, every, overlap):
  """After every step: the loss, the common parameters and the metrics."""
  options = {"every": every, "overlap": overlap}
  steps = 2 * every + overlap + 2
  expected, found = in_one_program(steps, **options), run(steps, **options)
  changes = []
  for i, (one, two) in enumerate(zip(expected, found, strict=True), 1):
    np.testing.assert_allclose(one[0], two[0], rtol=1e-5)
    chex.assert_trees_all_close(one[1], two[1], atol=1e-5)
    one, two = one[2], two[2]
    if one["wire_bytes"]:
      changes.append(i)
    for name in ("wire_bytes", "compression_ratio", "skipped_inner_steps"):
      np.testing.assert_allclose(one[name], two[name], rtol=1e-6)
  assert changes == list(range(every + overlap, steps + 1, every))
  moved = optax.tree.norm(optax.tree.sub(expected[-1][1], PARAMS))
  assert moved > 0.1, "the tolerance is not what makes them agree"


@pytest.mark.slow
def test_a_run_continues_from_its_state_alone():
  """After any step, in the middle of an exchange, too, bit for bit."""
  options, found = {"every": 3, "overlap": 2}, []
  for cuts in ((), (3, 4, 5)):
    step, exchange, *both = started(**options)
    for i in range(6):
      both = advanced(step, exchange, *both, [i])
      if i + 1 in cuts:
        saved = jax.device_get(both)
        shardings = jax.tree.map(lambda x: x.sharding, both)
        exchange.wait()
        _, exchange, *_ = started(**options)
        both = jax.device_put(saved, shardings)
    exchange.wait()
    found.append(jax.device_get(both))
  chex.assert_trees_all_equal(*found)
  assert not np.array_equal(found[0][0]["w"], PARAMS["w"])


@pytest.mark.slow
def test_an_exchange_left_behind_is_forgotten():
  """A run that goes back to an earlier state gets nothing of the later one."""
  step, exchange, *both = started(every=2, overlap=2)
  both = advanced(step, exchange, *both, range(4))
  expected = jax.device_get(both)
  advanced(step, exchange, *both, range(4, 6))  # leaves one of step 6
  _, _, *both = started(every=2, overlap=2)
  both = advanced(step, exchange, *both, range(4))
  chex.assert_trees_all_equal(jax.device_get(both), expected)


@pytest.mark.slow
def test_steps_go_on_while_an_exchange_is_in_flight(monkeypatch):
  """Neither the steps nor `exchange` wait, until the result is due."""
  may_end, done = threading.Event(), []
  step, exchange, *both = started(every=3, overlap=3)
  block = jax.block_until_ready

  def late(result):
    if threading.current_thread() is not threading.main_thread():
      assert may_end.wait(60)
      done.append(True)
    return block(result)

  monkeypatch.setattr(jax, "block_until_ready", late)
  both = advanced(step, exchange, *both, range(5))
  block(both[1].step)
  assert not done
  threading.Timer(0.5, may_end.set).start()
  _, state = advanced(step, exchange, *both, [5])
  assert done and edgc_jax.metrics(state)["wire_bytes"] > 0
  may_end.set()
  exchange.wait()
  assert len(done) == 2


@pytest.mark.slow
def test_an_error_of_the_thread_is_raised_where_its_result_is_due(monkeypatch):
  step, exchange, *both = started(every=2, overlap=1)

  def broken(result):
    raise ValueError("the link is cut")

  for i in range(2):
    params, state, _ = step(*both, batch(i))
    monkeypatch.setattr(jax, "block_until_ready", broken)
    both = exchange(params, state)
  params, state, _ = step(*both, batch(2))
  with pytest.raises(RuntimeError, match="The exchange of step 2 failed") as e:
    exchange(params, state)
  assert "the link is cut" in str(e.value.__cause__)
  monkeypatch.undo()
  params, state = exchange(params, state)  # begins anew from the state
  assert edgc_jax.metrics(state)["wire_bytes"] > 0


@pytest.mark.parametrize("averages", [False, True])
def test_inner_steps_have_no_collective(averages):
  """None at all: not of the loss, if it is not averaged."""
  mesh = mesh_of()
  tx, _ = edgc_jax.split_local_steps(*chains(mesh), every=4, mesh=mesh)
  lowered = plain_step(tx, mesh, averages).lower(*start(tx), batch(0))
  lines = lowered.compile().as_text().splitlines()
  assert any(map(hlo.is_collective, lines)) == averages


def test_losses_of_each_replica():
  """Along a first axis, also beside an axis of shards; keys and counts, too."""

  def loss(params, x):
    value = loss_fn(params, x)
    return value, {"double": 2 * value, "rows": x.shape[0]}

  own = jax.tree.map(lambda p: jnp.stack([p, 2 * p, 3 * p, 4 * p]), PARAMS)
  x = batch(0)
  each = jax.vmap(loss_fn)(own, x.reshape(REPLICAS, -1, 48))
  for mesh in (mesh_of(), PAIRS):
    differentiated = edgc_jax.value_and_grad(
      loss, mesh, AXIS, has_aux=True, is_local=True, averages=False
    )
    (losses, aux), grads = jax.jit(differentiated)(own, x)
    np.testing.assert_allclose(losses, each, rtol=1e-5)
    np.testing.assert_allclose(aux["double"], 2 * each, rtol=1e-5)
    assert aux["rows"].tolist() == [8] * REPLICAS
    assert grads["w"].shape == (REPLICAS, 48, 64)


def test_losses_of_common_parameters_that_are_not_averaged():
  x = batch(0)
  each = [loss_fn(PARAMS, part) for part in x.reshape(REPLICAS, -1, 48)]
  differentiated = jax.jit(
    edgc_jax.value_and_grad(loss_fn, mesh_of(), AXIS, averages=False)
  )
  losses, grads = differentiated(PARAMS, x)
  np.testing.assert_allclose(losses, each, rtol=1e-5)
  assert grads["w"].shape == (REPLICAS, 48, 64)
  text = differentiated.lower(PARAMS, x).compile().as_text()
  assert not any(map(hlo.is_collective, text.splitlines()))


def test_variables_of_a_module_are_averaged():
  layer = nnx.Linear(48, 64, rngs=nnx.Rngs(0))
  differentiated = edgc_jax.value_and_grad(
    lambda layer, x: jnp.mean(layer(x) ** 2), mesh_of(), AXIS, averages=False
  )
  with pytest.raises(ValueError, match="`averages` must be True for a module"):
    differentiated(layer, batch(0))


def test_a_mesh_with_shards():
  with pytest.raises(ValueError, match=r"`mesh` must .* no axis of several de"):
    edgc_jax.split_local_steps(*chains(), 4, mesh=PAIRS)


def test_a_state_that_lies_in_another_way():
  _, exchange, params, state = started(every=4)
  _, other = edgc_jax.split_local_steps(*chains(), 4)
  with pytest.raises(ValueError, match=r"`mesh` must be the mesh .* got None"):
    other(params, state)
  stacked = jax.tree.map(lambda x: jnp.stack([x] * REPLICAS), state)
  with pytest.raises(ValueError, match=r"and None under jax\.pmap, got Mesh"):
    exchange(params, stacked)
  with pytest.raises(ValueError, match="one state of local_steps in it"):
    exchange(params, optax.adam(1e-3).init(PARAMS))


def test_a_pool_of_one_thread(monkeypatch):
  """One device needs two threads: one waits, and one computes."""
  step, exchange, *both = started(every=1)
  params, state, _ = step(*both, batch(0))
  monkeypatch.setattr(jax, "local_device_count", lambda: 1)
  monkeypatch.setenv("NPROC", "1")
  with pytest.raises(RuntimeError, match="NPROC must be at least 2"):
    exchange(params, state)
