"""Trains on batches that are four times as large as fits: `accumulate`.

Three of four calls send nothing. The fourth sends the mean gradient of all.

    python examples/accumulation.py
"""

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import edgc_jax  # before JAX uses a device

jax.config.update("jax_num_cpu_devices", 8)

STEPS, EVERY = 60, 4

mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
chain = optax.chain(
  edgc_jax.on_mesh(edgc_jax.powersgd(4), mesh), optax.adam(1e-2)
)
tx = edgc_jax.accumulate(chain, EVERY, mesh=mesh)


def loss_fn(params, x):
  out = (x + jax.nn.relu(x @ params["up"]) @ params["down"]).sum(-1) / 8
  return jnp.mean((out - jnp.sin(x[:, :4]).sum(-1)) ** 2)


@jax.jit
def train_step(params, opt_state, x):
  loss, grads = edgc_jax.value_and_grad(loss_fn, mesh)(params, x)
  updates, opt_state = tx.update(grads, opt_state, params)  # zeros in between
  return optax.apply_updates(params, updates), opt_state, loss


def main():
  keys, normal = jax.random.split(jax.random.key(0)), jax.random.normal
  params = {
    "up": normal(keys[0], (64, 128)) / 8,
    "down": normal(keys[1], (128, 64)) / 12,
  }
  params = jax.device_put(params, NamedSharding(mesh, P()))
  opt_state, losses = jax.jit(tx.init)(params), []
  for i in range(EVERY * STEPS):
    x = jax.random.normal(jax.random.key(i), (64, 64))
    params, opt_state, loss = train_step(params, opt_state, x)
    losses.append(float(loss))
  return losses, edgc_jax.metrics(opt_state)


if __name__ == "__main__":
  losses, numbers = main()
  print(f"loss {losses[0]:.3f} to {losses[-1]:.3f}")
  print(f"{numbers['compression_ratio']:.1f} times fewer bytes an exchange")
