"""A script: one of several hosts whose linear algebra rounds differently.

python -m helpers.mixed_hosts_worker FOLDER PORT INDEX COUNT SECONDS CASE...

Each case trains a small model for `STEPS` steps, one process a replica, on real
gradients and on white noise, and saves the updates of each step.
"""

import faulthandler
import functools
import pathlib
import sys

from helpers import float32
from helpers.meshes import residuals
from helpers.reducers import moving, reducers

import edgc_jax  # isort: skip

import jax  # isort: skip
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

STEPS, RATE = 200, 0.02
# Ranks move, and a window ends every few steps.
RANK, WINDOW = 12, 5
REDUCERS = reducers(RANK, WINDOW)
STAGES = "stages"  # two of them, of two replicas each


def model():
  """Returns parameters and a function for one replica's gradients in a step.

  White gradients are noise. Real gradients are far from random: a decaying
  spectrum, a layer with inputs of rank 4 only, rows without any gradient.
  """
  keys = jax.random.split(jax.random.key(0), 4)
  real = {
    "bias": jnp.zeros((64,)),
    "first": 0.1 * jax.random.normal(keys[0], (48, 64)),
    "low": 0.1 * jax.random.normal(keys[1], (40, 64)),
  }
  scales = 0.8 ** jnp.arange(48.0)
  few = jax.random.normal(keys[2], (4, 40)) * (jnp.arange(40) < 30)
  teacher = jax.random.normal(keys[3], (48, 64))

  def loss_fn(real, key):
    x = jax.random.normal(key, (32, 48)) * scales
    hidden = jnp.tanh(x @ real["first"] + real["bias"])
    hidden += jnp.tanh((x[:, :4] @ few) @ real["low"])
    return jnp.mean((hidden - x @ teacher) ** 2)

  def gradients_of(params, key):
    noise = jax.random.normal(key, params["white"].shape)
    return {
      "real": jax.grad(loss_fn)(params["real"], key), "white": 0.01 * noise
    }  # fmt: skip

  return {"real": real, "white": jnp.zeros((2, 48, 64))}, gradients_of


def train(tx, mesh, stage_axis=None):
  """Returns updates and metrics of this process; arrays by name."""
  params, gradients_of = model()
  specs = jax.tree.map(lambda _: P(), params)
  if stage_axis:
    specs = jax.tree.map(lambda _: P(stage_axis), params)
    params = jax.tree.map(lambda x: jnp.stack([x, 0.5 * x]), params)
  state_specs = edgc_jax.state_specs(
    tx, params, mesh=mesh, param_specs=specs if stage_axis else None
  )
  everyone = (stage_axis, "data") if stage_axis else ("data",)

  def run(params, state):
    start, own = params, jax.lax.axis_index("data")
    keys = jax.random.split(jax.random.key(7), STEPS)
    lead = lambda tree: jax.tree.map(lambda x: x[0], tree)  # noqa: E731

    def step(carry, key):
      params, state, owed = carry
      key = jax.random.fold_in(key, own)
      local = jax.lax.pcast(params, "data", to="varying")
      if stage_axis:
        local = lead(local)
        key = jax.random.fold_in(key, jax.lax.axis_index(stage_axis))
      gradients = gradients_of(local, key)
      if stage_axis:
        gradients = jax.tree.map(lambda g: g[None], gradients)
      updates, state = tx.update(gradients, state, params)
      params = jax.tree.map(lambda p, u: p - RATE * u, params, updates)
      owed = jax.tree.map(lambda o, g, u: o + g - u, owed, gradients, updates)
      numbers = edgc_jax.metrics(state)
      shown = {"rank": numbers["rank"], **numbers.get("matrix_rank", {})}
      return (params, state, owed), (updates, shown)

    carry = (params, state, jax.tree.map(jnp.zeros_like, params))
    # A loop wants its state typed beforehand as it will be.
    types, _ = jax.eval_shape(step, carry, keys[0])
    carry = jax.tree.map(
      lambda x, like: _varying(x, like.manual_axis_type.varying), carry, types
    )
    (params, state, owed), (updates, shown) = jax.lax.scan(step, carry, keys)
    # A replica keeps in its residual what it did not send, if it has one.
    is_masked = lambda x: isinstance(x, optax.MaskedNode)  # noqa: E731
    owed = jax.tree.map(
      lambda o, e: o if is_masked(e) else o - e, owed, residuals(state),
      is_leaf=is_masked,
    )  # fmt: skip
    owed = jax.lax.pmean(edgc_jax.after_update(owed, state), "data")
    moved = jax.tree.map(lambda a, b: a - b, params, start)
    return jax.tree.map(
      lambda x: _varying(x, everyone)[None],
      {"updates": updates, "shown": shown, "moved": moved, "owed": owed,
       "diverged": state.checks.diverged_steps},
    )  # fmt: skip

  on_mesh = functools.partial(jax.shard_map, mesh=mesh)
  init = on_mesh(tx.init, in_specs=(specs,), out_specs=state_specs)
  fn = on_mesh(run, in_specs=(specs, state_specs), out_specs=P(everyone))
  found = jax.jit(fn)(params, jax.jit(init)(params))
  return {
    jax.tree_util.keystr(path): np.asarray(x.addressable_shards[0].data)[0]
    for path, x in jax.tree_util.tree_leaves_with_path(found)
  }


def _varying(x, axes):
  """Returns `x` typed as varying over `axes`."""
  missing = set(axes) - set(jax.typeof(x).manual_axis_type.varying)
  return jax.lax.pcast(x, tuple(missing), to="varying") if missing else x


def fingerprint():
  """Returns a matrix decomposition, which shows how this process rounds."""
  a = np.random.default_rng(0).standard_normal((24, 48)).astype(np.float32)
  a = jnp.asarray(a @ a.T)
  root = jax.lax.linalg.cholesky(a)
  return np.asarray(jax.lax.linalg.triangular_solve(root, a, lower=True))


def main(folder, port, index, count, seconds, *cases):
  # Prints where a process hangs, and ends it.
  faulthandler.dump_traceback_later(float(seconds), exit=True)
  jax.config.update("jax_disable_most_optimizations", True)
  jax.config.update("jax_cpu_collectives_implementation", "gloo")
  address = f"127.0.0.1:{port}"
  jax.distributed.initialize(
    address, int(count), int(index), coordinator_bind_address=address
  )
  folder = pathlib.Path(folder)
  np.save(folder / f"fingerprint_{index}.npy", fingerprint())
  auto = functools.partial(jax.make_mesh, devices=jax.devices())
  for case in cases:
    if case == STAGES:
      mesh = auto((2, 2), ("stage", "data"), axis_types=(AxisType.Auto,) * 2)
      stages = edgc_jax.Stages("stage", align="none")
      tx = float32.edgc(stages=stages, **moving(RANK, WINDOW))
      numbers = train(tx, mesh, "stage")
    else:
      mesh = auto((int(count),), ("data",), axis_types=(AxisType.Auto,))
      numbers = train(REDUCERS[case](), mesh)
    np.savez(folder / f"{case}_{index}.npz", **numbers)
  jax.distributed.shutdown()


if __name__ == "__main__":
  main(*sys.argv[1:])
