"""The model is GPT-2: sizes, initialisation, causality."""

from unittest import mock

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from experiments.trainer.models import gpt2

pytestmark = pytest.mark.slow

TINY = gpt2.GPT2Config(
  vocab_size=50, context=16, width=24, num_layers=3, num_heads=4
)


loss_fn = jax.jit(gpt2.loss_fn, static_argnums=0)
grad_fn = jax.jit(jax.grad(gpt2.loss_fn, argnums=1), static_argnums=0)
loss_and_grad = jax.jit(
  jax.value_and_grad(gpt2.loss_fn, argnums=1), static_argnums=0
)
init_params = jax.jit(gpt2.init_params, static_argnums=0)
logits = jax.jit(lambda p, t: gpt2.GPT2(TINY).apply({"params": p}, t))


@pytest.fixture(scope="module")
def params():
  return init_params(TINY, jax.random.key(0))


@pytest.fixture(scope="module")
def batch():
  return jax.random.randint(jax.random.key(1), (8, 17), 0, 50)


@pytest.fixture(scope="module")
def grads(params, batch):
  return grad_fn(TINY, params, batch)


@pytest.mark.parametrize(
  "width, layers, heads, parameters",
  [(768, 12, 12, 124_439_808), (1024, 24, 16, 354_823_168)],
)
def test_published_sizes(width, layers, heads, parameters):
  config = gpt2.GPT2Config(50257, 1024, width, layers, heads)
  init = lambda: gpt2.init_params(config, jax.random.key(0))  # noqa: E731
  shapes = jax.tree.leaves(jax.eval_shape(init))
  assert sum(leaf.size for leaf in shapes) == parameters


def test_initialisation(params, batch):
  blocks = params["blocks"]
  assert blocks["attention_in"]["kernel"].shape == (3, 24, 72)
  for name, std in (
    ("attention_in", 0.02), ("attention_out", 0.02 / 6**0.5),
    ("mlp_in", 0.02), ("mlp_out", 0.02 / 6**0.5),
  ):  # fmt: skip
    kernel = np.asarray(blocks[name]["kernel"])
    assert kernel.std() == pytest.approx(std, rel=0.1)
    np.testing.assert_array_equal(blocks[name]["bias"], 0)
    assert not np.allclose(kernel[0], kernel[1])  # layers differ
  loss = float(loss_fn(TINY, params, batch))
  assert loss == pytest.approx(np.log(50), abs=0.05)


def test_no_token_sees_the_future_or_another_sequence(params):
  # Larger weights make a leak visible.
  params = jax.tree.map(lambda p: p * 10, params)
  tokens = jax.random.randint(jax.random.key(1), (3, 16), 0, 50)
  changed = tokens.at[:, 9].set((tokens[:, 9] + 1) % 50)
  before, after = logits(params, tokens), logits(params, changed)
  np.testing.assert_allclose(before[:, :9], after[:, :9], atol=1e-4)
  assert np.abs(before[:, 9:] - after[:, 9:]).max() > 0.1
  alone = logits(params, tokens[1:2])
  np.testing.assert_allclose(before[1:2], alone, rtol=1e-3, atol=1e-3)


def test_unrolling_changes_nothing(params, batch, grads):
  unrolled = gpt2.GPT2Config(50, 16, 24, 3, 4, unroll=3)
  chex.assert_trees_all_close(
    grads, grad_fn(unrolled, params, batch), rtol=1e-3, atol=1e-6
  )


def test_bfloat16_activations(params, batch):
  config = gpt2.GPT2Config(50, 16, 24, 3, 4, dtype="bfloat16")
  loss, grads = loss_and_grad(config, params, batch)
  chex.assert_type(jax.tree.leaves(grads), jnp.float32)
  assert float(loss) == pytest.approx(np.log(50), abs=0.1)


def test_custom_backward_passes_agree_with_jax(params, batch, grads):
  with mock.patch.object(gpt2, "_product", jnp.matmul):
    plain = jax.jit(jax.grad(lambda p: gpt2.loss_fn(TINY, p, batch)))(params)
  assert optax.tree.norm(plain["blocks"]) > 0
  chex.assert_trees_all_close(grads, plain, rtol=1e-4, atol=1e-7)
