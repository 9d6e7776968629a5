"""Trains matrices and other leaves by optimisers of their own.

One reducer comes first, then `optax.partition`: the reducer sends matrices as
factors and all else dense.

    python examples/partition.py
"""

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import edgc_jax  # before JAX uses a device

jax.config.update("jax_num_cpu_devices", 8)

STEPS = 60
mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))


def label(params):
  return jax.tree.map(lambda p: "matrix" if p.ndim == 2 else "other", params)


groups = {"matrix": optax.adamw(1e-2), "other": optax.adam(1e-2)}
reducer = edgc_jax.on_mesh(edgc_jax.powersgd(4), mesh)
tx = optax.chain(reducer, optax.partition(groups, label))


def loss_fn(params, x):
  hidden = jax.nn.relu(x @ params["first"] + params["bias"])
  out = (x + hidden @ params["second"]).sum(-1) / 8
  return jnp.mean((out - jnp.sin(x[:, :4]).sum(-1)) ** 2)


@jax.jit
def train_step(params, opt_state, x):
  loss, grads = edgc_jax.value_and_grad(loss_fn, mesh)(params, x)
  updates, opt_state = tx.update(grads, opt_state, params)
  return optax.apply_updates(params, updates), opt_state, loss


def main():
  params = {
    "first": jax.random.normal(jax.random.key(1), (64, 128)) / 8,
    "second": jax.random.normal(jax.random.key(2), (128, 64)) / 12,
    "bias": jnp.zeros(128),
  }
  params = jax.device_put(params, NamedSharding(mesh, P()))
  opt_state, losses = jax.jit(tx.init)(params), []
  for i in range(STEPS):
    x = jax.random.normal(jax.random.key(i), (256, 64))
    params, opt_state, loss = train_step(params, opt_state, x)
    losses.append(float(loss))
  return losses, edgc_jax.metrics(opt_state)


if __name__ == "__main__":
  losses, numbers = main()
  print(f"loss {losses[0]:.3f} to {losses[-1]:.3f}")
  print(f"{numbers['compression_ratio']:.1f} times fewer bytes than dense")
