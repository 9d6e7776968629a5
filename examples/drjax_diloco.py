"""Trains 8 replicas with DiLoCo written in DrJAX, and averages in 4 bits.

`drjax.map_fn` trains every replica alone for 5 steps. The results are placed:
arrays [8, ...], each part on its device. `drjax.reduce_mean` averages placed
arrays by a dense all-reduce; a reducer takes the same arrays, and returns their
mean.

    python examples/drjax_diloco.py [mean | quantize | topk]
"""

import functools
import sys

import drjax
import jax
import jax.numpy as jnp
import optax
from jax.sharding import AxisType

import edgc_jax  # before JAX uses a device

jax.config.update("jax_num_cpu_devices", 8)

ROUNDS, EVERY, REPLICAS = 16, 5, 8

mesh = jax.make_mesh((REPLICAS,), ("replica",), axis_types=(AxisType.Auto,))
on_mesh = functools.partial(edgc_jax.on_mesh, mesh=mesh, axis_name="replica")
ARMS = {  # the first link of the outer optimiser
  "mean": optax.stateless(lambda deltas, _: drjax.reduce_mean(deltas)),
  "quantize": on_mesh(edgc_jax.quantize(4, "replica", error_feedback=True)),
  "topk": on_mesh(edgc_jax.topk(1 / 16, "replica", chunk=4096, bits=2)),
}
inner = optax.adam(1e-2)


def init_params():
  keys = jax.random.split(jax.random.key(0), 2)
  return {
    "up": jax.random.normal(keys[0], (64, 128)) / 8,
    "down": jax.random.normal(keys[1], (128, 64)) / 12,
  }


def loss_fn(params, x):
  return jnp.mean((jax.nn.relu(x @ params["up"]) @ params["down"] - x) ** 2)


def train_alone(params, inner_state, batches):
  """Takes the inner steps of one replica in a round."""

  def step(carry, x):
    params, inner_state = carry
    loss, grads = jax.value_and_grad(loss_fn)(params, x)
    updates, inner_state = inner.update(grads, inner_state, params)
    return (optax.apply_updates(params, updates), inner_state), loss

  carry, losses = jax.lax.scan(step, (params, inner_state), batches)
  return *carry, losses.mean()


def round_with(outer):
  """Returns the program of a round, with an outer optimiser that averages."""

  @jax.jit
  @drjax.program(placements={"replica": REPLICAS})
  def train_round(params, outer_state, inner_states, batches):
    common = drjax.broadcast(params, mesh=mesh)
    own, inner_states, losses = drjax.map_fn(
      train_alone, (common, inner_states, batches), mesh=mesh
    )
    deltas = jax.tree.map(jnp.subtract, common, own)
    updates, outer_state = outer.update(deltas, outer_state, params)
    params = optax.apply_updates(params, updates)
    return params, outer_state, inner_states, drjax.reduce_mean(losses)

  return train_round


def start(outer):
  """Returns parameters, outer state and inner states."""
  params = init_params()
  inner_states = jax.vmap(lambda _: inner.init(params))(jnp.arange(REPLICAS))
  return params, outer.init(params), inner_states


def batches_of(number):
  """Draws the batches of a round, of all replicas."""
  return jax.random.normal(jax.random.key(number), (REPLICAS, EVERY, 32, 64))


def main(arm="quantize"):
  outer = optax.chain(ARMS[arm], optax.sgd(1.0))
  state, train_round, losses = start(outer), round_with(outer), []
  for i in range(ROUNDS):
    *state, loss = train_round(*state, batches_of(i))
    losses.append(float(loss))
  return losses, None if arm == "mean" else edgc_jax.metrics(state[1])


if __name__ == "__main__":
  for arm in sys.argv[1:] or ARMS:
    losses, numbers = main(arm)
    ratio = numbers["compression_ratio"] if numbers else 1
    print(
      f"{arm}: loss {losses[0]:.3f} to {losses[-1]:.4f}, bytes / {ratio:.1f}"
    )
