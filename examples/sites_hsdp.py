"""A site that is a mesh of 4 devices, on which a transformer is sharded.

The model of `hsdp.py` on 2 x 2 devices; in two terminals:

    python examples/sites_hsdp.py /tmp/hsdp berlin
    python examples/sites_hsdp.py /tmp/hsdp tokyo

Parameters keep their shardings, and sites may have other meshes.
"""

import sys
import zlib

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import edgc_jax  # before JAX uses a device

jax.config.update("jax_num_cpu_devices", 8)

ROUNDS, EVERY, VOCAB, LENGTH, EMBED, HEADS, HIDDEN = 8, 5, 32, 16, 64, 4, 128
UP, DOWN = P("fsdp", "tensor"), P("tensor", "fsdp")
SPECS = {"embedding": P(None, "fsdp"), "qkv": UP, "out": DOWN, "up": UP,
         "down": DOWN, "head": P("fsdp")}  # fmt: skip
SHAPES = {
  "embedding": (VOCAB, EMBED), "qkv": (EMBED, 3 * EMBED), "out": (EMBED, EMBED),
  "up": (EMBED, HIDDEN), "down": (HIDDEN, EMBED), "head": (EMBED, VOCAB),
}  # fmt: skip


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


tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(3e-3))


@jax.jit
def train_step(params, opt_state, tokens):
  loss, grads = jax.value_and_grad(loss_fn)(params, tokens)
  updates, opt_state = tx.update(grads, opt_state, params)
  return optax.apply_updates(params, updates), opt_state, loss


def main(url, name, shape=(2, 2), **options):
  mesh = jax.make_mesh(
    shape, ("fsdp", "tensor"), axis_types=(AxisType.Auto,) * 2
  )
  keys = jax.random.split(jax.random.key(0), len(SHAPES))
  normal = jax.nn.initializers.lecun_normal()
  params = {
    x: jax.device_put(normal(key, SHAPES[x]), NamedSharding(mesh, SPECS[x]))
    for x, key in zip(SHAPES, keys, strict=True)
  }
  site = edgc_jax.Site(url, name, every=EVERY, **options)
  params = site.join(params)
  opt_state, losses, step = tx.init(params), [], 0
  own = jax.random.key(zlib.crc32(name.encode()))
  while site.round < ROUNDS:  # sequences that count up from a random token
    key = jax.random.fold_in(own, site.round * EVERY + step)
    start = jax.random.randint(key, (32, 1), 0, VOCAB)
    tokens = (start + jnp.arange(LENGTH + 1)) % VOCAB
    tokens = jax.device_put(tokens, NamedSharding(mesh, P("fsdp")))
    params, opt_state, loss = train_step(params, opt_state, tokens)
    losses.append(float(loss))
    if site.is_due(step):
      params = site.exchange(params)
      print(f"loss {losses[-1]:.3f}, {site.last}", flush=True)
    step += 1
  site.leave()
  print(f"The run has had its {ROUNDS} rounds.")
  return losses, params


if __name__ == "__main__":
  main(*sys.argv[1:3])
