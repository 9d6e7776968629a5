"""Masks tokens for a masked language model to predict.

A fixed fraction of each sequence's positions is chosen. At 80 % of them the
model sees the mask token, which is the last id of the vocabulary; at 10 % it
sees a random token, and at 10 % the token itself, so that it cannot know which
tokens were replaced.

Source: Devlin et al. 2018, arXiv:1810.04805, section 3.1. As in their code,
the number of positions of a sequence is fixed, so every sequence has some.
Difference: the mask is a function of the sequence's tokens. A sequence has the
same mask in every run, on any number of replicas, after a restart and in
evaluation. It also has the same one in a second epoch, where BERT has ten
masks per sequence.
"""

import jax
import jax.numpy as jnp
import numpy as np

SHARE = 0.15  # fraction of a sequence's positions that is chosen
_MASKED, _RANDOM = 0.8, 0.1  # fractions of the chosen; the rest is unchanged
_SEED = 1810


def mask_tokens(
  tokens: jax.Array, vocab_size: int
) -> tuple[jax.Array, jax.Array]:
  """Masks a fraction of every sequence.

  Args:
    tokens: int32 [batch, time].
    vocab_size: Number of token ids; the last one is the mask.

  Returns:
    The model's inputs, int32 [batch, time], and the positions to predict,
    int32 [batch, max(1, round(0.15 time))].
  """
  time = tokens.shape[1]
  count = max(1, round(SHARE * time))

  def mask(sequence: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
    order, fate, other = jax.random.split(key, 3)
    positions = jax.random.permutation(order, time)[:count]
    draw = jax.random.uniform(fate, (count,))
    random = jax.random.randint(other, (count,), 0, vocab_size - 1)
    seen = jnp.where(draw < _MASKED + _RANDOM, random, sequence[positions])
    seen = jnp.where(draw < _MASKED, vocab_size - 1, seen)
    return sequence.at[positions].set(seen), positions

  return jax.vmap(mask)(tokens, _keys(tokens))


def _keys(tokens: jax.Array) -> jax.Array:
  """Makes a key per sequence: a multilinear hash of its tokens, mod 2^32."""
  random = np.random.default_rng(_SEED)
  factors = random.integers(1 << 32, size=tokens.shape[1], dtype=np.uint32)
  hashes = jnp.sum(tokens.astype(jnp.uint32) * factors, 1, dtype=jnp.uint32)
  # The low bits of a product depend only on the low bits of its factors.
  hashes ^= hashes >> 16
  return jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(_SEED), hashes)
