"""Trains on 2 replicas of 4 shards; `jax.shard_map` binds all axes (HSDP).

Weights are gathered over the fast axis "fsdp" where a layer needs them, and
`powersgd` sends the gradients of each device's own shards over the slow axis
"data".

    python examples/hsdp_by_hand.py
"""

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import edgc_jax  # before JAX uses a device

jax.config.update("jax_num_cpu_devices", 8)

STEPS = 60
SPECS = {"up": P(None, "fsdp"), "down": P("fsdp"), "head": P()}

tx = edgc_jax.skip_nonfinite(
  optax.chain(
    edgc_jax.powersgd(4),
    edgc_jax.clip_by_global_norm(1.0, "fsdp"),
    optax.adam(1e-2),
  ),
  ("data", "fsdp"),
)


def init_params() -> dict[str, jax.Array]:
  keys = jax.random.split(jax.random.key(0), 3)
  normal = jax.random.normal
  return {
    "up": normal(keys[0], (64, 256)) / 8,
    "down": normal(keys[1], (256, 64)) / 16,
    "head": normal(keys[2], (64,)) / 8,
  }


def loss_fn(params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
  """Returns this device's part of the mean loss over the shards."""
  up = jax.lax.all_gather(params["up"], "fsdp", axis=1, tiled=True)
  down = jax.lax.all_gather(params["down"], "fsdp", axis=0, tiled=True)
  out = (x + jax.nn.relu(x @ up) @ down) @ params["head"]
  loss = jnp.mean((out - jnp.sin(x[:, :4]).sum(-1)) ** 2)
  # JAX sums gradients over the shards: this makes the sum a mean.
  return loss / jax.lax.axis_size("fsdp")


def train_step(params, opt_state, x):  # noqa: ANN001, ANN201
  # Varying over the replicas alone, so that their gradients stay local.
  local = jax.lax.pcast(params, "data", to="varying")
  loss, grads = jax.value_and_grad(loss_fn)(local, x)
  updates, opt_state = tx.update(grads, opt_state, params)
  params = optax.apply_updates(params, updates)
  loss = jax.lax.psum(edgc_jax.after_update(loss, opt_state), "fsdp")
  return params, opt_state, jax.lax.pmean(loss, "data")


def main() -> tuple[list[float], dict[str, object]]:
  mesh = jax.make_mesh(
    (2, 4), ("data", "fsdp"), axis_types=(AxisType.Auto,) * 2
  )
  placed = {name: NamedSharding(mesh, spec) for name, spec in SPECS.items()}
  params = jax.jit(init_params, out_shardings=placed)()
  specs = edgc_jax.state_specs(tx, params, mesh=mesh, param_specs=SPECS)
  init = jax.shard_map(tx.init, mesh=mesh, in_specs=(SPECS,), out_specs=specs)
  step = jax.jit(
    jax.shard_map(
      train_step,
      mesh=mesh,
      in_specs=(SPECS, specs, P(("data", "fsdp"))),
      out_specs=(SPECS, specs, P()),
    ),
    donate_argnums=(0, 1),
  )
  opt_state = jax.jit(init)(params)
  losses = []
  for i in range(STEPS):
    x = jax.random.normal(jax.random.key(i), (256, 64))
    params, opt_state, loss = step(params, opt_state, x)
    losses.append(float(loss))
  return losses, edgc_jax.metrics(opt_state)


if __name__ == "__main__":
  losses, numbers = main()
  print(f"loss {losses[0]:.3f} to {losses[-1]:.3f}")
  print(f"{numbers['compression_ratio']:.1f} times fewer bytes than dense")
