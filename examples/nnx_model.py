"""Trains a Flax NNX model with mutable state under `nnx.jit`.

`edgc_jax.value_and_grad` takes the module itself. The statistics of BatchNorm
are averaged over the replicas, and the masks of Dropout differ by replica.

    python examples/nnx_model.py
"""

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import edgc_jax  # before JAX uses a device

jax.config.update("jax_num_cpu_devices", 8)

STEPS = 60

mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
tx = optax.chain(edgc_jax.on_mesh(edgc_jax.powersgd(4), mesh), optax.adam(1e-2))


class Mlp(nnx.Module):
  """Three linear layers, with BatchNorm and Dropout."""

  def __init__(self, rngs: nnx.Rngs) -> None:
    self.first = nnx.Linear(64, 128, rngs=rngs)
    self.norm = nnx.BatchNorm(128, rngs=rngs)
    self.second = nnx.Linear(128, 128, rngs=rngs)
    self.dropout = nnx.Dropout(0.02, rngs=rngs)
    self.last = nnx.Linear(128, 1, rngs=rngs)

  def __call__(self, x: jax.Array) -> jax.Array:
    x = self.second(nnx.relu(self.norm(self.first(x))))
    return self.last(self.dropout(nnx.relu(x)))


def loss_fn(model: Mlp, x: jax.Array) -> jax.Array:
  return jnp.mean((model(x) - jnp.sin(x[:, :4]).sum(-1, keepdims=True)) ** 2)


@nnx.jit
def train_step(model, optimizer, x):
  loss, grads = edgc_jax.value_and_grad(loss_fn, mesh)(model, x)
  optimizer.update(model, grads)
  return loss


def main() -> tuple[list[float], dict[str, object]]:
  model = Mlp(nnx.Rngs(0))
  # On all devices, or the step compiles again when it has placed them.
  nnx.update(model, jax.device_put(nnx.state(model), NamedSharding(mesh, P())))
  optimizer, losses = nnx.Optimizer(model, tx, wrt=nnx.Param), []
  for i in range(STEPS):
    x = jax.random.normal(jax.random.key(i), (256, 64))
    losses.append(float(train_step(model, optimizer, x)))
  return losses, edgc_jax.metrics(optimizer)


if __name__ == "__main__":
  losses, numbers = main()
  print(f"loss {losses[0]:.3f} to {losses[-1]:.3f}")
  print(f"{numbers['compression_ratio']:.1f} times fewer bytes than dense")
