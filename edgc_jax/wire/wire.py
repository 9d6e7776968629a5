"""The wire: the values that all methods send in one round share collectives.

A method sends arrays and gets their means over the replicas. `Wire` joins the
arrays that the methods of all leaves send in one round. It sends them in one
all-reduce; encoded values in an all-to-all and an all-gather of their own, and
gathered values in an all-gather of their bytes. It encodes values, packs
factors, orders collectives, detects numbers that are not finite, and counts the
bytes.

One compiled program serves every rank of the ladder, and sends only the bytes
of the rank in use: each rank has a collective of its own length, in a branch of
a switch. Nothing is computed inside the switch: values are encoded before it.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from edgc_jax.wire import averages, collectives, order, packing
from edgc_jax.wire.codes import Code
from edgc_jax.wire.order import AxisName


class Send(NamedTuple):
  """What the method of one leaf sends in one round.

  Attributes:
    values: float32 array, local, averaged in a code.
    ranks: int32 [k], rows in use of `values` [k, width, height], of which the
      others are not sent; None if all rows always are in use.
    exact: A tree that is averaged in float32.
    measured: A tree that is averaged in float32 and may be not finite: a step
      is skipped if a number of `values` or `exact` is not finite.
    gathered: A tree that is gathered from all replicas instead: real numbers of
      whole bytes, or bool.
    code: Encoding of `values`; None is the wire's.
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
    num_bytes: int64 [levels], bytes sent so far at each rank of the ladder,
      counted as for an all-reduce.
    is_finite: bool [], whether all numbers received so far are finite; equal
      on all replicas.
  """

  def __init__(
    self,
    axis_name: AxisName,
    ladder: Sequence[int],
    level: jax.Array | int,
    key: jax.Array | None = None,
    code: Code | None = None,
    earlier: Any = (),
  ):
    """Prepares one exchange.

    Args:
      axis_name: The bound axis of the replicas.
      ladder: The ranks that may be used.
      level: int32 [], index of the rank in use, equal on all replicas.
      key: Source of random rounding; equal on all replicas, new at each step.
      code: Encoding of values that have none of their own; None is float32.
      earlier: Results of the collectives before; the first round follows them.
    """
    self._axis_name, self._ladder, self._level = axis_name, ladder, level
    self._key, self._round_key = key, key
    self._code, self._earlier = code, earlier
    self.num_bytes = np.zeros(len(ladder), np.int64)
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
    lengths = self._count(leaves, sends)
    if self._key is not None:
      self._round_key, self._key = jax.random.split(self._key)
    ranks = [send.ranks for send in found]
    codes = [send.code or self._code for send in found]
    found = [send._replace(ranks=None, code=None) for send in found]
    found = order.in_turn(found, self._earlier)
    gathered = collectives.gather(
      [send.gathered for send in found], self._axis_name
    )
    found = order.in_turn(found, gathered)
    mean, sent, exact, measured = self._average(found, ranks, codes, lengths)
    self._earlier = (mean, exact, measured, gathered)
    self.is_finite &= order.all_finite((mean, exact, gathered))
    # What follows the exchange waits for this flag.
    self.is_finite = order.in_turn(self.is_finite, measured)
    mean, exact, gathered = order.zeros_unless(
      self.is_finite, (mean, exact, gathered)
    )
    finite = [self.is_finite] * len(found)
    replies = map(Reply, mean, sent, exact, measured, gathered, finite)
    return [None if send is None else next(replies) for send in sends]

  def _count(
    self, leaves: Sequence[Any], sends: Sequence[Send | None]
  ) -> list[int]:
    """Counts the bytes of a round.

    Returns:
      The packed values at each rank of the ladder.
    """
    lengths = np.zeros(len(self._ladder), np.int64)
    whole, codes, is_packed, exact, gathered = [], [], False, 0, 0
    for leaf, send in zip(leaves, sends, strict=True):
      if send is None:
        continue
      if send.ranks is not None:
        columns = np.array([leaf.columns(rank) for rank in self._ladder])
        lengths += len(send.values) * send.values.shape[2] * columns
        is_packed = True
      elif send.values is not None:
        whole.append(send.values.shape)
        codes.append(send.code or self._code)
      others = jax.tree.leaves((send.exact, send.measured))
      exact += sum(x.size for x in others)
      gathered += sum(x.nbytes for x in jax.tree.leaves(send.gathered))
    self.num_bytes += 4 * exact + self._replicas * gathered // 2
    self.num_bytes += [
      averages.average_bytes(
        [(length,)] * is_packed + whole,
        _codes([self._code] * is_packed + codes),
        self._replicas,
      )
      for length in lengths.tolist()
    ]
    return lengths.tolist()

  def _average(
    self,
    sends: Sequence[Send],
    ranks: Sequence[jax.Array | None],
    codes: Sequence[Code | None],
    lengths: list[int],
  ) -> tuple[list[Any], list[Any], list[Any], list[Any]]:
    """Averages values, packed where ranks differ, and exact numbers.

    Args:
      sends: What each method sends.
      ranks: Their rows in use.
      codes: Their encodings.
      lengths: The packed values at each rank of the ladder.
    """
    packed = {i: own for i, own in enumerate(ranks) if own is not None}
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
      self._axis_name,
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

  @property
  def _replicas(self) -> int:
    return collectives.num_devices(self._axis_name)


def _codes(codes: Sequence[Code | None]) -> list[Code] | None:
  """Returns the codes of one round, None if all values are sent in float32."""
  found = [code for code in codes if code is not None]
  assert len(found) in (0, len(codes))  # a wire's code or none, or a method's
  return found or None


class CountingWire(Wire):
  """Counts the bytes of an exchange between N replicas, and sends nothing.

  Every replica would send what this one sends.
  """

  def __init__(self, replicas: int, ladder: Sequence[int], code: Code | None):
    super().__init__("", ladder, 0, None, code)
    self._devices = replicas

  def send(
    self, leaves: Sequence[Any], sends: Sequence[Send | None]
  ) -> list[Reply | None]:
    self._count(leaves, sends)
    return [None if send is None else self._reply(send) for send in sends]

  def _reply(self, send: Send) -> Reply:
    """Replies with the shapes of a mean."""
    gathered = jax.tree.map(
      lambda x: jnp.broadcast_to(x, (self._devices, *x.shape)), send.gathered
    )
    values, exact, measured = send.values, send.exact, send.measured
    return Reply(values, values, exact, measured, gathered, self.is_finite)

  @property
  def _replicas(self) -> int:
    return self._devices
