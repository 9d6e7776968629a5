"""GPT-2 on pipeline stages equals GPT-2, and no array holds all logits."""

import functools
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl.testing import absltest, parameterized
from helpers.meshes import AXIS, stage_mesh
from helpers.shard_runs import mesh_of
from jax import lax
from jax.sharding import PartitionSpec as P

from experiments.models import gpt2, gpt2_stages

# 50 rows are padded to 52 on 4 stages and to 56 on 8.
TINY = gpt2.GPT2Config(
  vocab_size=50, context=8, width=16, num_layers=8, num_heads=2
)
BATCH = 16


@functools.cache
def whole_params(config=TINY):
  """Returns parameters larger than at initialisation, without zero biases."""
  params = jax.jit(gpt2.init_params, static_argnums=0)(
    config, jax.random.key(0)
  )
  random = np.random.default_rng(0)
  draw = lambda p: 3 * p + 0.1 * random.standard_normal(p.shape, np.float32)  # noqa: E731
  return jax.tree.map(draw, params)


def padded(params, stages):
  """Returns `params` in the layout of `gpt2_stages.init_params`."""
  missing = -len(params["embedding"]) % stages
  rows = np.pad(params["embedding"], ((0, missing), (0, 0)))
  return params | {"embedding": rows}


@functools.cache
def example(config=TINY):
  """Returns a batch, and the whole model's loss and gradients on it."""
  batch = jax.random.randint(
    jax.random.key(1), (BATCH, config.context + 1), 0, config.vocab_size
  )
  grad_fn = jax.jit(jax.value_and_grad(gpt2.loss_fn, 1), static_argnums=0)
  return batch, *grad_fn(config, whole_params(config), batch)


def on_mesh(fn, stages, replicas, params, tensor=1):
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
      out_specs=(P(), specs),
    )
  )


def over_stages(stages, fn, in_specs, out_specs):
  """Returns a function of global arrays, on stages of one replica."""
  return jax.jit(
    jax.shard_map(
      fn,
      mesh=stage_mesh(stages, 1),
      in_specs=in_specs,
      out_specs=out_specs,
    )
  )


class WholeModelTest(parameterized.TestCase):
  def assert_is_the_whole_models(self, loss, gradients):
    _, expected, whole = example()
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    rows, padding = np.split(gradients["embedding"], [TINY.vocab_size])
    np.testing.assert_array_equal(padding, 0.0)

    def compare(path, got, wanted):
      # Rounding is relative to the largest entry: small ones are sums of
      # large ones. The gradients of the keys' biases are zero but for it.
      np.testing.assert_allclose(
        got,
        wanted,
        rtol=1e-4,
        atol=1e-5 * float(np.abs(wanted).max()),
        err_msg=jax.tree_util.keystr(path),
      )

    jax.tree_util.tree_map_with_path(
      compare, gradients | {"embedding": rows}, whole
    )

  @parameterized.parameters((1, 8, 2), (2, 4, 4), (8, 1, 1))
  def test_loss_and_gradients(self, stages, replicas, num_microbatches):
    params = padded(whole_params(), stages)
    fn = functools.partial(gpt2_stages.loss_fn, TINY, num_microbatches)
    run = on_mesh(jax.value_and_grad(fn), stages, replicas, params)
    loss, gradients = run(params, example()[0])
    self.assert_is_the_whole_models(loss, gradients)

  @parameterized.parameters((2, 2, 2, 4), (4, 1, 2, 1))
  def test_devices_that_share_a_stage(
    self, stages, replicas, tensor, num_microbatches
  ):
    """Loss and gradients of the whole model; 50 rows are padded."""
    shape = {"stage": stages, "tensor": tensor}
    params = gpt2_stages.laid_out(whole_params(), shape)
    fn = functools.partial(gpt2_stages.loss_fn, TINY, num_microbatches)
    run = on_mesh(jax.value_and_grad(fn), stages, replicas, params, tensor)
    batch, expected, whole = example()
    loss, gradients = run(params, batch)
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    wanted = gpt2_stages.laid_out(whole, shape)

    def compare(got, wanted):
      atol = 1e-5 * float(np.abs(wanted).max())
      np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=atol)

    jax.tree.map(compare, gradients, wanted)

  def test_late_updates_complete_the_gradients(self):
    """Only embedding and positions differ in the early gradients."""
    params = padded(whole_params(), 4)

    def fn(params, batch):
      loss, early, late_updates = gpt2_stages.value_and_grad(
        TINY, 2, params, batch
      )
      return loss, (early, late_updates(lambda x: x))

    specs = gpt2_stages.param_specs(params, {"stage": 4})
    run = jax.jit(
      jax.shard_map(
        lambda p, b: lax.pmean(fn(lax.pcast(p, AXIS, to="varying"), b), AXIS),
        mesh=stage_mesh(4, 2),
        in_specs=(specs, P(AXIS)),
        out_specs=(P(), (specs, specs)),
      )
    )
    loss, (early, gradients) = run(params, example()[0])
    self.assert_is_the_whole_models(loss, gradients)
    same = jax.tree.map(
      lambda a, b: bool(np.array_equal(a, b)), early, gradients
    )
    late = {name for name, is_same in same.items() if is_same is False}
    self.assertEqual(late, {"embedding", "positions"})
    self.assertTrue(all(jax.tree.leaves(same["blocks"])))
    # All of the positions' gradient comes late.
    np.testing.assert_array_equal(early["positions"], 0.0)

  def test_same_key_same_model(self):
    key = jax.random.key(3)
    whole = jax.jit(gpt2.init_params, static_argnums=0)(TINY, key)
    cut = jax.jit(lambda key: gpt2_stages.init_params(TINY, {"stage": 8}, key))(
      key
    )
    chex.assert_trees_all_equal(cut, padded(whole, 8))

  def test_no_array_holds_all_logits(self):
    """Nor is the vocabulary gathered, forward or backward."""
    config = gpt2.GPT2Config(
      vocab_size=1001, context=11, width=16, num_layers=2, num_heads=2
    )
    stages, sequences = 2, 6
    tokens, part = sequences * config.context, 1002 // stages
    params = jax.eval_shape(
      lambda: gpt2_stages.init_params(
        config, {"stage": stages}, jax.random.key(0)
      )
    )
    batch = jax.ShapeDtypeStruct((sequences, config.context + 1), jnp.int32)
    fn = functools.partial(gpt2_stages.loss_fn, config, 2)
    run = on_mesh(jax.value_and_grad(fn), stages, 1, params)
    text = run.lower(params, batch).compile().as_text()
    shapes = {
      tuple(map(int, dims.split(",")))
      for dims in re.findall(r"\b[a-z]+\d+\[([\d,]+)\]", text)
    }
    # A stage's own logits are the largest array.
    self.assertIn((tokens, part), shapes)
    self.assertEqual(max(map(np.prod, shapes)), tokens * part)
    dims = {dim for shape in shapes for dim in shape}
    self.assertNoCommonElements(dims, {1001, 1002})


class CrossEntropyTest(parameterized.TestCase):
  def compare(self, stages, vocab_size, x, rows, labels, rtol, atol):
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
    run = over_stages(
      stages, grad(cut), (P(), split), ((P(), P()), (P(), split))
    )
    # Values of the padding must not matter.
    filled = np.pad(rows, ((0, missing), (0, 0)), constant_values=1e3)
    (_, losses), (dx, drows) = run(x, filled)
    (_, expected), (whole_dx, whole_drows) = jax.jit(grad(whole))(x, rows)
    self.assertEqual(losses.dtype, jnp.float32)
    self.assertEqual(dx.dtype, x.dtype)
    drows, padding = np.split(drows, [vocab_size])
    np.testing.assert_array_equal(padding, 0.0)
    for got, wanted in (
      (losses, expected), (dx, whole_dx), (drows, whole_drows),
    ):  # fmt: skip
      got, wanted = np.asarray(got, np.float32), np.asarray(wanted, np.float32)
      self.assertTrue(np.all(np.isfinite(got)))
      np.testing.assert_allclose(
        got, wanted, rtol=rtol, atol=atol * np.abs(wanted).max()
      )

  def drawn(self, vocab_size, width=16):
    """Returns inputs, rows and labels; each stage has some of the labels."""
    random = np.random.default_rng(vocab_size)
    x = random.standard_normal((vocab_size, width), np.float32)
    rows = random.standard_normal((vocab_size, width), np.float32)
    return jnp.asarray(x), rows, jnp.arange(vocab_size)

  @parameterized.parameters(
    (2, 50),
    (8, 50),
    (4, 9),  # the last stage holds padding only
  )
  def test_equals_the_loss_of_whole_logits(self, stages, vocab_size):
    x, rows, labels = self.drawn(vocab_size)
    self.compare(stages, vocab_size, x, rows, labels, 1e-5, 1e-6)

  def test_extreme_logits(self):
    """Logits of integers are exact in any order of sums."""
    random = np.random.default_rng(0)
    x = random.integers(-2000, 2001, (50, 16)).astype(np.float32)
    rows = random.integers(-5, 6, (50, 16)).astype(np.float32)
    logits = x @ rows.T
    self.assertGreater(logits.max(), 1e4)
    self.assertLess(logits.min(), -1e4)
    self.compare(4, 50, jnp.asarray(x), rows, jnp.arange(50), 1e-6, 1e-6)

  def test_bfloat16(self):
    """Logits have the same rounding; the gradient of x sums in bfloat16."""
    x, rows, labels = self.drawn(50)
    eps = float(jnp.finfo(jnp.bfloat16).eps)
    self.compare(4, 50, x.astype(jnp.bfloat16), rows, labels, eps, 2 * eps)


class LookupTest(parameterized.TestCase):
  @parameterized.parameters(1, 4, 8)
  def test_equals_indexing(self, stages):
    random = np.random.default_rng(0)
    rows = random.standard_normal((56, 6), np.float32)
    tokens = jnp.asarray(random.permutation(np.repeat(np.arange(50), 2)))
    weights = random.standard_normal((len(tokens), 6), np.float32)

    def loss(find, rows):
      found = find(rows)
      return jnp.sum(found * weights), found

    def run(find):
      return jax.value_and_grad(functools.partial(loss, find), has_aux=True)

    cut = over_stages(
      stages,
      run(lambda rows: gpt2_stages.lookup(rows, tokens)),
      (P("stage"),),
      ((P(), P()), P("stage")),
    )
    (_, found), gradient = cut(rows)
    np.testing.assert_array_equal(found, rows[tokens])
    _, expected = jax.jit(run(lambda rows: rows[tokens]))(rows)
    np.testing.assert_allclose(gradient, expected, rtol=1e-6, atol=1e-6)
    self.assertEqual(np.abs(gradient[50:]).max(), 0.0)


if __name__ == "__main__":
  absltest.main()
