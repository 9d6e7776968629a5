"""GPT-2 on pipeline stages equals GPT-2, and no array holds all logits."""

import functools
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers.meshes import AXIS
from helpers.shard_runs import mesh_of
from jax import lax
from jax.sharding import PartitionSpec as P

from experiments.trainer.models import gpt2, gpt2_stages

pytestmark = pytest.mark.usefixtures("without_cache")

# 50 rows are padded to 52 on 4 stages.
TINY = gpt2.GPT2Config(
  vocab_size=50, context=8, width=16, num_layers=4, num_heads=2
)
BATCH = 16


@functools.cache
def example():
  """Returns parameters, a batch, and the whole model's loss and gradients."""
  init = jax.jit(gpt2.init_params, static_argnums=0)
  random = np.random.default_rng(0)
  # Larger than at initialisation, without zero biases.
  draw = lambda p: 3 * p + 0.1 * random.standard_normal(p.shape, np.float32)  # noqa: E731
  params = jax.tree.map(draw, init(TINY, jax.random.key(0)))
  batch = jax.random.randint(
    jax.random.key(1), (BATCH, TINY.context + 1), 0, TINY.vocab_size
  )
  grad_fn = jax.jit(jax.value_and_grad(gpt2.loss_fn, 1), static_argnums=0)
  return params, batch, *grad_fn(TINY, params, batch)


def padded(params, stages):
  """Returns `params` in the layout of `gpt2_stages.init_params`."""
  missing = -len(params["embedding"]) % stages
  rows = np.pad(params["embedding"], ((0, missing), (0, 0)))
  return params | {"embedding": rows}


def over_stages(stages, fn, in_specs, out_specs, replicas=1, tensor=1):
  """Returns a function of global arrays."""
  mesh = mesh_of(stage=stages, data=replicas, tensor=tensor)
  return jax.jit(
    jax.shard_map(fn, mesh=mesh, in_specs=in_specs, out_specs=out_specs)
  )


def on_mesh(fn, params, stages, replicas, tensor=1, trees=1):
  """Returns a function of global arrays for averaged loss and gradients."""
  specs = gpt2_stages.param_specs(params, {"stage": stages, "tensor": tensor})

  def averaged(params, batch):
    local = lax.pcast(params, AXIS, to="varying")
    return lax.pmean(fn(local, batch), AXIS)

  return over_stages(
    stages, averaged, (specs, P(AXIS)), (P(), *[specs] * trees), replicas,
    tensor,
  )  # fmt: skip


def assert_is_the_whole_models(loss, gradients, laid_out):
  _, _, expected, whole = example()
  np.testing.assert_allclose(loss, expected, rtol=1e-5)

  def compare(path, got, wanted):
    # Rounding is relative to the largest entry: small ones are sums of large
    # ones. The gradients of the keys' biases are zero but for it.
    atol = 1e-5 * float(np.abs(wanted).max())
    np.testing.assert_allclose(got, wanted, 1e-4, atol, err_msg=str(path))

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
  params, batch, *_ = example()
  fn = functools.partial(gpt2_stages.loss_fn, TINY, num_microbatches)
  params = laid_out(params)
  run = on_mesh(jax.value_and_grad(fn), params, stages, replicas, tensor)
  assert_is_the_whole_models(*run(params, batch), laid_out)


def test_late_updates_complete_the_gradients():
  """Only embedding and positions differ in the early gradients."""
  laid_out = functools.partial(padded, stages=4)
  params, batch, *_ = example()
  params = laid_out(params)

  def fn(params, batch):
    loss, early, late = gpt2_stages.value_and_grad(TINY, 2, params, batch)
    return loss, early, late(lambda x: x)

  run = on_mesh(fn, params, 4, 2, trees=2)
  loss, early, gradients = run(params, batch)
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


@pytest.mark.parametrize(
  "stages, vocab_size, dtype, rtol, atol",
  [
    (8, 50, "float32", 1e-5, 1e-6),
    (4, 9, "float32", 1e-5, 1e-6),  # the last stage holds padding only
    # Logits have the same rounding; the gradient of x sums in bfloat16.
    (4, 50, "bfloat16", 2**-7, 2**-6),
    (4, 50, "extreme", 1e-6, 1e-6),  # of integers, exact in any order of sums
  ],
)
def test_the_loss_is_that_of_whole_logits(
  stages, vocab_size, dtype, rtol, atol
):
  """Each stage has some of the labels."""
  random, labels = np.random.default_rng(vocab_size), jnp.arange(vocab_size)
  if dtype == "extreme":
    x, rows = (
      np.float32(random.integers(-most, most + 1, (50, 16)))
      for most in (2000, 5)
    )
    assert (x @ rows.T).max() > 1e4 and (x @ rows.T).min() < -1e4
    dtype = "float32"
  else:
    x, rows = random.standard_normal((2, vocab_size, 16), np.float32)
  x = jnp.asarray(x, dtype)
  weights = np.linspace(0.5, 1.5, vocab_size, dtype=np.float32)

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
  missing = -vocab_size % stages
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
    np.testing.assert_allclose(got, wanted, rtol, atol * np.abs(wanted).max())
