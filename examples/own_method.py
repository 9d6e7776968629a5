"""Trains with a method of its own: a sign for each entry, one scale a matrix.

EF-signSGD (Karimireddy et al. 2019, arXiv:1901.09847).
docs/writing_a_method.md explains the parts of a method.

    python examples/own_method.py
"""

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import edgc_jax  # before JAX uses a device
from edgc_jax.extend import Method, Outcome, Send, added, reducer

jax.config.update("jax_num_cpu_devices", 8)

STEPS = 100


def scaled_signs(leaf, gradient, state, ranks, draws):
  """Sends s_i sign(M_i), with s_i = mean |M_i| of each matrix."""
  m = added(gradient, state.residual).reshape(leaf.view)  # M_i, [k, rows, cols]
  scale = jnp.mean(jnp.abs(m), axis=(1, 2), keepdims=True)  # s_i
  reply = yield Send(gathered=(jnp.packbits(m >= 0), scale))
  bits, scales = reply.gathered  # of all replicas, [N, bytes], [N, k, 1, 1]
  signs = 2.0 * jnp.unpackbits(bits, axis=1, count=m.size) - 1.0
  update = jnp.mean(scales * signs.reshape(-1, *m.shape), axis=0)
  return Outcome(update, residual=m - jnp.where(m >= 0, scale, -scale))


def init_params():
  keys = jax.random.split(jax.random.key(0))
  return {
    "up": jax.random.normal(keys[0], (32, 128)) / 6,
    "down": jax.random.normal(keys[1], (128, 32)) / 11,
    "bias": jnp.zeros(32),
  }


def loss_fn(params, x):
  out = jax.nn.relu(x @ params["up"]) @ params["down"] + params["bias"]
  return jnp.mean((out - jnp.sin(x)) ** 2)


mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
jax.set_mesh(mesh)
tx = optax.chain(reducer(Method(scaled_signs)), optax.adam(1e-2))


@jax.jit
def train_step(params, opt_state, x):
  loss, grads = edgc_jax.value_and_grad(loss_fn)(params, x)
  updates, opt_state = tx.update(grads, opt_state, params)
  return optax.apply_updates(params, updates), opt_state, loss


def main():
  params = jax.device_put(init_params(), NamedSharding(mesh, P()))
  opt_state, losses = jax.jit(tx.init)(params), []
  for step in range(STEPS):
    x = jax.random.normal(jax.random.key(step), (256, 32))
    x = jax.device_put(x, NamedSharding(mesh, P("data")))
    params, opt_state, loss = train_step(params, opt_state, x)
    losses.append(float(loss))
  return losses, opt_state


if __name__ == "__main__":
  losses, opt_state = main()
  print(f"loss {losses[0]:.3f} to {losses[-1]:.3f}")
  ratio = edgc_jax.metrics(opt_state)["compression_ratio"]
  print(f"{ratio:.1f} times fewer bytes than dense")
