"""Trains 2 replicas of 2 x 2 shards (HSDP) alone for 5 steps at a time.

The model of `hsdp.py`, sharded by the compiler. Each replica trains with its
own Adam; every 5 steps the replicas average what they have moved, in 4 bits,
over the slow axis, "replica". In between only the loss crosses it.
"""

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import edgc_jax  # before JAX uses a device

jax.config.update("jax_num_cpu_devices", 8)

STEPS, VOCAB, LENGTH, EMBED, HEADS, HIDDEN = 45, 32, 16, 64, 4, 128
UP, DOWN = P("fsdp", "tensor"), P("tensor", "fsdp")
SPECS = {"embedding": P(None, "fsdp"), "qkv": UP, "out": DOWN, "up": UP,
         "down": DOWN, "head": P("fsdp")}  # fmt: skip
SHAPES = {
  "embedding": (VOCAB, EMBED), "qkv": (EMBED, 3 * EMBED), "out": (EMBED, EMBED),
  "up": (EMBED, HIDDEN), "down": (HIDDEN, EMBED), "head": (EMBED, VOCAB),
}  # fmt: skip


def init_params():
  keys = jax.random.split(jax.random.key(0), len(SHAPES))
  normal = jax.nn.initializers.lecun_normal()
  return dict(zip(SHAPES, map(normal, keys, SHAPES.values()), strict=True))


def loss_fn(params, tokens):
  """Returns the cross entropy of each token given those before it."""
  x = params["embedding"][tokens[:, :-1]]
  qkv = (x @ params["qkv"]).reshape(*x.shape[:2], HEADS, 3, -1)
  q, k, v = (qkv[..., i, :] for i in range(3))
  mixed = jax.nn.dot_product_attention(q, k, v, is_causal=True)
  x += mixed.reshape(x.shape) @ params["out"]
  x += jax.nn.relu(x @ params["up"]) @ params["down"]
  losses = optax.softmax_cross_entropy_with_integer_labels
  return losses(x @ params["head"], tokens[:, 1:]).mean()


axes = ("replica", "fsdp", "tensor")
mesh = jax.make_mesh((2, 2, 2), axes, axis_types=(AxisType.Auto,) * 3)
where = {"axis_name": "replica", "mesh": mesh, "param_specs": SPECS}
reducer = edgc_jax.quantize(4, "replica", error_feedback=True)
outer = optax.chain(
  edgc_jax.on_mesh(reducer, **where),
  optax.sgd(1.0),  # averages
)
inner = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(3e-3))
tx = edgc_jax.local_steps(inner, outer, every=5, **where)


@jax.jit
def train_step(params, opt_state, tokens):
  local = edgc_jax.local_params(params, opt_state, mesh)
  gradient = edgc_jax.value_and_grad(loss_fn, mesh, "replica", is_local=True)
  loss, grads = gradient(local, tokens)
  updates, opt_state = tx.update(grads, opt_state, params, local_params=local)
  return optax.apply_updates(params, updates), opt_state, loss


def main():
  placed = {name: NamedSharding(mesh, spec) for name, spec in SPECS.items()}
  params = jax.device_put(init_params(), placed)
  opt_state, losses = tx.init(params), []
  rows = NamedSharding(mesh, P(("replica", "fsdp")))
  for i in range(STEPS):  # sequences that count up from a random token
    start = jax.random.randint(jax.random.key(i), (32, 1), 0, VOCAB)
    tokens = jax.device_put((start + jnp.arange(LENGTH + 1)) % VOCAB, rows)
    params, opt_state, loss = train_step(params, opt_state, tokens)
    losses.append(float(loss))
  return losses, edgc_jax.metrics(opt_state)


if __name__ == "__main__":
  losses, numbers = main()
  ratio = numbers["compression_ratio"]
  print(f"loss {losses[0]:.3f} to {losses[-1]:.3f}, bytes / {ratio:.1f}")
