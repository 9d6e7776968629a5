"""Trains a Flax Linen model under `jax.pmap`, gradients compressed by edgc.

`TrainState` stays as it is: the reducer is the first link of its optax chain.

    python examples/pmap_linen.py
"""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax import jax_utils
from flax.training.train_state import TrainState

import edgc_jax  # before JAX uses a device

REPLICAS = 8
STEPS = 60

jax.config.update("jax_num_cpu_devices", REPLICAS)


class Mlp(nn.Module):
  """Three dense layers."""

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    x = nn.relu(nn.Dense(128)(x))
    x = nn.relu(nn.Dense(128)(x))
    return nn.Dense(1)(x)


def batch_at(step: int) -> tuple[jax.Array, jax.Array]:
  """Returns 32 new rows for each replica: [replicas, 32, ...]."""
  x = jax.random.normal(jax.random.key(step), (REPLICAS, 32, 64))
  return x, jnp.sin(x[..., :4]).sum(-1, keepdims=True)


@functools.partial(jax.pmap, axis_name="data", donate_argnums=0)
def train_step(
  state: TrainState, x: jax.Array, y: jax.Array
) -> tuple[TrainState, jax.Array]:
  """Applies one update; there is no pmean of gradients, edgc averages."""

  def loss_fn(params):
    return jnp.mean((state.apply_fn(params, x) - y) ** 2)

  loss, grads = jax.value_and_grad(loss_fn)(state.params)
  state = state.apply_gradients(grads=grads)
  # On CPUs a mean of one's own waits for those of the update.
  loss = edgc_jax.after_update(loss, state.opt_state)
  return state, jax.lax.pmean(loss, "data")


def main() -> tuple[list[float], dict[str, object]]:
  model = Mlp()
  state = TrainState.create(
    apply_fn=model.apply,
    params=model.init(jax.random.key(0), jnp.zeros((1, 64))),
    tx=optax.chain(
      edgc_jax.edgc(rank_max=8, window=10, warmup_steps=10, check_every=10),
      optax.clip_by_global_norm(1.0),  # sees the mean gradient
      optax.adam(1e-2),
    ),
  )
  state = jax_utils.replicate(state)
  losses = []
  for step in range(STEPS):
    state, loss = train_step(state, *batch_at(step))
    losses.append(float(loss[0]))
  return losses, edgc_jax.metrics(state.opt_state)


if __name__ == "__main__":
  losses, numbers = main()
  print(f"loss {losses[0]:.3f} to {losses[-1]:.3f}")
  print(f"{numbers['compression_ratio']:.1f} times fewer bytes than dense")
