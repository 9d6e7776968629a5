"""Trains a transformer whose layers are stacked along the second axis.

As in MaxText's tree: scanned layers in axis 1, and q, k, v in one kernel. The
view `scanned(1)` shows edgc the matrices of each layer.

    python examples/maxtext_tree.py
"""

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import edgc_jax  # before JAX uses a device

jax.config.update("jax_num_cpu_devices", 8)

STEPS, VOCAB, LENGTH, EMBED, LAYERS, HEADS, SIZE = 60, 32, 16, 64, 3, 4, 16
LAYER = {  # layers are the second axis
  "qkv_proj": {"kernel": (EMBED, LAYERS, 3, HEADS, SIZE)},
  "attention": {"out": {"kernel": (HEADS, LAYERS, SIZE, EMBED)}},
  "wi": {"kernel": (EMBED, LAYERS, 4 * EMBED)},
  "wo": {"kernel": (4 * EMBED, LAYERS, EMBED)},
}
SHAPES = {"embedding": (VOCAB, EMBED), "layers": LAYER}

mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
# One window: the loss falls so fast here that the entropy never settles.
reducer = edgc_jax.on_mesh(
  edgc_jax.edgc(rank_max=8, window=STEPS, matrix_view=edgc_jax.scanned(1)), mesh
)
tx = optax.chain(reducer, optax.adam(1e-2))


def draw(shape):
  return 0.05 * jax.random.normal(jax.random.key(sum(shape)), shape)


def layer(x, own):
  q, k, v = jnp.einsum("btm,mchd->cbthd", x, own["qkv_proj"]["kernel"])
  mixed = jax.nn.dot_product_attention(q, k, v, is_causal=True)
  x += jnp.einsum("bthd,hdm->btm", mixed, own["attention"]["out"]["kernel"])
  hidden = jax.nn.relu(x @ own["wi"]["kernel"])
  return x + hidden @ own["wo"]["kernel"], None


def loss_fn(params, tokens):
  layers = jax.tree.map(lambda p: jnp.moveaxis(p, 1, 0), params["layers"])
  x, _ = jax.lax.scan(layer, params["embedding"][tokens[:, :-1]], layers)
  losses = optax.softmax_cross_entropy_with_integer_labels
  return losses(x @ params["embedding"].T, tokens[:, 1:]).mean()


@jax.jit
def train_step(params, opt_state, tokens):
  loss, grads = edgc_jax.value_and_grad(loss_fn, mesh)(params, tokens)
  updates, opt_state = tx.update(grads, opt_state, params)
  return optax.apply_updates(params, updates), opt_state, loss


def main():
  params = jax.tree.map(draw, SHAPES, is_leaf=lambda x: isinstance(x, tuple))
  print(edgc_jax.describe(reducer, params))
  params = jax.device_put(params, NamedSharding(mesh, P()))
  opt_state, losses = jax.jit(tx.init)(params), []
  for i in range(STEPS):  # sequences that count up from a random token
    start = jax.random.randint(jax.random.key(i), (64, 1), 0, VOCAB)
    tokens = (start + jnp.arange(LENGTH + 1)) % VOCAB
    params, opt_state, loss = train_step(params, opt_state, tokens)
    losses.append(float(loss))
  return losses, edgc_jax.metrics(opt_state)


if __name__ == "__main__":
  losses, numbers = main()
  print(f"loss {losses[0]:.3f} to {losses[-1]:.3f}")
  print(f"{numbers['compression_ratio']:.1f} times fewer bytes than dense")
