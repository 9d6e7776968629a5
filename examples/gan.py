"""Trains a generator and a discriminator, each with a reducer of its own.

Both are updated in one step. On CPUs XLA may mix up collectives that do not
depend on each other, so `after_update` puts the generator's update after the
discriminator's, and the mean of the losses after both.

    python examples/gan.py
"""

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import edgc_jax  # before JAX uses a device

jax.config.update("jax_num_cpu_devices", 8)

STEPS = 180
NOISE, HIDDEN, DATA = 32, 128, 16

gen_tx = optax.chain(edgc_jax.powersgd(4), optax.adam(1e-3, b1=0.5))
disc_tx = optax.chain(edgc_jax.powersgd(4), optax.adam(1e-3, b1=0.5))


def init_mlp(key: jax.Array, sizes: list[int]) -> list[dict[str, jax.Array]]:
  return [
    {"w": jax.random.normal(k, (m, n)) * (2 / m) ** 0.5, "b": jnp.zeros(n)}
    for k, m, n in zip(
      jax.random.split(key, len(sizes) - 1), sizes[:-1], sizes[1:], strict=True
    )
  ]


def mlp(layers: list[dict[str, jax.Array]], x: jax.Array) -> jax.Array:
  for layer in layers[:-1]:
    x = jax.nn.leaky_relu(x @ layer["w"] + layer["b"], 0.2)
  return x @ layers[-1]["w"] + layers[-1]["b"]


def disc_loss(disc, real, fake):  # noqa: ANN001, ANN201
  softplus = jax.nn.softplus
  return jnp.mean(softplus(-mlp(disc, real)) + softplus(mlp(disc, fake)))


def gen_loss(gen, disc, noise):  # noqa: ANN001, ANN201
  return jnp.mean(jax.nn.softplus(-mlp(disc, mlp(gen, noise))))


def train_step(params, states, noise, real):  # noqa: ANN001, ANN201
  gen, disc = jax.lax.pcast(params, "data", to="varying")
  fake = mlp(gen, noise)
  disc_grads = jax.grad(disc_loss)(disc, real, fake)
  gen_grads = jax.grad(gen_loss)(gen, disc, noise)
  disc_updates, disc_state = disc_tx.update(disc_grads, states[1], params[1])
  gen_grads = edgc_jax.after_update(gen_grads, disc_state)
  gen_updates, gen_state = gen_tx.update(gen_grads, states[0], params[0])
  # How far the generator is: the squared distance of the means.
  distance = real.mean(0) - fake.mean(0)
  distance = jax.lax.pmean(edgc_jax.after_update(distance, gen_state), "data")
  params = optax.apply_updates(params, (gen_updates, disc_updates))
  return params, (gen_state, disc_state), jnp.sum(distance**2)


def init(params):  # noqa: ANN001, ANN201
  return gen_tx.init(params[0]), disc_tx.init(params[1])


def main() -> tuple[list[float], list[dict[str, object]]]:
  mesh = jax.make_mesh(
    (4,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4]
  )
  keys = jax.random.split(jax.random.key(0))
  params = (
    init_mlp(keys[0], [NOISE, HIDDEN, HIDDEN, DATA]),
    init_mlp(keys[1], [DATA, HIDDEN, HIDDEN, 1]),
  )
  specs = (
    edgc_jax.state_specs(gen_tx, params[0]),
    edgc_jax.state_specs(disc_tx, params[1]),
  )
  states = jax.jit(
    jax.shard_map(init, mesh=mesh, in_specs=(P(),), out_specs=specs)
  )(params)
  step = jax.jit(
    jax.shard_map(
      train_step,
      mesh=mesh,
      in_specs=(P(), specs, P("data"), P("data")),
      out_specs=(P(), specs, P()),
    )
  )
  losses = []
  for i in range(STEPS):
    keys = jax.random.split(jax.random.key(i))
    noise = jax.random.normal(keys[0], (256, NOISE))
    real = 1 + 0.5 * jax.random.normal(keys[1], (256, DATA))
    params, states, loss = step(params, states, noise, real)
    losses.append(float(loss))
  return losses, [edgc_jax.metrics(state) for state in states]


if __name__ == "__main__":
  losses, numbers = main()
  print(f"distance of the means {losses[0]:.3f} to {losses[-1]:.3f}")
  for name, own in zip(("generator", "discriminator"), numbers, strict=True):
    ratio = own["compression_ratio"]
    print(f"{name}: {ratio:.1f} times fewer bytes than dense")
