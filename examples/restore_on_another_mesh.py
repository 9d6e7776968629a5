"""Saves a run of 4 replicas of 2 shards, restores it on 2 replicas of 2 shards.

All state of the method is in the optimiser state. `restore` reads the old
numbers from its arrays, and averages the residuals, which differ by replica.

    python examples/restore_on_another_mesh.py
"""

import pathlib
import tempfile

import jax
import jax.numpy as jnp
import optax
import orbax.checkpoint as ocp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import edgc_jax  # before JAX uses a device

jax.config.update("jax_num_cpu_devices", 8)

STEPS = 40  # before, and again after
SPECS = {"up": P(None, "fsdp"), "down": P("fsdp")}
PARAMS = {
  "up": jax.random.normal(jax.random.key(0), (64, 128)) / 8,
  "down": jax.random.normal(jax.random.key(1), (128, 64)) / 12,
}


def loss_fn(params, x):
  out = (x + jax.nn.relu(x @ params["up"]) @ params["down"]).sum(-1) / 8
  return jnp.mean((out - jnp.sin(x[:, :4]).sum(-1)) ** 2)


def setup(replicas):
  types, devices = (AxisType.Auto,) * 2, jax.devices()[: 2 * replicas]
  mesh = jax.make_mesh((replicas, 2), ("data", "fsdp"), types, devices=devices)
  reducer = edgc_jax.on_mesh(edgc_jax.powersgd(4), mesh, SPECS)
  tx = optax.chain(reducer, optax.adam(1e-2))

  @jax.jit
  def train_step(params, opt_state, x):
    loss, grads = edgc_jax.value_and_grad(loss_fn, mesh)(params, x)
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss

  def train(params, opt_state, losses):
    for i in range(STEPS):
      x = jax.random.normal(jax.random.key(i), (256, 64))
      params, opt_state, loss = train_step(params, opt_state, x)
      losses.append(float(loss))
    return params, opt_state

  return mesh, tx, train


def main():
  mesh, tx, train = setup(replicas=4)
  placed = {name: NamedSharding(mesh, spec) for name, spec in SPECS.items()}
  params = jax.device_put(PARAMS, placed)
  losses = []
  params, opt_state = train(params, tx.init(params), losses)
  with tempfile.TemporaryDirectory() as folder:
    path = pathlib.Path(folder) / "checkpoint"
    with ocp.StandardCheckpointer() as checkpointer:
      checkpointer.save(path, {"params": params, "opt_state": opt_state})
    mesh, tx, train = setup(replicas=2)
    how = {"mesh": mesh, "param_specs": SPECS}
    params, opt_state = edgc_jax.restore(path, tx, PARAMS, **how)
  _, opt_state = train(params, opt_state, losses)
  return losses, edgc_jax.metrics(opt_state)


if __name__ == "__main__":
  losses, numbers = main()
  print(f"loss {losses[0]:.3f}, {losses[STEPS]:.3f}, {losses[-1]:.3f}")
  print(f"{numbers['compression_ratio']:.1f} times fewer bytes than dense")
