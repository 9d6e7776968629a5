"""GPT-2 on pipeline stages equals GPT-2, and no array holds all logits."""

import functools
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers.meshes import AXIS, stage_mesh
from helpers.shard_runs import mesh_of
from jax import lax
from jax.sharding import PartitionSpec as P

from experiments.models import gpt2, gpt2_stages

pytestmark = pytest.mark.usefixtures("without_cache")

# 50 rows are padded to 52 on 4 stages.
TINY = gpt2.GPT2Config(
  vocab_size=50, context=8, width=16, num_layers=4, num_heads=2
)
BATCH = 16


@functools.cache
def whole_params():
  """Returns parameters larger than at initialisation, without zero biases."""
  init = jax.jit(gpt2.init_params, static_argnums=0)
  random = np.random.default_rng(0)
  draw = lambda p: 3 * p + 0.1 * random.standard_normal(p.shape, np.float32)  # noqa: E731
  return jax.tree.map(draw, init(TINY, jax.random.key(0)))


@functools.cache
def example():
  """Returns a batch, and the whole model's loss and gradients on it."""
  batch = jax.random.randint(
    jax.random.key(1), (BATCH, TINY.context + 1), 0, TINY.vocab_size
  )
  grad_fn = jax.jit(jax.value_and_grad(gpt2.loss_fn, 1), static_argnums=0)
  return batch, *grad_fn(TINY, whole_params(), batch)


def padded(params, stages):
  """Returns `params` in the layout of `gpt2_stages.init_params`."""
  missing = -len(params["embedding"]) % stages
  rows = np.pad(params["embedding"], ((0, missing), (0, 0)))
  return params | {"embedding": rows}


def on_mesh(fn, params, stages, replicas, tensor=1, trees=1):
  """Returns a function of global arrays for averaged loss and gradients."""
  mesh = (
    stage_mesh(stages, replicas)
    if tensor == 1
    else mesh_of(stage=stages, data=replicas, tensor=tensor)
  )
  specs = gpt2_stages.param_specs(params, mesh.shape)

  def averaged(params, batch):
    local = lax.pcast(params, AXIS, to="varying")
    return lax.pmean(fn(local, batch), AXIS)

  return jax.jit(
    jax.shard_map(
      averaged,
      mesh=mesh,
      in_specs=(specs, P(AXIS)),
      out_specs=(P(), *[specs] * trees),
    )
  )


def over_stages(stages, fn, in_specs, out_specs):
  """Returns a function of global arrays, on stages of one replica."""
  mesh = stage_mesh(stages, 1)
  return jax.jit(
    jax.shard_map(fn, mesh=mesh, in_specs=in_specs, out_specs=out_specs)
  )


def assert_is_the_whole_models(loss, gradients, laid_out):
  _, expected, whole = example()
  np.testing.assert_allclose(loss, expected, rtol=1e-5)

  def compare(path, got, wanted):
    # Rounding is relative to the largest entry: small ones are sums of large
    # ones. The gradients of the keys' biases are zero but for it.
    np.testing.assert_allclose(
      got,
      wanted,
      rtol=1e-4,
      atol=1e-5 * float(np.abs(wanted).max()),
      err_msg=jax.tree_util.keystr(path),
    )

  jax.tree_util.tree_map_with_path(compare, gradients, laid_out(whole))
  padding = gradients["embedding"][TINY.vocab_size :]
  np.testing.assert_array_equal(padding, 0.0)


@pytest.mark.parametrize(
  "stages, replicas, tensor, num_microbatches",
  [(1, 2, 1, 2), (2, 2, 1, 4), (2, 2, 2, 4), (4, 1, 2, 1)],
)
def test_loss_and_gradients(stages, replicas, tensor, num_microbatches):
  laid_out = functools.partial(padded, stages=stages)
  if tensor > 1:  # devices that share a stage
    shape = {"stage": stages, "tensor": tensor}
    laid_out = functools.partial(gpt2_stages.laid_out, mesh_shape=shape)
  params = laid_out(whole_params())
  fn = functools.partial(gpt2_stages.loss_fn, TINY, num_microbatches)
  run = on_mesh(jax.value_and_grad(fn), params, stages, replicas, tensor)
  assert_is_the_whole_models(*run(params, example()[0]), laid_out)


def test_late_updates_complete_the_gradients():
  """Only embedding and positions differ in the early gradients."""
  laid_out = functools.partial(padded, stages=4)
  params = laid_out(whole_params())

  def fn(params, batch):
    loss, early, late_updates = gpt2_stages.value_and_grad(
      TINY, 2, params, batch
    )
    return loss, early, late_updates(lambda x: x)

  run = on_mesh(fn, params, 4, 2, trees=2)
  loss, early, gradients = run(params, example()[0])
  assert_is_the_whole_models(loss, gradients, laid_out)
  same = jax.tree.map(lambda a, b: bool(np.array_equal(a, b)), early, gradients)
  late = {name for name, is_same in same.items() if is_same is False}
  assert late == {"embedding", "positions"}
  assert all(jax.tree.leaves(same["blocks"]))
  # All of the positions' gradient comes late.
  np.testing.assert_array_equal(early["positions"], 0.0)


def test_same_key_same_model():
  key = jax.random.key(3)
  whole = jax.jit(gpt2.init_params, static_argnums=0)(TINY, key)
  cut = jax.jit(lambda key: gpt2_stages.init_params(TINY, {"stage": 4}, key))
  chex.assert_trees_all_equal(cut(key), padded(whole, 4))


def test_no_array_holds_all_logits():
  """Nor is the vocabulary gathered, forward or backward."""
  config = gpt2.GPT2Config(
    vocab_size=1001, context=11, width=16, num_layers=2, num_heads=2
  )
  stages, sequences = 2, 6
  tokens, part = sequences * config.context, 1002 // stages
  init = functools.partial(gpt2_stages.init_params, config, {"stage": stages})
  params = jax.eval_shape(init, jax.random.key(0))
  batch = jax.ShapeDtypeStruct((sequences, config.context + 1), jnp.int32)
  fn = functools.partial(gpt2_stages.loss_fn, config, 2)
  run = on_mesh(jax.value_and_grad(fn), params, stages, 1)
  text = run.lower(params, batch).compile().as_text()
  shapes = {
    tuple(map(int, dims.split(",")))
    for dims in re.findall(r"\b[a-z]+\d+\[([\d,]+)\]", text)
  }
  # A stage's own logits are the largest array.
  assert (tokens, part) in shapes
  assert max(map(np.prod, shapes)) == tokens * part
  assert not {dim for shape in shapes for dim in shape} & {1001, 1002}


def compare_losses(stages, vocab_size, x, rows, labels, rtol, atol):
  """Compares losses and gradients with a loss of whole logits."""
  missing = -vocab_size % stages
  weights = np.linspace(0.5, 1.5, len(labels), dtype=np.float32)

  def whole(x, rows):
    logits = (x @ rows.T.astype(x.dtype)).astype(jnp.float32)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    return jnp.sum(weights * losses), losses

  def cut(x, rows):
    losses = gpt2_stages.cross_entropy(x, rows, labels, vocab_size)
    return jnp.sum(weights * losses), losses

  grad = lambda fn: jax.value_and_grad(fn, (0, 1), has_aux=True)  # noqa: E731
  split = P("stage")
  run = over_stages(stages, grad(cut), (P(), split), ((P(), P()), (P(), split)))
  # Values of the padding must not matter.
  filled = np.pad(rows, ((0, missing), (0, 0)), constant_values=1e3)
  (_, losses), (dx, drows) = run(x, filled)
  (_, expected), (whole_dx, whole_drows) = jax.jit(grad(whole))(x, rows)
  assert losses.dtype == jnp.float32 and dx.dtype == x.dtype
  drows, padding = np.split(drows, [vocab_size])
  np.testing.assert_array_equal(padding, 0.0)
  for got, wanted in (
    (losses, expected), (dx, whole_dx), (drows, whole_drows),
  ):  # fmt: skip
    got, wanted = np.asarray(got, np.float32), np.asarray(wanted, np.float32)
    assert np.all(np.isfinite(got))
    np.testing.assert_allclose(
      got, wanted, rtol=rtol, atol=atol * np.abs(wanted).max()
    )


EPS = float(jnp.finfo(jnp.bfloat16).eps)


@pytest.mark.parametrize(
  "stages, vocab_size, dtype, rtol, atol",
  [
    (8, 50, jnp.float32, 1e-5, 1e-6),
    (4, 9, jnp.float32, 1e-5, 1e-6),  # the last stage holds padding only
    # Logits have the same rounding; the gradient of x sums in bfloat16.
    (4, 50, jnp.bfloat16, EPS, 2 * EPS),
  ],
)
def test_the_loss_is_that_of_whole_logits(
  stages, vocab_size, dtype, rtol, atol
):
  """Each stage has some of the labels."""
  random = np.random.default_rng(vocab_size)
  x = random.standard_normal((vocab_size, 16), np.float32)
  rows = random.standard_normal((vocab_size, 16), np.float32)
  x, labels = jnp.asarray(x, dtype), jnp.arange(vocab_size)
  compare_losses(stages, vocab_size, x, rows, labels, rtol, atol)


def test_extreme_logits():
  """Logits of integers are exact in any order of sums."""
  random = np.random.default_rng(0)
  x = random.integers(-2000, 2001, (50, 16)).astype(np.float32)
  rows = random.integers(-5, 6, (50, 16)).astype(np.float32)
  logits = x @ rows.T
  assert logits.max() > 1e4 and logits.min() < -1e4
  compare_losses(4, 50, jnp.asarray(x), rows, jnp.arange(50), 1e-6, 1e-6)


@pytest.mark.parametrize("stages", [1, 8])
def test_lookup_equals_indexing(stages):
  random = np.random.default_rng(0)
  rows = random.standard_normal((56, 6), np.float32)
  tokens = jnp.asarray(random.permutation(np.repeat(np.arange(50), 2)))
  weights = random.standard_normal((len(tokens), 6), np.float32)

  def grad(find):
    def loss(rows):
      found = find(rows)
      return jnp.sum(found * weights), found

    return jax.value_and_grad(loss, has_aux=True)

  cut = over_stages(
    stages,
    grad(lambda rows: gpt2_stages.lookup(rows, tokens)),
    (P("stage"),),
    ((P(), P()), P("stage")),
  )
  (_, found), gradient = cut(rows)
  np.testing.assert_array_equal(found, rows[tokens])
  _, expected = jax.jit(grad(lambda rows: rows[tokens]))(rows)
  np.testing.assert_allclose(gradient, expected, rtol=1e-6, atol=1e-6)
  assert np.abs(gradient[50:]).max() == 0.0
