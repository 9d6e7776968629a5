"""Trains an Equinox model under `jax.shard_map`.

A model also holds functions, such as its activation: its arrays alone go into
`shard_map` and into the optimiser, and `eqx.combine` makes it whole in the
loss.

    python examples/equinox_model.py
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import edgc_jax  # before JAX uses a device

jax.config.update("jax_num_cpu_devices", 8)

STEPS = 60

tx = optax.chain(edgc_jax.powersgd(4), optax.adam(1e-2))


def main() -> tuple[list[float], dict[str, object]]:
  mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
  model = eqx.nn.MLP(64, 1, width_size=128, depth=2, key=jax.random.key(0))
  params, static = eqx.partition(model, eqx.is_array)
  specs = edgc_jax.state_specs(tx, model)

  def loss_fn(params: eqx.nn.MLP, x: jax.Array) -> jax.Array:
    model = eqx.combine(params, static)
    y = jnp.sin(x[:, :4]).sum(-1, keepdims=True)
    return jnp.mean((jax.vmap(model)(x) - y) ** 2)

  def train_step(params, opt_state, x):
    local = jax.lax.pcast(params, "data", to="varying")
    loss, grads = jax.value_and_grad(loss_fn)(local, x)
    updates, opt_state = tx.update(grads, opt_state, params)
    loss = jax.lax.pmean(edgc_jax.after_update(loss, opt_state), "data")
    return eqx.apply_updates(params, updates), opt_state, loss

  init = jax.shard_map(tx.init, mesh=mesh, in_specs=P(), out_specs=specs)
  step = jax.jit(
    jax.shard_map(
      train_step,
      mesh=mesh,
      in_specs=(P(), specs, P("data")),
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
  losses, numbers = main()
  print(f"loss {losses[0]:.3f} to {losses[-1]:.3f}")
  print(f"{numbers['compression_ratio']:.1f} times fewer bytes than dense")
