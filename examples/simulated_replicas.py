"""Trains 8 replicas that `jax.vmap` simulates on one device.

For research on one GPU: the losses, ranks and bytes are those of 8 devices.
`state_axes` keeps once what is equal on all replicas, so that conditions on it,
such as dense or low rank, run one branch.

    python examples/simulated_replicas.py
"""

import jax
import jax.numpy as jnp
import optax

import edgc_jax

STEPS, REPLICAS = 60, 8

tx = optax.chain(edgc_jax.edgc(rank_max=4, total_steps=STEPS), optax.adam(1e-2))


def init_params() -> dict[str, jax.Array]:
  keys = jax.random.split(jax.random.key(0), 2)
  return {
    "up": jax.random.normal(keys[0], (64, 128)) / 8,
    "down": jax.random.normal(keys[1], (128, 64)) / 12,
  }


def loss_fn(params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
  return jnp.mean((jax.nn.relu(x @ params["up"]) @ params["down"] - x) ** 2)


def main() -> tuple[list[float], dict[str, object]]:
  params, losses = init_params(), []
  axes = edgc_jax.state_axes(tx, params)
  init = jax.vmap(tx.init, None, axes, axis_name="data", axis_size=REPLICAS)
  update = jax.vmap(tx.update, (0, axes, None), (None, axes), axis_name="data")

  @jax.jit
  def train_step(params, opt_state, x):
    gradients = jax.vmap(jax.value_and_grad(loss_fn), in_axes=(None, 0))
    loss, grads = gradients(params, x)
    updates, opt_state = update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss.mean()

  opt_state = jax.jit(init)(params)
  for step in range(STEPS):
    x = jax.random.normal(jax.random.key(step), (REPLICAS, 32, 64))
    params, opt_state, loss = train_step(params, opt_state, x)
    losses.append(float(loss))
  return losses, edgc_jax.metrics(opt_state)


if __name__ == "__main__":
  losses, numbers = main()
  print(f"loss {losses[0]:.3f} to {losses[-1]:.3f}")
  print(f"{numbers['compression_ratio']:.1f} times fewer bytes than dense")
