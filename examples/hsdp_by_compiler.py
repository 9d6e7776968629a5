"""Trains a transformer block on 2 x 2 x 2 devices, sharded by the compiler.

Parameters have logical axes, and rules map them to the axes "fsdp" and "tensor"
of the mesh. `jax.shard_map` binds "replica" alone; inside it the compiler
shards the model, and `over_shards` lets edgc send each device's own parts. The
state is born sharded.

    python examples/hsdp_by_compiler.py
"""

import functools

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import edgc_jax  # before JAX uses a device

jax.config.update("jax_num_cpu_devices", 8)

STEPS = 45
VOCAB, LENGTH, EMBED, HEADS, HIDDEN = 32, 16, 64, 4, 128
RULES = {"embed": "fsdp", "heads": "tensor", "mlp": "tensor", "vocab": None}
SHAPES = {  # sizes and logical axes of each parameter
  "embedding": ((VOCAB, EMBED), ("vocab", "embed")),
  "qkv": ((EMBED, 3 * EMBED), ("embed", "heads")),
  "out": ((EMBED, EMBED), ("heads", "embed")),
  "up": ((EMBED, HIDDEN), ("embed", "mlp")),
  "down": ((HIDDEN, EMBED), ("mlp", "embed")),
  "head": ((EMBED, VOCAB), ("embed", "vocab")),
}
SPECS = {
  name: P(*(RULES[axis] for axis in axes)) for name, (_, axes) in SHAPES.items()
}
REPLICAS = {"replica"}  # the axes that shard_map binds

tx = optax.chain(
  edgc_jax.over_shards(edgc_jax.edgc("replica", rank_max=4), SPECS),
  optax.clip_by_global_norm(1.0),  # over whole gradients, by the compiler
  optax.adam(3e-3),
)


def init_params() -> dict[str, jax.Array]:
  keys = jax.random.split(jax.random.key(0), len(SHAPES))
  return {
    name: jax.random.normal(key, shape) / shape[0] ** 0.5
    for key, (name, (shape, _)) in zip(keys, SHAPES.items(), strict=True)
  }


def loss_fn(params: dict[str, jax.Array], tokens: jax.Array) -> jax.Array:
  """Returns the cross entropy of each token given those before it."""
  # A lookup in place of the product aborts XLA here, also without edgc.
  x = jax.nn.one_hot(tokens[:, :-1], VOCAB) @ params["embedding"]
  qkv = (x @ params["qkv"]).reshape(*x.shape[:2], HEADS, 3, -1)
  mixed = jax.nn.dot_product_attention(
    *(qkv[..., i, :] for i in range(3)), is_causal=True
  )
  x += mixed.reshape(x.shape) @ params["out"]
  x += jax.nn.relu(x @ params["up"]) @ params["down"]
  logits = x @ params["head"]
  return optax.softmax_cross_entropy_with_integer_labels(
    logits, tokens[:, 1:]
  ).mean()


def train_step(params, opt_state, tokens):  # noqa: ANN001, ANN201
  local = jax.lax.pcast(params, "replica", to="varying")
  loss, grads = jax.value_and_grad(loss_fn)(local, tokens)
  updates, opt_state = tx.update(grads, opt_state, params)
  params = optax.apply_updates(params, updates)
  loss = edgc_jax.after_update(loss, opt_state)
  return params, opt_state, jax.lax.pmean(loss, "replica")


def main() -> tuple[list[float], dict[str, object]]:
  mesh = jax.make_mesh(
    (2, 2, 2), ("replica", "fsdp", "tensor"), axis_types=(AxisType.Auto,) * 3
  )
  placed = functools.partial(jax.tree.map, lambda s: NamedSharding(mesh, s))
  params = jax.jit(init_params, out_shardings=placed(SPECS))()
  state_specs = functools.partial(
    edgc_jax.state_specs, tx, params, "replica", mesh=mesh, param_specs=SPECS
  )
  specs = state_specs(axis_names=REPLICAS)  # of shard_map
  shardings = placed(state_specs())  # of the global arrays
  init = jax.shard_map(
    tx.init, mesh=mesh, in_specs=P(), out_specs=specs, axis_names=REPLICAS
  )
  opt_state = jax.jit(init, out_shardings=shardings)(params)
  step = jax.jit(
    jax.shard_map(
      train_step,
      mesh=mesh,
      in_specs=(P(), specs, P("replica")),
      out_specs=(P(), specs, P()),
      axis_names=REPLICAS,
    ),
    out_shardings=(placed(SPECS), shardings, None),
    donate_argnums=(0, 1),
  )
  rows = NamedSharding(mesh, P(("replica", "fsdp")))
  losses = []
  for i in range(STEPS):  # sequences that count up from a random token
    start = jax.random.randint(jax.random.key(i), (32, 1), 0, VOCAB)
    tokens = (start + jnp.arange(LENGTH + 1)) % VOCAB
    params, opt_state, loss = step(
      params, opt_state, jax.device_put(tokens, rows)
    )
    losses.append(float(loss))
  return losses, edgc_jax.metrics(opt_state)


if __name__ == "__main__":
  losses, numbers = main()
  print(f"loss {losses[0]:.3f} to {losses[-1]:.3f}")
  print(f"{numbers['compression_ratio']:.1f} times fewer bytes than dense")
