"""Trains a generator and a discriminator, each with a reducer of its own.

On CPUs `after_update` has the generator's collectives wait for the update.
"""

import itertools

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import edgc_jax  # before JAX uses a device

jax.config.update("jax_num_cpu_devices", 8)

STEPS, NOISE, HIDDEN, DATA = 180, 32, 128, 16
mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
gen_tx = optax.chain(
  edgc_jax.on_mesh(edgc_jax.powersgd(4), mesh), optax.adam(1e-3, b1=0.5)
)
disc_tx = optax.chain(
  edgc_jax.on_mesh(edgc_jax.powersgd(4), mesh), optax.adam(1e-3, b1=0.5)
)


def init_mlp(key, sizes):
  normal = jax.nn.initializers.he_normal()
  return [
    (normal(jax.random.fold_in(key, i), pair), jnp.zeros(pair[1]))
    for i, pair in enumerate(itertools.pairwise(sizes))
  ]


def mlp(layers, x):
  for w, b in layers[:-1]:
    x = jax.nn.leaky_relu(x @ w + b, 0.2)
  return x @ layers[-1][0] + layers[-1][1]


def disc_loss(disc, gen, noise, real):
  fake = jax.nn.softplus(mlp(disc, mlp(gen, noise)))
  return jnp.mean(jax.nn.softplus(-mlp(disc, real)) + fake)


def gen_loss(gen, disc, noise, real):
  fake = mlp(gen, noise)
  return jax.nn.softplus(-mlp(disc, fake)).mean(), real.mean(0) - fake.mean(0)


@jax.jit
def train_step(params, states, noise, real):
  gen, disc = params
  how, args = {"mesh": mesh, "in_axes": (None, 0, 0)}, (noise, real)
  _, grads = edgc_jax.value_and_grad(disc_loss, **how)(disc, gen, *args)
  updates, disc_state = disc_tx.update(grads, states[1], disc)
  gen = edgc_jax.after_update(gen, disc_state)
  grad = edgc_jax.value_and_grad(gen_loss, **how, has_aux=True)
  (_, distance), grads = grad(gen, disc, *args)
  disc = optax.apply_updates(disc, updates)
  updates, gen_state = gen_tx.update(grads, states[0], gen)
  params = optax.apply_updates(gen, updates), disc
  return params, (gen_state, disc_state), jnp.sum(distance**2)


def main():
  gen = init_mlp(jax.random.key(0), [NOISE, HIDDEN, HIDDEN, DATA])
  disc = init_mlp(jax.random.key(1), [DATA, HIDDEN, HIDDEN, 1])
  gen, disc = params = jax.device_put((gen, disc), NamedSharding(mesh, P()))
  states = jax.jit(gen_tx.init)(gen), jax.jit(disc_tx.init)(disc)
  losses = []
  for i in range(STEPS):
    noise = jax.random.normal(jax.random.key(2 * i), (256, NOISE))
    real = 1 + 0.5 * jax.random.normal(jax.random.key(2 * i + 1), (256, DATA))
    params, states, loss = train_step(params, states, noise, real)
    losses.append(float(loss))
  return losses, list(map(edgc_jax.metrics, states))


if __name__ == "__main__":
  losses, numbers = main()
  print(f"distance of the means {losses[0]:.3f} to {losses[-1]:.3f}")
  for own in numbers:
    print(f"{own['compression_ratio']:.1f} times fewer bytes than dense")
