"""`split_local_steps`: exchanges in a thread, beside the inner steps."""

import itertools
import threading

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import hlo
from helpers.meshes import AXIS
from jax.sharding import AxisType

import edgc_jax

REPLICAS = 4
PARAMS = {
  "w": 0.1 * jax.random.normal(jax.random.key(1), (48, 64)),
  "v": 0.1 * jax.random.normal(jax.random.key(2), (64, 48)),
  "b": jnp.zeros(64),
}
NESTEROV = optax.sgd(0.7, momentum=0.9, nesterov=True)


def mesh_of():
  devices = jax.devices()[:REPLICAS]
  return jax.make_mesh((REPLICAS,), (AXIS,), (AxisType.Auto,), devices=devices)


def loss_fn(params, x):
  h = jnp.tanh(x @ params["w"] + params["b"]) @ params["v"]
  return jnp.mean((h - x) ** 2)


def batch(step):
  return jax.random.normal(jax.random.key(step), (32, 48))


def chains(mesh=None):
  outer = optax.chain(
    edgc_jax.quantize(8, error_feedback=True, mesh=mesh), NESTEROV
  )
  return optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2)), outer


def plain_step(tx, mesh, averages):
  """A step in plain `jax.jit` that consumes its state."""

  def step(params, state, x):
    local = edgc_jax.local_params(params, state, mesh)
    differentiated = edgc_jax.value_and_grad(
      loss_fn, mesh, AXIS, is_local=True, averages=averages
    )
    loss, grads = differentiated(local, x)
    updates, state = tx.update(grads, state, params, local_params=local)
    return optax.apply_updates(params, updates), state, loss

  return jax.jit(step, donate_argnums=(0, 1))


def start(tx):
  params = jax.tree.map(jnp.copy, PARAMS)  # which the first step consumes
  return params, tx.init(params)


def in_one_program(steps, **options):
  """Returns losses, and parameters and metrics after each step."""
  mesh = mesh_of()
  tx = edgc_jax.local_steps(*chains(mesh), mesh=mesh, **options)
  step, found = plain_step(tx, mesh, averages=True), []
  params, state = start(tx)
  for i in range(steps):
    params, state, loss = step(params, state, batch(i))
    found.append(
      (float(loss), jax.device_get(params), edgc_jax.metrics(state))
    )
  return found


def split_plain(steps, **options):
  """The same of two programs in plain `jax.jit`."""
  mesh = mesh_of()
  tx, exchange = edgc_jax.split_local_steps(
    *chains(mesh), mesh=mesh, **options
  )
  step, found = plain_step(tx, mesh, averages=False), []
  params, state = start(tx)
  for i in range(steps):
    params, state, losses = step(params, state, batch(i))
    assert losses.shape == (REPLICAS,)
    params, state = exchange(params, state)
    found.append(
      (losses.mean(), jax.device_get(params), edgc_jax.metrics(state))
    )
  return found


def split_pmapped(steps, **options):
  """The same of two programs under `jax.pmap`."""
  tx, exchange = edgc_jax.split_local_steps(*chains(), **options)

  def step(params, state, x):
    local = edgc_jax.local_params(params, state)
    loss, grads = jax.value_and_grad(loss_fn)(local, x)
    updates, state = tx.update(grads, state, params, local_params=local)
    return optax.apply_updates(params, updates), state, loss

  step = jax.pmap(step, axis_name=AXIS, donate_argnums=(0, 1))
  stack = lambda tree: jax.tree.map(lambda x: jnp.stack([x] * REPLICAS), tree)  # noqa: E731
  (params, state), found = map(stack, start(tx)), []
  for i in range(steps):
    x = batch(i).reshape(REPLICAS, -1, 48)
    params, state, losses = step(params, state, x)
    params, state = exchange(params, state)
    first = jax.tree.map(lambda x: np.asarray(x[0]), params)
    found.append((losses.mean(), first, edgc_jax.metrics(state)))
  return found


@pytest.mark.parametrize("run", [split_plain, split_pmapped])
@pytest.mark.parametrize(
  ("every", "fragments", "overlap"), [(2, 1, 1), (3, 1, 3), (6, 2, 2)]
)
def test_equals_one_program(run, every, fragments, overlap):
  """After every step: the loss, the common parameters and the metrics."""
  options = {"every": every, "fragments": fragments, "overlap": overlap}
  steps = every + period_of(options) + overlap + 2
  expected, found = in_one_program(steps, **options), run(steps, **options)
  changes = set()
  for i, (one, two) in enumerate(zip(expected, found, strict=True)):
    np.testing.assert_allclose(one[0], two[0], rtol=1e-5)
    chex.assert_trees_all_close(one[1], two[1], atol=1e-5)
    one, two = one[2], two[2]
    if one["wire_bytes"]:
      changes.add(i + 1)
    for name in ("wire_bytes", "compression_ratio", "skipped_inner_steps"):
      np.testing.assert_allclose(one[name], two[name], rtol=1e-6)
  period = period_of(options)
  due = [b + overlap for b in range(period, steps, period)]
  assert changes == {step for step in due if step <= steps}
  moved = optax.tree.norm(optax.tree.sub(expected[-1][1], PARAMS))
  assert moved > 0.1, "the tolerance is not what makes them agree"


def period_of(options):
  return options["every"] // options["fragments"]
