"""Trains low-rank adapters of a frozen model (LoRA) on 8 replicas.

Only the adapters are differentiated, sent and kept by the optimiser. They are
thin already, so they go in 8 bits, not as factors. The frozen weights are an
argument that every replica gets whole.

    python examples/lora.py
"""

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import edgc_jax  # before JAX uses a device

jax.config.update("jax_num_cpu_devices", 8)

STEPS, WIDTH, RANK = 60, 128, 8

mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
reducer = edgc_jax.on_mesh(edgc_jax.quantize(8, error_feedback=True), mesh)
tx = optax.chain(reducer, optax.adam(1e-2))


def init_params() -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
  """Returns the adapters, and the frozen weights."""
  keys = jax.random.split(jax.random.key(0), 3)
  frozen = {
    name: jax.random.normal(key, (WIDTH, WIDTH)) / WIDTH**0.5
    for name, key in zip(("up", "down"), keys, strict=False)
  }
  adapters = {
    name: {
      "a": jax.random.normal(keys[2], (WIDTH, RANK)) / WIDTH**0.5,
      "b": jnp.zeros((RANK, WIDTH)),
    }
    for name in frozen
  }
  return adapters, frozen


def predict(frozen, adapters, x):
  for name, weight in frozen.items():
    own = adapters[name]
    x = jnp.tanh(x @ weight + x @ own["a"] @ own["b"])
  return x


def loss_fn(adapters, frozen, x):
  target = jnp.tanh(x[:, :1]) * jnp.ones(WIDTH)
  return jnp.mean((predict(frozen, adapters, x) - target) ** 2)


@jax.jit
def train_step(adapters, opt_state, frozen, x):
  gradient = edgc_jax.value_and_grad(loss_fn, mesh, in_axes=(None, 0))
  loss, grads = gradient(adapters, frozen, x)
  updates, opt_state = tx.update(grads, opt_state, adapters)
  return optax.apply_updates(adapters, updates), opt_state, loss


def main() -> tuple[list[float], dict[str, object]]:
  placed = NamedSharding(mesh, P())
  adapters, frozen = jax.device_put(init_params(), placed)
  opt_state, losses = jax.jit(tx.init)(adapters), []
  for i in range(STEPS):
    x = jax.random.normal(jax.random.key(i), (256, WIDTH))
    adapters, opt_state, loss = train_step(adapters, opt_state, frozen, x)
    losses.append(float(loss))
  return losses, edgc_jax.metrics(opt_state)


if __name__ == "__main__":
  losses, numbers = main()
  print(f"loss {losses[0]:.3f} to {losses[-1]:.3f}")
  print(f"{numbers['compression_ratio']:.1f} times fewer bytes than dense")
