"""Which tokens a masked-language model has to guess, and what it sees there.

Of every sequence a share of the positions is chosen. At 80 % of them the model
sees the mask token, the last id of the vocabulary, at 10 % a random token and
at 10 % the token itself, so that it cannot tell which tokens to trust.

Source: Devlin et al. 2018, arXiv:1810.04805, section 3.1. As in their code
the number of positions of a sequence is fixed, so none has nothing to learn
from. Difference: a sequence is masked by its own tokens. It has the same mask
in every run, on any number of replicas, after a restart and in evaluation; in
a second epoch, too, where BERT has ten masks a sequence.
"""

import jax
import jax.numpy as jnp
import numpy as np

SHARE = 0.15  # of the positions of a sequence
_MASKED, _RANDOM = 0.8, 0.1  # of those; the rest stays
_SEED = 1810


def mask_tokens(
  tokens: jax.Array, vocab_size: int
) -> tuple[jax.Array, jax.Array]:
  """Hides a share of every sequence.

  Args:
    tokens: int32 [batch, time].
    vocab_size: Number of token ids; the last one is the mask.

  Returns:
    What the model sees, int32 [batch, time], and the positions that it has to
    guess, int32 [batch, max(1, round(0.15 time))].
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
  """A key of each sequence: a multilinear hash of its tokens, modulo 2^32."""
  random = np.random.default_rng(_SEED)
  factors = random.integers(1 << 32, size=tokens.shape[1], dtype=np.uint32)
  hashes = jnp.sum(tokens.astype(jnp.uint32) * factors, 1, dtype=jnp.uint32)
  # The last bits of a product are known from those of its factors alone.
  hashes ^= hashes >> 16
  return jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(_SEED), hashes)
