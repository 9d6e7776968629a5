"""Masked-language modelling: masks, and attention to both sides."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from configs import bert_tiny, gpt2_tiny
from experiments.trainer import tasks
from experiments.trainer.data import text
from experiments.trainer.models import gpt2, masking
from experiments.trainer.training import checks

TINY = gpt2.GPT2Config(51, 16, 24, 1, 4, is_masked=True)
VOCAB = 257


mask = jax.jit(masking.mask_tokens, static_argnums=1)
loss_fn = jax.jit(gpt2.loss_fn, static_argnums=0)


@functools.partial(jax.jit, static_argnums=0)
def logits(config, params, tokens):
  return gpt2.GPT2(config).apply({"params": params}, tokens)


@pytest.fixture(scope="module")
def many():
  """Returns tokens [400, 128], masked tokens and positions to predict."""
  tokens = jax.random.randint(jax.random.key(0), (400, 128), 0, VOCAB - 1)
  return tuple(map(np.asarray, (tokens, *mask(tokens, VOCAB))))


@pytest.fixture(scope="module")
def params():
  return jax.jit(gpt2.init_params, static_argnums=0)(TINY, jax.random.key(0))


def test_positions(many):
  tokens, seen, positions = many
  assert positions.shape == (400, 19)  # 15 % of 128
  assert all(len(set(row)) == 19 for row in positions)
  # Every position is equally likely: 59 of 400, with deviation 7.1.
  counts = np.bincount(positions.ravel(), minlength=128)
  assert counts.min() > 59.4 - 5 * 7.1 and counts.max() < 59.4 + 5 * 7.1
  is_hidden = np.zeros(tokens.shape, bool)
  np.put_along_axis(is_hidden, positions, True, axis=1)
  np.testing.assert_array_equal(seen[~is_hidden], tokens[~is_hidden])


def test_tokens_at_masked_positions(many):
  tokens, seen, positions = many
  seen, labels = (np.take_along_axis(x, positions, 1) for x in (seen, tokens))
  is_mask, is_same = seen == VOCAB - 1, seen == labels
  # 7600 draws: standard deviations of 0.0046 and 0.0034.
  assert is_mask.mean() == pytest.approx(0.8, abs=0.02)
  assert is_same.mean() == pytest.approx(0.1, abs=0.015)
  random = seen[~is_mask & ~is_same]
  assert len(random) / seen.size == pytest.approx(0.1, abs=0.015)
  assert random.min() < 10 and random.max() > 245  # of the whole vocabulary
  assert random.mean() == pytest.approx(127.5, abs=5 * 73.9 / 700**0.5)


def test_masks_depend_on_the_sequence_alone(many):
  """Not on its place in the batch, or on the replica of a mesh."""
  tokens, seen, positions = many
  again, where = mask(tokens[::-1], VOCAB)
  np.testing.assert_array_equal(again, seen[::-1])
  np.testing.assert_array_equal(where, positions[::-1])
  mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
  on_mesh = jax.shard_map(
    lambda t: masking.mask_tokens(t, VOCAB)[0],
    mesh=mesh, in_specs=P("data"), out_specs=P("data"),
  )  # fmt: skip
  np.testing.assert_array_equal(jax.jit(on_mesh)(tokens), seen)
  changed = tokens.copy()
  changed[:, 100] = (changed[:, 100] + 1) % 256
  where = np.asarray(mask(changed, VOCAB)[1])
  same = (where[:, :, None] == positions[:, None]).sum(axis=(1, 2)).mean()
  assert same == pytest.approx(19 * 19 / 128, rel=0.1)  # by chance


def test_short_sequences_have_a_masked_position():
  tokens = jax.ShapeDtypeStruct((2, 1), jnp.int32)
  _, positions = jax.eval_shape(masking.mask_tokens, tokens, VOCAB)
  assert positions.shape == (2, 1)


def test_only_masked_models_see_later_tokens(params):
  params = jax.tree.map(lambda p: p * 3, params)  # makes differences visible
  tokens = jax.random.randint(jax.random.key(1), (8, 16), 0, 50)
  changed = tokens.at[:, 9].set((tokens[:, 9] + 1) % 50)

  def differences(config):
    before, after = (logits(config, params, t) for t in (tokens, changed))
    return jnp.abs(before - after)[:, :9].max(axis=2)

  assert differences(TINY).min() > 1e-3
  causal = dataclasses.replace(TINY, is_masked=False)
  assert differences(causal).max() < 1e-6


def test_loss_is_of_the_masked_positions(params):
  batch = jax.random.randint(jax.random.key(2), (8, 17), 0, 50)
  loss = float(loss_fn(TINY, params, batch))
  assert loss == pytest.approx(np.log(51), abs=0.15)
  seen, positions = mask(batch[:, :-1], 51)
  log_p = np.asarray(jax.nn.log_softmax(logits(TINY, params, seen)))
  by_hand = [
    -log_p[row, place, batch[row, place]]
    for row in range(8)
    for place in positions[row].tolist()
  ]
  assert len(by_hand) == 8 * 2
  assert loss == pytest.approx(np.mean(by_hand), rel=1e-5)


def test_bert_tiny_has_the_size_of_gpt2_tiny():
  bert, gpt = (c.get_config() for c in (bert_tiny, gpt2_tiny))
  different = {key for key in gpt.model if bert.model[key] != gpt.model[key]}
  assert different == {"vocab_size"}
  models = [tasks.make(config).model for config in (bert, gpt)]
  assert [model.is_masked for model in models] == [True, False]
  assert [model.reserved_ids for model in models] == [1, 0]


def test_errors():
  config = bert_tiny.get_config()
  config.mesh.update(stage=2, data=2, backend="jit")
  with pytest.raises(ValueError, match="must be 1 for the task 'bert'"):
    checks.check(config, tasks.make(config))
  tokens = np.arange(257, dtype=np.uint16)
  corpus = text.Corpus(tokens, tokens, "made up", "")
  text.check_vocab(corpus, 257)
  with pytest.raises(ValueError, match="for the mask, got 257; set it to 258"):
    text.check_vocab(corpus, 257, reserved=1)
  text.check_vocab(corpus, 258, reserved=1)
