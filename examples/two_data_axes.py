"""Trains on replicas along two axes, and on replicas with a fast axis.

Both have 2 pods of 4 devices. In `main` all 8 devices are replicas, so every
link carries compressed gradients. In `main(fast=True)` the two pods are
replicas: inside a pod gradients are averaged dense.

    python examples/two_data_axes.py
"""

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import edgc_jax  # before JAX uses a device

jax.config.update("jax_num_cpu_devices", 8)

STEPS = 60
AXES = ("pod", "data")


def loss_fn(params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
  hidden = jax.nn.relu(x @ params["up"])
  out = (x + hidden @ params["down"]) @ params["head"]
  return jnp.mean((out - jnp.sin(x[:, :4]).sum(-1)) ** 2)


def main(fast: bool = False) -> tuple[list[float], dict[str, object]]:
  mesh = jax.make_mesh((2, 4), AXES, axis_types=(AxisType.Auto,) * 2)
  replicas = AXES
  tx = optax.chain(edgc_jax.powersgd(4, AXES), optax.adam(1e-2))
  if fast:
    replicas = "pod"
    tx = optax.chain(
      edgc_jax.mean_over("data"), edgc_jax.powersgd(4, "pod"), optax.adam(1e-2)
    )
  keys = jax.random.split(jax.random.key(0), 3)
  params = {
    "up": jax.random.normal(keys[0], (64, 128)) / 8,
    "down": jax.random.normal(keys[1], (128, 64)) / 12,
    "head": jax.random.normal(keys[2], (64,)) / 8,
  }
  # Residuals differ along the axes of the replicas alone.
  specs = edgc_jax.state_specs(tx, params, replicas)

  def train_step(params, opt_state, x):
    local = jax.lax.pcast(params, AXES, to="varying")
    loss, grads = jax.value_and_grad(loss_fn)(local, x)
    updates, opt_state = tx.update(grads, opt_state, params)
    params = optax.apply_updates(params, updates)
    loss = jax.lax.pmean(edgc_jax.after_update(loss, opt_state), AXES)
    return params, opt_state, loss

  init = jax.shard_map(tx.init, mesh=mesh, in_specs=P(), out_specs=specs)
  step = jax.jit(
    jax.shard_map(
      train_step,
      mesh=mesh,
      in_specs=(P(), specs, P(AXES)),
      out_specs=(P(), specs, P()),
    )
  )
  params = jax.device_put(params, NamedSharding(mesh, P()))
  opt_state = jax.jit(init)(params)
  losses = []
  for i in range(STEPS):
    x = jax.random.normal(jax.random.key(i), (256, 64))
    params, opt_state, loss = step(params, opt_state, x)
    losses.append(float(loss))
  return losses, edgc_jax.metrics(opt_state)


if __name__ == "__main__":
  for fast in (False, True):
    losses, numbers = main(fast)
    print("2 replicas of 4 devices" if fast else "8 replicas")
    print(f"loss {losses[0]:.3f} to {losses[-1]:.3f}")
    print(f"{numbers['compression_ratio']:.1f} times fewer bytes than dense")
