"""Saves a run of 4 replicas of 2 shards, restores it on 2 replicas of 2 shards.

All state of the method is in the optimiser state, so a checkpoint is a tree of
parameters and state. Residuals differ by replica; `resize_replicas` averages
them in pairs.

    python examples/restore_on_another_mesh.py
"""

import pathlib
import tempfile

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import edgc_jax  # before JAX uses a device

jax.config.update("jax_num_cpu_devices", 8)

STEPS = 40  # before, and again after
SPECS = {"up": P(None, "fsdp"), "down": P("fsdp"), "head": P()}

tx = optax.chain(edgc_jax.powersgd(4), optax.adam(1e-2))


def init_params() -> dict[str, jax.Array]:
  keys = jax.random.split(jax.random.key(0), 3)
  normal = jax.random.normal
  return {
    "up": normal(keys[0], (64, 128)) / 8,
    "down": normal(keys[1], (128, 64)) / 12,
    "head": normal(keys[2], (64,)) / 8,
  }


def loss_fn(params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
  up = jax.lax.all_gather(params["up"], "fsdp", axis=1, tiled=True)
  down = jax.lax.all_gather(params["down"], "fsdp", axis=0, tiled=True)
  out = (x + jax.nn.relu(x @ up) @ down) @ params["head"]
  loss = jnp.mean((out - jnp.sin(x[:, :4]).sum(-1)) ** 2)
  return loss / jax.lax.axis_size("fsdp")  # JAX sums over the shards


def train_step(params, opt_state, x):  # noqa: ANN001, ANN201
  local = jax.lax.pcast(params, "data", to="varying")
  loss, grads = jax.value_and_grad(loss_fn)(local, x)
  updates, opt_state = tx.update(grads, opt_state, params)
  params = optax.apply_updates(params, updates)
  loss = jax.lax.psum(edgc_jax.after_update(loss, opt_state), "fsdp")
  return params, opt_state, jax.lax.pmean(loss, "data")


def prepare(replicas: int):  # noqa: ANN201
  """Returns init and step on a mesh, and specs and shardings of their state."""
  mesh = jax.make_mesh(
    (replicas, 2),
    ("data", "fsdp"),
    axis_types=(AxisType.Auto,) * 2,
    devices=jax.devices()[: 2 * replicas],
  )
  shapes = jax.eval_shape(init_params)
  state_specs = edgc_jax.state_specs(tx, shapes, mesh=mesh, param_specs=SPECS)
  specs = (SPECS, state_specs)
  init = jax.shard_map(
    tx.init, mesh=mesh, in_specs=(SPECS,), out_specs=state_specs
  )
  step = jax.shard_map(
    train_step,
    mesh=mesh,
    in_specs=(*specs, P(("data", "fsdp"))),
    out_specs=(*specs, P()),
  )
  shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)
  return jax.jit(init), jax.jit(step), specs, shardings


def train(step, params, opt_state, first: int):  # noqa: ANN001, ANN201
  losses = []
  for i in range(first, first + STEPS):
    x = jax.random.normal(jax.random.key(i), (256, 64))
    params, opt_state, loss = step(params, opt_state, x)
    losses.append(float(loss))
  return (params, opt_state), losses


def main() -> tuple[list[float], dict[str, object]]:
  with tempfile.TemporaryDirectory() as folder:
    path = pathlib.Path(folder) / "checkpoint"
    init, step, specs, shardings = prepare(replicas=4)
    params = jax.device_put(init_params(), shardings[0])
    saved, before = train(step, params, init(params), first=0)
    with ocp.StandardCheckpointer() as checkpointer:
      checkpointer.save(path, saved)
    # Restored to the host, as the old mesh may be gone.
    shapes = jax.tree.map(lambda x: np.empty(x.shape, x.dtype), saved)
    with ocp.StandardCheckpointer() as checkpointer:
      params, opt_state = checkpointer.restore(path, shapes)
  opt_state = edgc_jax.resize_replicas(opt_state, specs[1], old=4, new=2)
  _, step, _, shardings = prepare(replicas=2)
  params, opt_state = jax.device_put((params, opt_state), shardings)
  (_, opt_state), after = train(step, params, opt_state, first=STEPS)
  return before + after, edgc_jax.metrics(opt_state)


if __name__ == "__main__":
  losses, numbers = main()
  print(
    f"loss {losses[0]:.3f} to {losses[STEPS - 1]:.3f}, then {losses[-1]:.3f}"
  )
  print(f"{numbers['compression_ratio']:.1f} times fewer bytes than dense")
