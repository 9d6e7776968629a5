"""How values are cut and joined to travel well between CPU hosts.

There XLA's collectives are those of Gloo, over TCP. Two things cost time:

- An all-reduce of several arrays is one after the other, each with the round
  trips of a ring. So small ones are joined (`joined`).
- A message is sent when its receiver has said that it waits for it. Of a pair
  that sends to each other at once, one says so behind its own message, and the
  link carries one way at a time: 11 MB to and from each of 2 hosts at 100
  Mbit/s took 1.8 s, and 0.93 s in messages of 96 KiB, where the link alone
  takes 0.86 (`in_messages`). With more hosts an all-to-all is better done by
  rotations, in which a host sends to one and receives from another
  (`collectives.exchange_parts`).
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.flatten_util import ravel_pytree

from edgc_jax.ordering import in_turn
from edgc_jax.varying import varying_axes

# Bytes; of a smaller leaf the round trip weighs more than a copy does.
_SMALL = 2**20
# Bytes of a message, if that is not too often. Each waits for the one before
# it: on a link of long latency that takes longer than one way after the other.
# Parts of more than 12 MiB are cut less finely, and gain less.
_MESSAGE, _MOST_MESSAGES = 3 * 2**15, 128


def are_used() -> bool:
  """Whether several processes run on CPUs, wherever an axis lies."""
  return jax.default_backend() == "cpu" and jax.process_count() > 1


def is_mutual(shift: int, devices: int) -> bool:
  """Whether pairs send to each other where all send so many devices further."""
  return 2 * shift == devices


def num_messages(num_bytes: int) -> int:
  """Into how many messages so many bytes are cut (`in_messages`)."""
  return min(max(1, num_bytes // _MESSAGE), _MOST_MESSAGES)


def more_trips(num_bytes: int, devices: int) -> float:
  """Latencies of an exchange and a gathering of parts, in all-reduces' worth.

  Beyond those of a single all-reduce, which is 2 (N - 1) messages, one after
  the other. About: parts are cut one exchange at a time.

  Args:
    num_bytes: Of all parts together.
    devices: N, how many there are.

  Returns:
    0 where they are not CPU hosts.
  """
  if not are_used() or devices % 2:
    return 0.0
  halves = 2 if devices == 2 else 1  # a ring of two is mutual, too
  more = halves * (num_messages(num_bytes // devices) - 1)
  return more / (2 * (devices - 1))


def in_messages(
  send: Callable[[jax.Array], jax.Array], values: jax.Array
) -> jax.Array:
  """A collective of [n] to [..., n], in short messages, one after the other."""
  count = num_messages(values.nbytes)
  if count == 1:
    return send(values)
  length = -(-values.size // count)
  whole = values.size // length * length
  _, results = lax.scan(
    lambda carry, part: (carry, send(part)),
    None,
    values[:whole].reshape(-1, length),
  )
  done = jnp.moveaxis(results, 0, -2)
  done = done.reshape(*done.shape[:-2], whole)
  if whole == values.size:
    return done
  rest = in_turn(values[whole:], done)
  return jnp.concatenate([done, send(rest)], axis=-1)


def joined(reduce: Callable[[Any], Any], tree: Any) -> Any:
  """Reduces all leaves, small ones of a kind as one array.

  A kind is a dtype and the axes that JAX tracks values to vary over, which
  joined values would share.
  """
  leaves, structure = jax.tree.flatten(jax.tree.map(jnp.asarray, tree))
  kinds: dict[Any, list[int]] = {}
  for index, leaf in enumerate(leaves):
    is_small = leaf.nbytes < _SMALL
    kind = (leaf.dtype, varying_axes(leaf)) if is_small else index
    kinds.setdefault(kind, []).append(index)
  arrays = [
    ravel_pytree([leaves[i] for i in indices]) for indices in kinds.values()
  ]
  reduced = reduce([flat for flat, _ in arrays])
  for indices, (_, cut), flat in zip(
    kinds.values(), arrays, reduced, strict=True
  ):
    for index, leaf in zip(indices, cut(flat), strict=True):
      leaves[index] = leaf
  return jax.tree.unflatten(structure, leaves)
