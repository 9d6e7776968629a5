"""Default views of leaves, with the layouts of real libraries."""

import re

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import float32
from helpers.meshes import Pmap, gradients_like
from numpy.testing import assert_allclose, assert_array_equal

import edgc_jax
from edgc_jax import MatrixView, TransposedView, layer_matrix, scanned
from edgc_jax.leaves.leaf import arrays_of, leaves_in

KEY = jax.random.key(0)
WIDTH, HEADS = 32, 4


class Linen(nn.Module):
  @nn.compact
  def __call__(self, x, image):
    x = nn.MultiHeadDotProductAttention(HEADS, name="attention")(x)
    x = nn.LayerNorm()(x)
    nn.Conv(16, (3, 3))(image)
    nn.Conv(16, (8, 8), name="patches")(image)
    nn.Conv(16, (5,))(x)
    nn.DenseGeneral((HEADS, 8), name="heads")(x)
    return nn.Embed(100, WIDTH)(jnp.zeros(2, int)), nn.Dense(64)(x)


class Nnx(nnx.Module):
  def __init__(self, rngs):
    self.conv = nnx.Conv(3, 16, (3, 3), rngs=rngs)
    self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
    self.layers = nnx.List([nnx.Linear(WIDTH, 64, rngs=rngs)])
    self.attention = nnx.MultiHeadAttention(
      HEADS, WIDTH, rngs=rngs, decode=False
    )
    self.attentions = nnx.vmap(
      lambda key: nnx.MultiHeadAttention(
        HEADS, WIDTH, rngs=nnx.Rngs(key), decode=False
      )
    )(jax.random.split(KEY, 3))


class Equinox(eqx.Module):
  layers: list
  blocks: eqx.nn.Linear

  def __init__(self):
    self.layers = [
      eqx.nn.Conv2d(3, 16, 3, key=KEY),
      eqx.nn.Conv1d(8, 16, 5, key=KEY),
      eqx.nn.Linear(WIDTH, 64, key=KEY),
      eqx.nn.MultiheadAttention(HEADS, WIDTH, key=KEY),
    ]
    keys = jax.random.split(KEY, 3)
    make = lambda key: eqx.nn.Linear(WIDTH, 64, key=key)  # noqa: E731
    self.blocks = eqx.filter_vmap(make)(keys)


def haiku_net(x, image):
  hk.Conv2D(16, 3)(image)
  hk.Conv1D(16, 3)(x)
  ones = hk.initializers.Constant(1.0)
  x = hk.MultiHeadAttention(HEADS, 8, w_init=ones)(x, x, x)
  hk.LayerNorm(-1, create_scale=True, create_offset=True)(x)
  return hk.experimental.layer_stack(3)(lambda x: hk.Linear(WIDTH)(x))(x)


INPUTS = (jnp.zeros((2, 7, WIDTH)), jnp.zeros((2, 8, 8, 3)))


HEADED = dict.fromkeys(
  (f"attention/{x}/kernel" for x in ("query", "key", "value", "out")),
  (1, WIDTH, WIDTH),
)
LIBRARIES = {
  "linen": (
    lambda: jax.eval_shape(Linen().init, KEY, *INPUTS)["params"],
    {
      **HEADED,
      "Conv_0/kernel": (1, 27, 16),
      "patches/kernel": (1, 192, 16),
      "Conv_1/kernel": (1, 160, 16),
      "heads/kernel": (32, 4, 8),  # nothing tells it from a stack
      "Embed_0/embedding": (1, 100, 32),
      "Dense_0/kernel": (1, 32, 64),
    },
  ),
  "nnx": (
    lambda: nnx.state(nnx.eval_shape(lambda: Nnx(nnx.Rngs(0))), nnx.Param),
    {
      **HEADED,
      "attentions/query/kernel": (3, 32, 32),
      "attentions/out/kernel": (3, 32, 32),
      "conv/kernel": (1, 27, 16),
      "layers/0/kernel": (1, 32, 64),
    },
  ),
  "equinox": (
    lambda: eqx.filter_eval_shape(Equinox),
    {
      "layers/0/weight": (1, 16, 27),
      "layers/1/weight": (1, 16, 40),
      "layers/2/weight": (1, 64, 32),
      "layers/3/query_proj/weight": (1, 32, 32),
      "blocks/weight": (3, 64, 32),
    },
  ),
  "haiku": (
    lambda: jax.eval_shape(hk.transform(haiku_net).init, KEY, *INPUTS),
    {
      "conv2_d/w": (1, 27, 16),
      "conv1_d/w": (1, 96, 16),
      "multi_head_attention/query/w": (1, 32, 32),
      "__layer_stack_no_per_layer/linear/w": (3, 32, 32),
    },
  ),
}


@pytest.mark.parametrize("library", LIBRARIES)
def test_layers_of(library):
  make, expected = LIBRARIES[library]
  found = {
    "/".join(re.findall(r"[^\[\]'.]+", leaf.path)): leaf.view
    for leaf in leaves_in(arrays_of(make()))
  }
  assert {path: found[path] for path in expected} == expected
  vectors = [path for path in found if "bias" in path or "scale" in path]
  assert vectors
  assert not any(found[path] for path in vectors)


@pytest.mark.parametrize(
  "path, shape, view",
  [
    ("", (64, 32), (1, 64, 32)),
    ("['blocks']['mlp']['kernel']", (12, 768, 3072), (12, 768, 3072)),
    ("['blocks']['attention']['out']['kernel']", (12, 64, 64), (12, 64, 64)),
    ("['attention']['out']['kernel']", (12, 64, 768), (1, 768, 768)),
    ("['attention']['query']['kernel']", (12, 768, 768), (12, 768, 768)),
    # A shard of 768 rows.
    ("['attention']['query']['kernel']", (48, 12, 64), (1, 48, 768)),
    # Other stacks than scans, and layers of other names.
    ("['query']['kernel']", (48, 12, 64), (48, 12, 64)),
    ("['attention']['query']['kernel']", (512, 12, 384), (512, 12, 384)),
    ("['self_attn']['o_proj']['kernel']", (32, 256, 4096), (32, 256, 4096)),
    ("['mlp']['out']['kernel']", (12, 192, 768), (12, 192, 768)),
    ("['mlp']['wi']['kernel']", (4, 4, 1024, 4096), (16, 1024, 4096)),
    (".layers.weight", (12, 768, 16), (12, 768, 16)),
    ("['embedding']['kernel']", (32, 32, 3, 768), (1, 3072, 768)),
    (".patches.weight", (768, 3, 16, 16), (1, 768, 768)),
    (".conv.weight", (16, 8, 9), (1, 16, 72)),
    # Gains of norms, and matrices of layers that have "norm" in their name.
    (".blocks.ln1.weight", (12, 768), None),
    (".blocks.norm2.weight", (12, 768), None),
    (".norm1.weight", (768, 4608), (1, 768, 4608)),
    ("['normalized_linear']['w']", (768, 768), (1, 768, 768)),
    ("['moe']['up']['kernel']", (8, 8, 64, 128), (64, 64, 128)),
    ("['blocks']['Conv_0']['kernel']", (5, 3, 3, 8, 16), (5, 72, 16)),
    ("['w']", (0, 3, 4), None),
    ("['lora']['b']", (8, 64), (1, 8, 64)),
    # Query, key and value in one.
    ("['attn']['qkv']['kernel']", (768, 3, 12, 64), (1, 768, 2304)),
    ("['qkv_proj']['kernel']", (12, 768, 3, 12, 64), (12, 768, 2304)),
    ("['attn']['c_attn']['kernel']", (12, 768, 3, 768), (12, 768, 2304)),
  ],
)
def test_names_and_shapes(path, shape, view):
  assert layer_matrix(path, shape) == view


@pytest.mark.parametrize("path, shape, expected", [
  ("['layers']['mlp']['wi_0']['kernel']", (64, 12, 256), (12, 64, 256)),
  ("['layers']['attention']['query']['kernel']", (64, 12, 8, 8),
   (12, 64, 64)),
  ("['layers']['attention']['out']['kernel']", (8, 12, 8, 64), (12, 64, 64)),
  ("['layers']['moe']['wi']", (4, 12, 64, 256), (48, 64, 256)),
  ("['layers']['norm']['scale']", (64, 12), None),
  ("['embedding']", (1000, 64), (1, 1000, 64)),
])  # fmt: skip
def test_views_of_scanned_layers(path, shape, expected):
  view = scanned(1)(path, shape)
  if isinstance(view, TransposedView):
    assert view.order[0] == 1
    view = view.view
  assert view == expected


def test_arrays_go_there_and_back():
  x = jnp.arange(2.0 * 3 * 4 * 5).reshape(2, 3, 4, 5)
  tree = {"layers": {"attention": {"out": {"kernel": x}}}}
  (leaf,) = leaves_in(tree, scanned(1))
  there = leaf.to_view(x)
  assert there.shape == (3, 8, 5)
  assert_array_equal(there[1], x[:, 1].reshape(8, 5))
  assert_array_equal(leaf.from_view(there), x)


@pytest.mark.slow
def test_a_reducer_sends_the_matrices_of_the_layers():
  """As if the axis of the layers came first."""
  second = {"layers": {"wi": {"kernel": jnp.zeros((24, 3, 40))}}}
  first = {"layers": {"wi": {"kernel": jnp.zeros((3, 24, 40))}}}
  gradients = gradients_like(first, 0)
  turned = jax.tree.map(lambda g: jnp.swapaxes(g, 1, 2), gradients)
  one = Pmap(float32.powersgd(2), first)
  other = Pmap(float32.powersgd(2, matrix_view=scanned(1)), second)
  for _ in range(2):
    expected = one.step(gradients)["layers"]["wi"]["kernel"]
    found = other.step(turned)["layers"]["wi"]["kernel"]
    assert_allclose(np.swapaxes(found, 1, 2), expected, rtol=1e-4, atol=1e-5)


def test_what_a_view_may_return():
  params = {"layers": jnp.zeros((24, 2, 20))}
  for order in ([1, 0, 2], np.array([1, 0, 2])):
    view = lambda *_, o=order: TransposedView(o, (2, 24, 20))  # noqa: E731
    (leaf,) = leaves_in(params, view)
    assert (leaf.order, leaf.view) == ((1, 0, 2), (2, 24, 20))
  inner = scanned(1, lambda path, shape: (1, *shape))
  assert leaves_in(params, inner)[0].view == (2, 24, 20)
  first = scanned(0)("['layers']['wi']['kernel']", (12, 64, 256))
  assert first == MatrixView(12, 64, 256)  # needs no transposition
  view = lambda path, shape: TransposedView((0, 0), MatrixView(1, 8, 4))  # noqa: E731
  with pytest.raises(ValueError, match="`matrix_view` must order all 2"):
    leaves_in({"w": jnp.zeros((8, 4))}, view)
  with pytest.raises(TypeError, match=r"`matrix_view` must return .count"):
    leaves_in(params, scanned(1, lambda path, shape: (64, 256)))


def test_a_tree_that_goes_mostly_dense_warns():
  params = {"layers": {"wi": {"kernel": jnp.zeros((512, 8, 512))}}}
  params["embedding"] = jnp.zeros((64, 512))
  with pytest.warns(RuntimeWarning, match=r"98% .*wi.*scanned\(1\)"):
    edgc_jax.powersgd(8).init(params)
  edgc_jax.powersgd(8, matrix_view=scanned(1)).init(params)
  # Leaves without a view are dense on purpose.
  params = {"w": jnp.zeros((64, 512)), "embedding": jnp.zeros((4096, 128))}
  view = lambda path, shape: None if "emb" in path else (1, *shape)  # noqa: E731
  edgc_jax.powersgd(8, matrix_view=view).init(params)
  edgc_jax.topk(matrix_view=view).init(params)
