"""Trains matrices and biases with a reducer for each, edgc and allreduce.

`optax.partition` would not order their collectives, which CPUs may mix up. A
leaf that no reducer gets would not be averaged.

    python examples/two_reducers.py
"""

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import edgc_jax  # before JAX uses a device

jax.config.update("jax_num_cpu_devices", 8)

STEPS = 60

mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
edgc = edgc_jax.on_mesh(edgc_jax.edgc(rank_max=8, total_steps=STEPS), mesh)
matrix_tx = optax.chain(edgc, optax.adamw(1e-2))
bias_tx = optax.chain(
  edgc_jax.on_mesh(edgc_jax.allreduce(), mesh), optax.adam(1e-2)
)


def split(tree):
  """Returns matrices and biases, as two dictionaries."""
  bias = {"bias": tree["bias"]}
  return {name: x for name, x in tree.items() if name not in bias}, bias


def loss_fn(params, x):
  hidden = jax.nn.relu(x @ params["first"] + params["bias"])
  out = (x + hidden @ params["second"]).sum(-1) / 8
  return jnp.mean((out - jnp.sin(x[:, :4]).sum(-1)) ** 2)


@jax.jit
def train_step(params, states, x):
  loss, grads = edgc_jax.value_and_grad(loss_fn, mesh)(params, x)
  (matrices, bias), grads = split(params), split(grads)
  first, matrix_state = matrix_tx.update(grads[0], states[0], matrices)
  rest = edgc_jax.after_update(grads[1], matrix_state)
  second, bias_state = bias_tx.update(rest, states[1], bias)
  params = optax.apply_updates(params, first | second)
  return params, (matrix_state, bias_state), loss


def main():
  params = {
    "first": jax.random.normal(jax.random.key(1), (64, 128)) / 8,
    "second": jax.random.normal(jax.random.key(2), (128, 64)) / 12,
    "bias": jnp.zeros(128),
  }
  params = jax.device_put(params, NamedSharding(mesh, P()))
  matrices, bias = split(params)
  states = jax.jit(matrix_tx.init)(matrices), jax.jit(bias_tx.init)(bias)
  losses = []
  for i in range(STEPS):
    x = jax.random.normal(jax.random.key(i), (256, 64))
    params, states, loss = train_step(params, states, x)
    losses.append(float(loss))
  return losses, edgc_jax.metrics(states[0])


if __name__ == "__main__":
  losses, numbers = main()
  print(f"loss {losses[0]:.3f} to {losses[-1]:.3f}")
  print(f"{numbers['compression_ratio']:.1f} times fewer bytes than dense")
