"""The model is GPT-2: sizes, initialisation, causality."""

from unittest import mock

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from absl.testing import absltest, parameterized

from experiments.models import gpt2

pytestmark = pytest.mark.slow

TINY = gpt2.GPT2Config(
  vocab_size=50, context=16, width=24, num_layers=3, num_heads=4
)


loss_fn = jax.jit(gpt2.loss_fn, static_argnums=0)
grad_fn = jax.jit(jax.grad(gpt2.loss_fn, argnums=1), static_argnums=0)
init_params = jax.jit(gpt2.init_params, static_argnums=0)
logits = jax.jit(lambda p, t: gpt2.GPT2(TINY).apply({"params": p}, t))


def count(params):
  return sum(p.size for p in jax.tree.leaves(params))


class GPT2Test(parameterized.TestCase):
  @parameterized.parameters(
    (768, 12, 12, 124_439_808), (1024, 24, 16, 354_823_168)
  )
  def test_published_sizes(self, width, layers, heads, parameters):
    config = gpt2.GPT2Config(50257, 1024, width, layers, heads)
    init = lambda: gpt2.init_params(config, jax.random.key(0))  # noqa: E731
    self.assertEqual(count(jax.eval_shape(init)), parameters)

  def test_initialisation(self):
    params = init_params(TINY, jax.random.key(0))
    blocks = params["blocks"]
    self.assertEqual(blocks["attention_in"]["kernel"].shape, (3, 24, 72))
    for name, std in (
      ("attention_in", 0.02), ("attention_out", 0.02 / 6**0.5),
      ("mlp_in", 0.02), ("mlp_out", 0.02 / 6**0.5),
    ):  # fmt: skip
      kernel = np.asarray(blocks[name]["kernel"])
      self.assertAlmostEqual(kernel.std(), std, delta=0.1 * std)
      np.testing.assert_array_equal(blocks[name]["bias"], 0)
      self.assertFalse(np.allclose(kernel[0], kernel[1]))  # layers differ
    batch = jax.random.randint(jax.random.key(1), (8, 17), 0, 50)
    loss = float(loss_fn(TINY, params, batch))
    self.assertAlmostEqual(loss, np.log(50), delta=0.05)

  def test_no_token_sees_the_future(self):
    params = init_params(TINY, jax.random.key(0))
    # Larger weights make a leak visible.
    params = jax.tree.map(lambda p: p * 10, params)
    tokens = jax.random.randint(jax.random.key(1), (2, 16), 0, 50)
    changed = tokens.at[:, 9].set((tokens[:, 9] + 1) % 50)
    before, after = logits(params, tokens), logits(params, changed)
    np.testing.assert_allclose(before[:, :9], after[:, :9], atol=1e-4)
    self.assertGreater(np.abs(before[:, 9:] - after[:, 9:]).max(), 0.1)

  def test_sequences_do_not_mix(self):
    params = init_params(TINY, jax.random.key(0))
    params = jax.tree.map(lambda p: p * 10, params)
    tokens = jax.random.randint(jax.random.key(1), (3, 16), 0, 50)
    together = logits(params, tokens)
    alone = logits(params, tokens[1:2])
    np.testing.assert_allclose(together[1:2], alone, rtol=1e-3, atol=1e-3)

  def test_unrolling_changes_nothing(self):
    params = init_params(TINY, jax.random.key(0))
    batch = jax.random.randint(jax.random.key(1), (2, 17), 0, 50)
    unrolled = gpt2.GPT2Config(50, 16, 24, 3, 4, unroll=3)
    chex.assert_trees_all_close(
      grad_fn(TINY, params, batch),
      grad_fn(unrolled, params, batch),
      rtol=1e-3,
      atol=1e-6,
    )

  def test_bfloat16_activations(self):
    config = gpt2.GPT2Config(50, 16, 24, 3, 4, dtype="bfloat16")
    params = init_params(config, jax.random.key(0))
    batch = jax.random.randint(jax.random.key(1), (8, 17), 0, 50)
    grads = grad_fn(config, params, batch)
    chex.assert_type(jax.tree.leaves(grads), jnp.float32)
    loss = float(loss_fn(config, params, batch))
    self.assertAlmostEqual(loss, np.log(50), delta=0.1)

  def test_custom_backward_passes_agree_with_jax(self):
    params = init_params(TINY, jax.random.key(0))
    batch = jax.random.randint(jax.random.key(1), (2, 17), 0, 50)
    own = grad_fn(TINY, params, batch)
    with mock.patch.object(gpt2, "_product", jnp.matmul):
      plain = jax.jit(jax.grad(lambda p: gpt2.loss_fn(TINY, p, batch)))(params)
    self.assertGreater(optax.tree.norm(plain["blocks"]), 0)
    chex.assert_trees_all_close(own, plain, rtol=1e-4, atol=1e-7)

  def test_bad_sizes(self):
    with self.assertRaisesRegex(
      ValueError, r"`model.num_heads`.*\(10\), got 3"
    ):
      gpt2.GPT2Config(50, 16, 10, 1, 3)
    with self.assertRaisesRegex(ValueError, "`model.num_layers` must be at le"):
      gpt2.GPT2Config(50, 16, 12, 0, 3)


if __name__ == "__main__":
  absltest.main()
