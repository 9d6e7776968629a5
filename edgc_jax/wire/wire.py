"""The wire: the values that all methods send in one round share collectives.

A method sends arrays and gets their means over the replicas. `Wire` joins the
arrays that the methods of all leaves send in one round. It sends them in one
all-reduce; encoded values in an all-to-all and an all-gather of their own, and
gathered values in an all-gather of their bytes. It encodes values, packs
factors, and detects numbers that are not finite.

One compiled program serves every rank of the ladder, and sends only the bytes
of the rank in use: each rank has a collective of its own length, in a branch of
a switch. Nothing is computed inside the switch: values are encoded before it.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from edgc_jax.wire import averages, order, packing
from edgc_jax.wire.channel import Channel
from edgc_jax.wire.codes import Code


class Send(NamedTuple):
  """What the method of one leaf sends in one round.

  Attributes:
    values: float32 array, local, averaged in a code.
    ranks: int32 [k], rows in use of `values` [k, width, height], of which the
      others are not sent; None if all rows always are in use.
    exact: A tree that is averaged in float32.
    measured: A tree that is averaged in float32. NaN and infinity here do not
      skip the step; in `values` or `exact` they do.
    gathered: A tree that is gathered from all replicas instead: real numbers of
      whole bytes, or bool.
    code: Encoding of `values` without `ranks`; None is the wire's, which values
      with `ranks` always have.
  """

  values: Any = None
  ranks: jax.Array | None = None
  exact: Any = None
  measured: Any = None
  gathered: Any = None
  code: Code | None = None


class Reply(NamedTuple):
  """What a method receives; all but `sent` is equal on all replicas.

  Attributes:
    mean: The mean of `values`; of factors, zero beyond the rank.
    sent: The contribution of this replica to the mean. `values - sent` is what
      encoding lost, so the mean of `sent` over the replicas is `mean`.
    exact: The mean of `exact`.
    measured: The mean of `measured`.
    gathered: `gathered` of all N replicas; leaves [N, ...].
    is_finite: bool [], whether all numbers of the exchange so far are finite.
      If not, the others are zero, except for `sent` and `measured`.
  """

  mean: Any
  sent: Any
  exact: Any
  measured: Any
  gathered: Any
  is_finite: jax.Array


class Wire:
  """Sends the rounds of one exchange over the replicas.

  Attributes:
    is_finite: bool [], whether all numbers received so far are finite; equal
      on all replicas.
  """

  def __init__(
    self,
    channel: Channel,
    ladder: Sequence[int],
    level: jax.Array | int,
    key: jax.Array | None = None,
    code: Code | None = None,
  ):
    """Prepares one exchange.

    Args:
      channel: To the other replicas.
      ladder: The ranks that may be used.
      level: int32 [], index of the rank in use, equal on all replicas.
      key: Source of random rounding; equal on all replicas, new at each step.
      code: Encoding of values that have none of their own; None is float32.
    """
    self._channel, self._ladder, self._level = channel, ladder, level
    self._key, self._round_key = key, key
    self._code = code
    self.is_finite = jnp.array(True)

  def send(
    self, leaves: Sequence[Any], sends: Sequence[Send | None]
  ) -> list[Reply | None]:
    """Sends one round.

    Rows of factors beyond the rank count as zeros.

    Args:
      leaves: The `Leaf` of each method.
      sends: What each sends; None for nothing.

    Returns:
      What each receives, with zeros in place of numbers if any number of the
      exchange so far was not finite.
    """
    found = [send for send in sends if send is not None]
    if not jax.tree.leaves(found):
      nothing = Reply(*[None] * 5, self.is_finite)
      return [None if send is None else nothing for send in sends]
    lengths = _packed_lengths(leaves, sends, self._ladder)
    if self._key is not None:
      self._round_key, self._key = jax.random.split(self._key)
    gathered = self._channel.gather([send.gathered for send in found])
    mean, sent, exact, measured = self._average(found, lengths)
    self.is_finite &= order.all_finite((mean, exact, gathered))
    mean, exact, gathered = order.zeros_unless(
      self.is_finite, (mean, exact, gathered)
    )
    finite = [self.is_finite] * len(found)
    replies = map(Reply, mean, sent, exact, measured, gathered, finite)
    return [None if send is None else next(replies) for send in sends]

  def _average(
    self, sends: Sequence[Send], lengths: list[int]
  ) -> tuple[list[Any], list[Any], list[Any], list[Any]]:
    """Averages values, packed where ranks differ, and exact numbers.

    Args:
      sends: What each method sends.
      lengths: The packed values at each rank of the ladder.
    """
    codes = [send.code or self._code for send in sends]
    packed = {
      i: send.ranks for i, send in enumerate(sends) if send.ranks is not None
    }
    whole = [
      i for i, send in enumerate(sends)
      if send.values is not None and i not in packed
    ]  # fmt: skip
    own_ranks = list(packed.values())
    factors = [packing.in_use(sends[i].values, r) for i, r in packed.items()]
    plain = [sends[i].values for i in whole]
    exact = [(send.exact, send.measured) for send in sends]
    own_codes, in_use = [codes[i] for i in whole], None
    if packed:
      plain.append(packing.pack(factors, own_ranks, max(lengths)))
      own_codes.append(self._code)
      if len(set(lengths)) > 1:
        in_use = averages.Lengths(lengths, self._level)
    done = averages.average(
      plain,
      self._channel,
      _codes(own_codes),
      self._round_key,
      exact,
      in_use,
    )
    mean: list[Any] = [None] * len(sends)
    sent: list[Any] = list(mean)
    for found, place in ((done.mean, mean), (done.sent, sent)):
      for i, value in zip(whole, found[: len(whole)], strict=True):
        place[i] = value
      if packed:
        restored = packing.unpack(found[-1], factors, own_ranks)
        for i, value in zip(packed, restored, strict=True):
          place[i] = value
    if not any(codes):  # the whole values were sent
      sent = [send.values for send in sends]
      for i, factor in zip(packed, factors, strict=True):
        sent[i] = factor
    return mean, sent, [e for e, _ in done.exact], [m for _, m in done.exact]


def _packed_lengths(
  leaves: Sequence[Any], sends: Sequence[Send | None], ladder: Sequence[int]
) -> list[int]:
  """Returns the values of all factors together, at each rank of the ladder."""
  lengths = np.zeros(len(ladder), np.int64)
  for leaf, send in zip(leaves, sends, strict=True):
    if send is not None and send.ranks is not None:
      columns = np.array([leaf.columns(rank) for rank in ladder])
      lengths += len(send.values) * send.values.shape[2] * columns
  return lengths.tolist()


def _codes(codes: Sequence[Code | None]) -> list[Code] | None:
  """Returns the codes of one round, None if all values are sent in float32."""
  found = [code for code in codes if code is not None]
  assert len(found) in (0, len(codes))  # a wire's code or none, or a method's
  return found or None


class CountingWire(Wire):
  """Counts the bytes of an exchange between N replicas, and sends nothing.

  Every replica would send what this one sends.

  Attributes:
    num_bytes: int64 [levels], at each rank of the ladder, counted as for an
      all-reduce.
  """

  def __init__(self, replicas: int, ladder: Sequence[int], code: Code | None):
    self._ladder, self._code, self._replicas = ladder, code, replicas
    self.num_bytes = np.zeros(len(ladder), np.int64)
    self.is_finite = jnp.array(True)

  def send(
    self, leaves: Sequence[Any], sends: Sequence[Send | None]
  ) -> list[Reply | None]:
    found = [send for send in sends if send is not None]
    whole = [x for x in found if x.values is not None and x.ranks is None]
    is_packed = any(send.ranks is not None for send in found)
    codes = [self._code] * is_packed + [x.code or self._code for x in whole]
    self.num_bytes += [
      averages.average_bytes(
        [(length,)] * is_packed + [send.values.shape for send in whole],
        _codes(codes),
        self._replicas,
      )
      for length in _packed_lengths(leaves, sends, self._ladder)
    ]
    exact = [(send.exact, send.measured) for send in found]
    self.num_bytes += 4 * sum(x.size for x in jax.tree.leaves(exact))
    gathered = jax.tree.leaves([send.gathered for send in found])
    self.num_bytes += self._replicas * sum(x.nbytes for x in gathered) // 2
    return [None if send is None else self._reply(send) for send in sends]

  def _reply(self, send: Send) -> Reply:
    """Replies with the shapes of a mean."""
    gathered = jax.tree.map(
      lambda x: jnp.broadcast_to(x, (self._replicas, *x.shape)), send.gathered
    )
    values, exact, measured = send.values, send.exact, send.measured
    return Reply(values, values, exact, measured, gathered, self.is_finite)
