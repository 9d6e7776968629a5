"""A script: one of two processes that train with exchanges in a thread.

python split_local_steps_worker.py PORT INDEX SECONDS

Prints what is equal in all processes, as JSON: for every way to exchange, sums
over the common parameters after each step.
"""

import faulthandler
import json
import pathlib
import sys

# The package of this repository, whichever is installed.
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

import edgc_jax  # before JAX uses a device, see conftest.py

import jax  # isort: skip
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental import multihost_utils
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

PROCESSES, REPLICAS, STEPS, EVERY, OVERLAP = 2, 4, 9, 3, 2
SHAPES = {"w": (48, 64), "v": (64, 48)}


def loss_fn(params, x):
  return jnp.mean((jnp.tanh(x @ params["w"]) @ params["v"] - x) ** 2)


def chains(mesh=None):
  outer = optax.chain(
    edgc_jax.on_mesh(edgc_jax.quantize(8, error_feedback=True), mesh),
    optax.sgd(0.7, momentum=0.9, nesterov=True),
  )
  return optax.adam(1e-2), outer, EVERY


def start():
  keys = jax.random.split(jax.random.key(0), 2)
  return {
    name: np.asarray(0.1 * jax.random.normal(key, shape))
    for key, (name, shape) in zip(keys, SHAPES.items(), strict=True)
  }


def batch(step):
  return np.random.default_rng(step).normal(size=(32, 48)).astype(np.float32)


def step_of(tx, mesh=None, averages=False):
  """One step under `jax.pmap`, or in plain `jax.jit` with a mesh."""

  def step(params, state, x):
    own = edgc_jax.local_params(params, state, mesh)
    differentiated = jax.value_and_grad(loss_fn)
    if mesh is not None:
      differentiated = edgc_jax.value_and_grad(
        loss_fn, mesh, is_local=True, averages=averages
      )
    _, grads = differentiated(own, x)
    updates, state = tx.update(grads, state, params, local_params=own)
    return optax.apply_updates(params, updates), state

  return step


def plain(is_split):
  """In plain `jax.jit`, in two programs or in one."""
  mesh = jax.make_mesh((REPLICAS,), ("data",), axis_types=(AxisType.Auto,))
  make = edgc_jax.split_local_steps if is_split else edgc_jax.local_steps
  made = make(*chains(mesh), overlap=OVERLAP, mesh=mesh)
  tx, exchange = made if is_split else (made, None)
  step = jax.jit(step_of(tx, mesh, not is_split), donate_argnums=(0, 1))
  place = lambda x, spec: jax.make_array_from_callback(  # noqa: E731
    x.shape, NamedSharding(mesh, spec), lambda i: x[i]
  )
  params = jax.tree.map(lambda x: place(x, P()), start())
  return run(
    step, exchange, params, tx.init(params), lambda x: place(x, P("data"))
  )


def pmapped():
  """Under `jax.pmap`, in two programs."""
  tx, exchange = edgc_jax.split_local_steps(*chains(), overlap=OVERLAP)
  here = jax.local_device_count()
  init = jax.pmap(lambda p, _: (p, tx.init(p)), "data", in_axes=(None, 0))
  params, state = init(start(), np.zeros(here))
  first = here * jax.process_index()
  place = lambda x: x.reshape(REPLICAS, -1, 48)[first : first + here]  # noqa: E731
  step = jax.pmap(step_of(tx), axis_name="data", donate_argnums=(0, 1))
  return run(step, exchange, params, state, place)


def run(step, exchange, params, state, place):
  """Returns a sum over the common parameters after each step."""
  if exchange:  # no process is late for the first exchange
    exchange.compile(params, state)
    multihost_utils.sync_global_devices("compiled")
  found = []
  for i in range(STEPS):
    params, state = step(params, state, place(batch(i)))
    if exchange:
      params, state = exchange(params, state)
    own = [np.asarray(p.addressable_data(0)) for p in jax.tree.leaves(params)]
    found.append(float(sum(np.abs(p).sum(dtype=np.float64) for p in own)))
  if exchange:
    exchange.wait()
    multihost_utils.sync_global_devices("done")
  return found


def main(port, index, seconds):
  faulthandler.dump_traceback_later(int(seconds), exit=True)
  jax.config.update("jax_num_cpu_devices", REPLICAS // PROCESSES)
  jax.config.update("jax_cpu_collectives_implementation", "gloo")
  address = f"127.0.0.1:{port}"
  jax.distributed.initialize(
    address, PROCESSES, int(index), coordinator_bind_address=address
  )
  found = {
    "one program": plain(False), "jit": plain(True), "pmap": pmapped()
  }  # fmt: skip
  print(json.dumps(found), flush=True)
  jax.distributed.shutdown()


if __name__ == "__main__":
  main(*sys.argv[1:])
