"""Trains on 2 replicas of 4 shards; `jax.shard_map` binds all axes (HSDP).

The loss gathers weights over the fast axis "fsdp" where it needs them;
`powersgd` sends the gradients of each device's own shards over "data".

    python examples/hsdp_by_hand.py
"""

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import edgc_jax  # before JAX uses a device

jax.config.update("jax_num_cpu_devices", 8)

STEPS = 100
SPECS = {"up": P(None, "fsdp"), "down": P("fsdp")}
ROWS = P(("data", "fsdp"))

chain = optax.chain(
  edgc_jax.powersgd(4),
  edgc_jax.clip_by_global_norm(1.0, "fsdp"),
  optax.adam(3e-3),
)
tx = edgc_jax.skip_nonfinite(chain, ("data", "fsdp"))


def loss_fn(params, x):
  """Returns this device's part of the mean loss over the shards."""
  up = jax.lax.all_gather(params["up"], "fsdp", axis=1, tiled=True)
  down = jax.lax.all_gather(params["down"], "fsdp", axis=0, tiled=True)
  out = (x + jax.nn.relu(x @ up) @ down).sum(-1) / 8
  loss = jnp.mean((out - jnp.sin(x[:, :4]).sum(-1)) ** 2)
  # JAX sums gradients over the shards: this makes the sum a mean.
  return loss / jax.lax.axis_size("fsdp")


def train_step(params, opt_state, x):
  # Varying over the replicas alone, so that their gradients stay local.
  local = jax.lax.pcast(params, "data", to="varying")
  loss, grads = jax.value_and_grad(loss_fn)(local, x)
  updates, opt_state = tx.update(grads, opt_state, params)
  params = optax.apply_updates(params, updates)
  loss = jax.lax.psum(edgc_jax.after_update(loss, opt_state), "fsdp")
  return params, opt_state, jax.lax.pmean(loss, "data")


def main():
  types = (AxisType.Auto,) * 2
  mesh = jax.make_mesh((2, 4), ("data", "fsdp"), axis_types=types)
  placed = {name: NamedSharding(mesh, spec) for name, spec in SPECS.items()}
  keys, normal = jax.random.split(jax.random.key(0)), jax.random.normal
  params = {"up": normal(keys[0], (64, 256)) / 8,
            "down": normal(keys[1], (256, 64)) / 16}  # fmt: skip
  params = jax.device_put(params, placed)
  specs = edgc_jax.state_specs(tx, params, mesh=mesh, param_specs=SPECS)
  how = {"in_specs": (SPECS, specs, ROWS), "out_specs": (SPECS, specs, P())}
  step = jax.jit(jax.shard_map(train_step, mesh=mesh, **how))
  init = jax.shard_map(tx.init, mesh=mesh, in_specs=(SPECS,), out_specs=specs)
  opt_state, losses = jax.jit(init)(params), []
  for i in range(STEPS):
    x = jax.random.normal(jax.random.key(i), (256, 64))
    params, opt_state, loss = step(params, opt_state, x)
    losses.append(float(loss))
  return losses, edgc_jax.metrics(opt_state)


if __name__ == "__main__":
  losses, numbers = main()
  print(f"loss {losses[0]:.3f} to {losses[-1]:.3f}")
  print(f"{numbers['compression_ratio']:.1f} times fewer bytes than dense")
