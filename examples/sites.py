"""Trains one model at several sites that share nothing but a folder or bucket.

In two terminals, each of them a site; kill one, start it again, or add a third:

    python examples/sites.py /tmp/run berlin
    python examples/sites.py /tmp/run tokyo

A site exchanges what it has moved every 10 steps. A bucket's URL works as well.
"""

import sys
import time
import zlib

import jax
import jax.numpy as jnp
import optax

import edgc_jax

ROUNDS, EVERY, VOCAB, LENGTH, WIDTH, HIDDEN = 60, 10, 32, 16, 64, 256
PAUSE = 0.1  # seconds, so that there is time to start another one
tx = optax.adam(1e-2)


def init_params():
  keys = jax.random.split(jax.random.key(0), 3)
  normal = jax.nn.initializers.lecun_normal()
  return {
    "embedding": jax.random.normal(keys[0], (VOCAB, WIDTH)) / VOCAB**0.5,
    "up": normal(keys[1], (2 * WIDTH, HIDDEN)),
    "down": normal(keys[2], (HIDDEN, VOCAB)),
  }


def loss_fn(params, tokens):
  x = params["embedding"][tokens]
  pairs = jnp.concatenate([x[:, :-2], x[:, 1:-1]], -1)
  logits = jax.nn.relu(pairs @ params["up"]) @ params["down"]
  cross_entropy = optax.softmax_cross_entropy_with_integer_labels
  return cross_entropy(logits, tokens[:, 2:]).mean()


def batch_of(key):  # tokens, each the sum of the two before
  pair = jax.random.randint(key, (64, 2), 0, VOCAB)
  columns = [*pair.T]
  for _ in range(LENGTH - 2):
    columns.append((columns[-1] + columns[-2]) % VOCAB)
  return jnp.stack(columns, axis=1)


@jax.jit
def train_step(params, opt_state, tokens):
  loss, grads = jax.value_and_grad(loss_fn)(params, tokens)
  updates, opt_state = tx.update(grads, opt_state, params)
  return optax.apply_updates(params, updates), opt_state, loss


def main(url, name, **options):
  site = edgc_jax.Site(url, name, every=EVERY, **options)
  params = site.join(init_params())  # the run's, if there is one
  opt_state, losses, step = tx.init(params), [], 0
  own = jax.random.key(zlib.crc32(name.encode()))  # data of its own
  while site.round < ROUNDS:
    tokens = batch_of(jax.random.fold_in(own, site.round * EVERY + step))
    params, opt_state, loss = train_step(params, opt_state, tokens)
    losses.append(float(loss))
    time.sleep(PAUSE)
    if site.is_due(step):
      params = site.exchange(params)
      print(f"loss {losses[-1]:.3f}, {site.last}", flush=True)
    step += 1
  site.leave()
  print(f"all {ROUNDS} rounds are done")
  return losses, params


if __name__ == "__main__":
  main(*sys.argv[1:3])
