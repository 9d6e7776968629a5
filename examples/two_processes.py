"""Trains on two processes that are started by hand, on one host or on two.

Each host starts one, with the address of the first, and its index:

    python examples/two_processes.py 127.0.0.1:6543 0 &
    python examples/two_processes.py 127.0.0.1:6543 1

If one dies, the other ends after `heartbeat_timeout_seconds` at the latest (100
by default). Start both again from a checkpoint (`restore_on_another_mesh.py`).
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import edgc_jax  # before JAX uses a device

STEPS = 60


def loss_fn(params, x):
  out = (x + jax.nn.relu(x @ params["up"]) @ params["down"]).sum(-1) / 8
  return jnp.mean((out - jnp.sin(x[:, :4]).sum(-1)) ** 2)


def main(address, index):
  jax.config.update("jax_cpu_collectives_implementation", "gloo")
  jax.config.update("jax_num_cpu_devices", 1)  # a process is a replica
  jax.distributed.initialize(
    address,
    num_processes=2,
    process_id=index,
    coordinator_bind_address=address,  # by default, JAX listens everywhere
    heartbeat_timeout_seconds=20,
  )
  mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))
  tx = optax.chain(
    edgc_jax.on_mesh(edgc_jax.powersgd(4), mesh), optax.adam(1e-2)
  )

  @jax.jit
  def train_step(params, opt_state, x):
    loss, grads = edgc_jax.value_and_grad(loss_fn, mesh)(params, x)
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss

  params = {  # equal on both: the same keys
    "up": jax.random.normal(jax.random.key(0), (64, 128)) / 8,
    "down": jax.random.normal(jax.random.key(1), (128, 64)) / 12,
  }
  params = jax.device_put(params, NamedSharding(mesh, P()))
  rows = NamedSharding(mesh, P("data"))
  opt_state, losses = jax.jit(tx.init)(params), []
  for i in range(STEPS):
    own = np.random.default_rng((i, index)).normal(size=(128, 64))
    x = jax.make_array_from_process_local_data(rows, own.astype(np.float32))
    params, opt_state, loss = train_step(params, opt_state, x)
    losses.append(float(loss))
  return losses, edgc_jax.metrics(opt_state)


if __name__ == "__main__":
  losses, numbers = main(sys.argv[1], int(sys.argv[2]))
  if jax.process_index() == 0:
    print(f"loss {losses[0]:.3f} to {losses[-1]:.3f}")
    print(f"{numbers['compression_ratio']:.1f} times fewer bytes than dense")
