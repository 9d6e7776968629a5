"""Averages of encoded values over the replicas.

An all-reduce cannot sum encoded values, so it is split into its two halves:

  replica i sends part j of encode(x_i) to replica j       all-to-all
  replica j decodes the parts and sums them in float32:    y_j
  replica j sends encode(y_j / N) to all replicas          all-gather

Each half sends every value once, like the halves of an all-reduce, so both
together send as many bytes as an all-reduce of the encoded values.

A replica sums its own part as it is, not as it would have sent it. What the
second encoding loses, N times, is missing from this part; error feedback adds
it to the next one, which enters the next sum exactly. So each half compensates
its own error alone, as in 1-bit Adam (Tang et al. 2021, arXiv:2102.02888), and
errors stay bounded with every code that contracts.

A code that moves zeros would also move rows that are zero on all replicas, by
the errors of their neighbours, and Adam would divide these by their own size.
So with such a code one bit a row, along the last axis, says in both halves
whether it has other values than zeros; if no replica's has, its mean is zero.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from edgc_jax.wire import collectives, sums
from edgc_jax.wire.channel import Channel
from edgc_jax.wire.codes import Code


class Averaged(NamedTuple):
  """The mean of the values and the contribution of this replica to it.

  The mean of `sent` over the replicas is `mean`, whatever both encodings lost.
  So `value - sent` is the residual of a value, and error feedback that adds it
  to the next values loses nothing.
  """

  mean: list[jax.Array]  # float32, shapes of the values; equal on all replicas
  sent: list[jax.Array]  # float32, the same shapes; local
  exact: Any  # the mean of the tree sent in float32


class Lengths(NamedTuple):
  """How many entries of a vector are sent.

  Attributes:
    choices: At each level; the vector has the most.
    level: int32 [], the level in use, equal on all replicas.
  """

  choices: Sequence[int]
  level: jax.Array | int


def average(
  values: Sequence[jax.Array],
  channel: Channel,
  codes: Sequence[Code] | None = None,
  key: jax.Array | None = None,
  exact: Any = None,
  lengths: Lengths | None = None,
) -> Averaged:
  """Averages `values` over the replicas, encoded, and `exact` in float32.

  Sends as many bytes as `average_bytes` predicts, and the bytes of `exact`.

  Args:
    values: float32 arrays of any shapes, local.
    channel: Sends them to the replicas.
    codes: The encoding of each value; they share an all-to-all and an
      all-gather. None for all sends them in float32, in one all-reduce with
      `exact`.
    key: Key for codes that round at random; equal on all replicas, which fold
      their index into it.
    exact: A tree that is averaged without encoding.
    lengths: How many entries of the last value are sent; it is a vector, and
      zero beyond them. None sends all.

  Returns:
    The means, and the part of the values that was sent.
  """
  values = list(values)
  if codes is None or not values:
    last, (others, exact) = _at_level(
      channel, channel.mean, values[-1:], (values[:-1], exact), lengths
    )
    return Averaged([*others, *last], values, exact)
  assert key is not None  # given with codes
  replicas = channel.num_devices
  replica = collectives.device_index(channel.axis_name)
  first, second = jax.random.split(jax.random.fold_in(key, replica))
  groups = _grouped(values, codes, replicas, lengths is not None)
  if lengths is not None:  # from here on in blocks
    lengths = lengths._replace(choices=groups[codes[-1]].sizes(lengths.choices))
  parts = {code: group.pack() for code, group in groups.items()}

  def send(collective: Callable, encoded: dict, rows: dict) -> tuple:
    """Sends blocks of all codes; of the last value's those in use."""
    last = encoded[codes[-1]]
    rest = encoded | {codes[-1]: last._replace(blocks=())}
    # As lists: JAX sorts the keys of dictionaries.
    others = [*rest.values()], [*rows.values()]
    cut, others = _at_level(channel, collective, last.blocks, others, lengths)
    found, rows = (
      dict(zip(keys, x, strict=True))
      for keys, x in zip((encoded, rows), others, strict=True)
    )
    found[codes[-1]] = found[codes[-1]]._replace(blocks=cut)
    return found, rows

  # All-to-all: part j of all replicas, on replica j.
  encoded = {code: code.encode(x, first) for code, x in parts.items()}
  rows = {code: _rows(groups[code].values, replicas)
          for code in groups if code.moves_zeros}  # fmt: skip
  received, rows = send(channel.exchange_parts, encoded, rows)
  means, sent = _own_means(parts, encoded, received, replica, second)
  rows = {code: jax.lax.reduce_or(bits, (0,)) for code, bits in rows.items()}
  # All-gather: the means of all parts, on every replica.
  means, rows = send(channel.gather, means, rows)
  found = Averaged([*values], [*values], channel.mean(exact))
  for code, group in groups.items():
    both = [group.unpack(x) for x in (code.decode(means[code]), sent[code])]
    if code.moves_zeros:
      both = _without_zero_rows(both, rows[code])
    for i, mean, own in zip(group.places, *both, strict=True):
      found.mean[i], found.sent[i] = mean, own
  return found


def _own_means(
  parts: dict[Code, jax.Array],
  encoded: dict[Code, Any],
  received: dict[Code, Any],
  replica: jax.Array,
  key: jax.Array,
) -> tuple[dict[Code, Any], dict[Code, jax.Array]]:
  """Averages this replica's part of the values, between the two halves.

  Args:
    parts: float32 [N, n], the values of this replica, by code.
    encoded: The same as they were sent.
    received: Part number `replica` of all replicas, as they sent it.
    replica: int32 [], index of this one.
    key: For codes that round at random.

  Returns:
    The encoded mean of the part; and what this replica has sent, [N, n].
  """
  means, sent = {}, {}
  for code, own in parts.items():
    is_own = (jnp.arange(len(own)) == replica)[:, None]
    terms = jnp.where(is_own, own[replica], code.decode(received[code]))
    mean = sums.of_rows(terms) / len(own)  # y_j / N
    means[code] = code.encode(mean, key)
    # The replica that encodes a mean keeps its error, N times, in `sent`.
    error = len(own) * (code.decode(means[code]) - mean)
    sent[code] = jnp.where(is_own, own + error, code.decode(encoded[code]))
  return means, sent


def _at_level(
  channel: Channel,
  collective: Callable,
  cut: Any,
  rest: Any,
  lengths: Lengths | None,
) -> Any:
  """Sends the first entries of the arrays [..., n] in `cut`, and all of `rest`.

  A switch has a branch for each level, with a collective of its length.

  Returns:
    What is received, with zeros for entries of `cut` that are not in use.
  """
  choices, level = lengths or ((1,), 0)
  most = max(choices)

  def send(size: int, cut: Any, rest: Any) -> Any:
    own = jax.tree.map(lambda x: x[..., : x.shape[-1] // most * size], cut)
    found, rest = collective((own, rest))

    def fill(x: jax.Array, like: jax.Array) -> jax.Array:
      missing = like.shape[-1] - x.shape[-1]
      return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, missing)])

    return jax.tree.map(fill, found, cut), rest

  if len(set(choices)) == 1:
    return send(most, cut, rest)
  branches = [functools.partial(send, size) for size in choices]
  return channel.switch(level, branches, cut, rest)


def average_bytes(
  shapes: Sequence[tuple[int, ...]],
  codes: Sequence[Code] | None = None,
  replicas: int = 1,
) -> int:
  """Predicts the bytes of `average`, without `exact`.

  Args:
    shapes: The shapes of the values.
    codes: Their encodings; None is float32.
    replicas: Number of replicas; values are padded to as many equal parts of
      whole granules.

  Returns:
    The payload, counted as for an all-reduce.
  """
  if codes is None or not shapes:
    return 4 * sum(map(math.prod, shapes))
  total = 0
  for code, at in _by_code(codes).items():
    own = [shapes[i] for i in at]
    sizes = [_padded(math.prod(shape), code.granule) for shape in own]
    size = _padded(sum(sizes), code.granule * replicas)
    total += code.num_bytes(size, replicas)
    if code.moves_zeros:
      total += _padded(sum(map(_num_rows, own)), 8 * replicas) // 8
  return total


def _by_code(codes: Sequence[Code]) -> dict[Code, list[int]]:
  """Returns the places of the values of each code."""
  places: dict[Code, list[int]] = {}
  for i, code in enumerate(codes):
    places.setdefault(code, []).append(i)
  return places


def _grouped(
  values: Sequence[jax.Array],
  codes: Sequence[Code],
  replicas: int,
  is_cut: bool,
) -> "dict[Code, _Group]":
  """Returns the values of each code; `is_cut`: of the last not all are sent."""
  return {
    code: _Group(
      code, tuple(at), [values[i] for i in at], replicas,
      by_turns=is_cut and code == codes[-1],
    )
    for code, at in _by_code(codes).items()
  }  # fmt: skip


def _num_rows(shape: tuple[int, ...]) -> int:
  return math.prod(shape[:-1])


def _rows(values: Sequence[jax.Array], replicas: int) -> jax.Array:
  """Returns which rows are not zero, in bits; uint8 [replicas, bytes].

  Rows are along the last axis, of which a vector is one.
  """
  flags = [jnp.any(jnp.atleast_1d(x) != 0, axis=-1).ravel() for x in values]
  bits = jnp.packbits(jnp.concatenate(flags))
  return jnp.pad(bits, (0, -bits.size % replicas)).reshape(replicas, -1)


def _without_zero_rows(
  lists: Sequence[list[jax.Array]], bits: jax.Array
) -> list[list[jax.Array]]:
  """Returns lists of equal arrays, with zeros in rows that `_rows` denies."""
  shapes = [x.shape[:-1] for x in lists[0]]
  ends = np.cumsum([math.prod(shape) for shape in shapes])
  flags = jnp.unpackbits(bits.ravel(), count=int(ends[-1])).astype(bool)
  masks = [
    mask.reshape(*shape, 1)
    for mask, shape in zip(jnp.split(flags, ends[:-1]), shapes, strict=True)
  ]
  return [
    [jnp.where(mask, x, 0.0) for mask, x in zip(masks, own, strict=True)]
    for own in lists
  ]


@dataclasses.dataclass(frozen=True)
class _Group:
  """The values of one code, packed as one row of blocks for each replica.

  No two values share a block. Replicas get a run of blocks each, or one after
  the other by turns: then the first blocks of all are the first of each part.
  """

  code: Code
  places: tuple[int, ...]  # of the values, among those of all codes
  values: Sequence[jax.Array]
  replicas: int
  by_turns: bool

  def pack(self) -> jax.Array:
    """Packs the values as float32 [replicas, n]."""
    # Zeros: a block's error, which is less than its energy, is less than that
    # of the values then.
    granule = self.code.granule
    flat = [jnp.pad(x.ravel(), (0, -x.size % granule)) for x in self.values]
    vector = jnp.concatenate(flat)
    length = _padded(vector.size, granule * self.replicas)
    vector = jnp.pad(vector, (0, length - vector.size))
    if self.by_turns:
      blocks = vector.reshape(-1, self.replicas, granule)
      vector = blocks.swapaxes(0, 1)
    return vector.reshape(self.replicas, -1)

  def unpack(self, parts: jax.Array) -> list[jax.Array]:
    """Reverses `pack`."""
    granule = self.code.granule
    if self.by_turns:
      parts = parts.reshape(self.replicas, -1, granule).swapaxes(0, 1)
    ends = np.cumsum([_padded(x.size, granule) for x in self.values])
    pieces = jnp.split(parts.ravel()[: ends[-1]], ends[:-1])
    return [
      piece[: x.size].reshape(x.shape)
      for piece, x in zip(pieces, self.values, strict=True)
    ]

  def sizes(self, choices: Sequence[int]) -> list[int]:
    """Returns the blocks of a part, by entries in use of the last value."""
    granule = self.code.granule
    fixed = sum(_padded(x.size, granule) for x in self.values[:-1])
    each = granule * self.replicas
    return [
      _padded(fixed + _padded(length, granule), each) // each
      for length in choices
    ]


def _padded(size: int, granule: int) -> int:
  """Rounds `size` up to a multiple of `granule`."""
  return -(-size // granule) * granule
