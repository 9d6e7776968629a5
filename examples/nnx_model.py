"""Trains a Flax NNX model with `nnx.Optimizer` under `jax.shard_map`.

Models and optimisers of NNX are trees of JAX: they go into `shard_map` as they
are, and what the step changes comes out.

    python examples/nnx_model.py
"""

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import edgc_jax  # before JAX uses a device

jax.config.update("jax_num_cpu_devices", 8)

STEPS = 60

tx = optax.chain(edgc_jax.powersgd(4), optax.adam(1e-2))


class Mlp(nnx.Module):
  """Three linear layers."""

  def __init__(self, rngs: nnx.Rngs) -> None:
    self.first = nnx.Linear(64, 128, rngs=rngs)
    self.second = nnx.Linear(128, 128, rngs=rngs)
    self.last = nnx.Linear(128, 1, rngs=rngs)

  def __call__(self, x: jax.Array) -> jax.Array:
    return self.last(nnx.relu(self.second(nnx.relu(self.first(x)))))


def loss_fn(model: Mlp, x: jax.Array) -> jax.Array:
  return jnp.mean((model(x) - jnp.sin(x[:, :4]).sum(-1, keepdims=True)) ** 2)


def init(model: Mlp) -> nnx.Optimizer:
  return nnx.Optimizer(model, tx, wrt=nnx.Param)


def train_step(model, optimizer, x):  # noqa: ANN001, ANN201
  local = jax.lax.pcast(model, "data", to="varying")
  loss, grads = nnx.value_and_grad(loss_fn)(local, x)
  optimizer.update(model, grads)
  loss = edgc_jax.after_update(loss, optimizer)
  return model, optimizer, jax.lax.pmean(loss, "data")


def main() -> tuple[list[float], dict[str, object]]:
  mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
  model = Mlp(nnx.Rngs(0))
  specs = edgc_jax.state_specs(
    jax.eval_shape(init, model), nnx.state(model, nnx.Param)
  )
  make = jax.shard_map(init, mesh=mesh, in_specs=P(), out_specs=specs)
  step = jax.jit(
    jax.shard_map(
      train_step,
      mesh=mesh,
      in_specs=(P(), specs, P("data")),
      out_specs=(P(), specs, P()),
    )
  )
  optimizer = jax.jit(make)(model)
  losses = []
  for i in range(STEPS):
    x = jax.random.normal(jax.random.key(i), (256, 64))
    model, optimizer, loss = step(model, optimizer, x)
    losses.append(float(loss))
  return losses, edgc_jax.metrics(optimizer)


if __name__ == "__main__":
  losses, numbers = main()
  print(f"loss {losses[0]:.3f} to {losses[-1]:.3f}")
  print(f"{numbers['compression_ratio']:.1f} times fewer bytes than dense")
