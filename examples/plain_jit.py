"""Trains a tiny language model in plain `jax.jit` with compressed gradients.

`plain_jit_dense.py` is the same loop without; compare them:

    python examples/plain_jit.py
    diff examples/plain_jit_dense.py examples/plain_jit.py
"""

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import edgc_jax  # before JAX uses a device

jax.config.update("jax_num_cpu_devices", 8)

STEPS, VOCAB, LENGTH, WIDTH, HIDDEN = 60, 32, 16, 64, 256


def init_params():
  keys = jax.random.split(jax.random.key(0), 4)
  normal = jax.nn.initializers.lecun_normal()
  return {
    "embedding": jax.random.normal(keys[0], (VOCAB, WIDTH)) / VOCAB**0.5,
    "up": normal(keys[1], (2 * WIDTH, HIDDEN)),
    "down": normal(keys[2], (HIDDEN, WIDTH)),
    "head": normal(keys[3], (WIDTH, VOCAB)),
  }


def loss_fn(params, tokens, key):
  """Returns the cross entropy of tokens given the two before, with dropout."""
  x = params["embedding"][tokens]
  pairs = jnp.concatenate([x[:, :-2], x[:, 1:-1]], -1)
  pairs *= jax.random.bernoulli(key, 0.9, pairs.shape) / 0.9
  logits = jax.nn.relu(pairs @ params["up"]) @ params["down"] @ params["head"]
  losses = optax.softmax_cross_entropy_with_integer_labels
  return losses(logits, tokens[:, 2:]).mean()


def batch_of(step: int) -> jax.Array:
  """Returns tokens in which each is the sum of the two before."""
  pair = jax.random.randint(jax.random.key(step), (64, 2), 0, VOCAB)
  columns = [pair[:, 0], pair[:, 1]]
  for _ in range(LENGTH - 2):
    columns.append((columns[-1] + columns[-2]) % VOCAB)
  return jnp.stack(columns, axis=1)


mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
jax.set_mesh(mesh)
reducer = edgc_jax.edgc(rank_max=8, rank_min=4, total_steps=STEPS)
tx = optax.chain(reducer, optax.adam(1e-2))


@jax.jit
def train_step(params, opt_state, tokens, key):
  loss, grads = edgc_jax.value_and_grad(loss_fn)(params, tokens, key)
  updates, opt_state = tx.update(grads, opt_state, params)
  return optax.apply_updates(params, updates), opt_state, loss


def main():
  params = jax.device_put(init_params(), NamedSharding(mesh, P()))
  opt_state, losses = jax.jit(tx.init)(params), []
  for step in range(STEPS):
    tokens = jax.device_put(batch_of(step), NamedSharding(mesh, P("data")))
    key = jax.random.key(step)
    params, opt_state, loss = train_step(params, opt_state, tokens, key)
    losses.append(float(loss))
  return losses, opt_state


if __name__ == "__main__":
  losses, opt_state = main()
  print(f"loss {losses[0]:.3f} to {losses[-1]:.3f}")
  ratio = edgc_jax.metrics(opt_state)["compression_ratio"]
  print(f"{ratio:.1f} times fewer bytes than dense")
