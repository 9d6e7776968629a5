"""Trains matrices and other leaves by optimisers of their own, in two ways.

One reducer first, then `optax.partition`: a reducer sends matrices as factors
and all else dense. Or a reducer for each group, edgc and allreduce: a leaf that
no reducer gets would not be averaged.

    python examples/partition.py
"""

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import edgc_jax  # before JAX uses a device

jax.config.update("jax_num_cpu_devices", 8)

STEPS = 60


def label(params):  # noqa: ANN001, ANN201
  return jax.tree.map(lambda p: "matrix" if p.ndim == 2 else "other", params)


def masked(name: str, tx: optax.GradientTransformation):  # noqa: ANN201
  """Returns `tx` for one group alone."""
  return optax.masked(
    tx, lambda tree: jax.tree.map(lambda own: own == name, label(tree))
  )


def one_reducer():  # noqa: ANN201
  """Returns a reducer, which sends vectors dense, then a partition."""
  return optax.chain(
    edgc_jax.powersgd(4),
    optax.partition(
      {"matrix": optax.adamw(1e-2), "other": optax.adam(1e-2)}, label
    ),
  )


def two_reducers():  # noqa: ANN201
  """Returns a reducer for each group, the second after the first.

  `optax.partition` would not order their collectives, which CPUs may mix up.
  """
  matrix = masked(
    "matrix",
    optax.chain(
      edgc_jax.edgc(rank_max=8, window=10, warmup_steps=10), optax.adamw(1e-2)
    ),
  )
  other = masked("other", optax.chain(edgc_jax.allreduce(), optax.adam(1e-2)))

  def update(updates, states, params):  # noqa: ANN001
    updates, first = matrix.update(updates, states[0], params)
    updates = edgc_jax.after_update(updates, first)
    updates, second = other.update(updates, states[1], params)
    return updates, (first, second)

  return optax.GradientTransformation(
    lambda params: (matrix.init(params), other.init(params)), update
  )


def init_params() -> dict[str, jax.Array]:
  keys = jax.random.split(jax.random.key(0), 3)
  return {
    "first": jax.random.normal(keys[0], (64, 128)) / 8,
    "second": jax.random.normal(keys[1], (128, 64)) / 12,
    "bias": jnp.zeros(128),
    "head": jax.random.normal(keys[2], (64,)) / 8,
  }


def loss_fn(params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
  hidden = jax.nn.relu(x @ params["first"] + params["bias"])
  out = (x + hidden @ params["second"]) @ params["head"]
  return jnp.mean((out - jnp.sin(x[:, :4]).sum(-1)) ** 2)


def main(tx=None) -> tuple[list[float], dict[str, object]]:  # noqa: ANN001
  tx = tx or one_reducer()
  mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
  params = init_params()
  specs = edgc_jax.state_specs(tx, params)

  def train_step(params, opt_state, x):  # noqa: ANN001
    local = jax.lax.pcast(params, "data", to="varying")
    loss, grads = jax.value_and_grad(loss_fn)(local, x)
    updates, opt_state = tx.update(grads, opt_state, params)
    params = optax.apply_updates(params, updates)
    loss = jax.lax.pmean(edgc_jax.after_update(loss, opt_state), "data")
    return params, opt_state, loss

  init = jax.shard_map(tx.init, mesh=mesh, in_specs=P(), out_specs=specs)
  step = jax.jit(
    jax.shard_map(
      train_step,
      mesh=mesh,
      in_specs=(P(), specs, P("data")),
      out_specs=(P(), specs, P()),
    )
  )
  opt_state = jax.jit(init)(params)
  losses = []
  for i in range(STEPS):
    x = jax.random.normal(jax.random.key(i), (256, 64))
    params, opt_state, loss = step(params, opt_state, x)
    losses.append(float(loss))
  # A state with two reducers is no state of `metrics`: take the first one's.
  is_one = not isinstance(opt_state[0], optax.MaskedState)
  return losses, edgc_jax.metrics(
    opt_state if is_one else opt_state[0].inner_state
  )


if __name__ == "__main__":
  for tx in (one_reducer(), two_reducers()):
    losses, numbers = main(tx)
    print(f"loss {losses[0]:.3f} to {losses[-1]:.3f}")
    print(f"{numbers['compression_ratio']:.1f} times fewer bytes than dense")
