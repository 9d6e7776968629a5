"""Trains a transformer block on 2 replicas of 2 x 2 shards (HSDP).

The compiler shards the model; edgc sends each device's own shards over the slow
axis, "replica". `hsdp_dense.py` is the same loop without it.
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
edgc = edgc_jax.edgc("replica", rank_max=4)
tx = optax.chain(
  edgc_jax.on_mesh(edgc, mesh, SPECS, axis_name="replica"),
  optax.clip_by_global_norm(1.0),
  optax.adam(3e-3),
)


@jax.jit
def train_step(params, opt_state, tokens):
  gradient = edgc_jax.value_and_grad(loss_fn, mesh, "replica")
  loss, grads = gradient(params, tokens)
  updates, opt_state = tx.update(grads, opt_state, params)
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
  return losses, opt_state


if __name__ == "__main__":
  losses, opt_state = main()
  ratio = edgc_jax.metrics(opt_state)["compression_ratio"]
  print(f"loss {losses[0]:.3f} to {losses[-1]:.3f}, bytes / {ratio:.1f}")
