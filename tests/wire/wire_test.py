"""A wire joins what is sent in one round, and counts its bytes."""

import functools
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.meshes import AXIS, assert_replicas_equal

from edgc_jax.measure import hlo
from edgc_jax.wire.channel import Channel
from edgc_jax.wire.codes import Bfloat16, Blockwise, Levels
from edgc_jax.wire.wire import CountingWire, Send, Wire

REPLICAS = 4
LADDER = (1, 2, 4)


class Leaf(NamedTuple):
  """All that a wire reads of a leaf."""

  cap: int = 0

  def columns(self, rank):
    return min(rank, self.cap)


def draw(*shape, seed=0):
  random = np.random.default_rng(seed)
  return random.standard_normal((REPLICAS, *shape)).astype(np.float32)


class Run:
  """What `rounds` returns that sends arrays [REPLICAS, ...] over a wire."""

  def __init__(self, rounds, tree, code=None):
    def send(tree, level):
      channel = Channel(AXIS)
      wire = Wire(channel, LADDER, level, jax.random.key(0), code)
      found = rounds(wire, tree)
      return found, wire.is_finite, channel.num_bytes

    devices = jax.devices()[:REPLICAS]
    mapped = jax.pmap(send, AXIS, in_axes=(0, None), devices=devices)
    self._program = mapped.lower(tree, 0).compile()
    self._tree, self.text = tree, self._program.as_text()
    self.found = self.at(0)

  def at(self, level):
    """Returns what is found at an index into the ladder."""
    found, is_finite, _ = self._program(self._tree, level)
    self.is_finite = is_finite.tolist()
    return found

  @property
  def num_bytes(self):
    """The bytes that were sent at each rank."""
    levels = range(len(LADDER))
    return [int(self._program(self._tree, i)[2][0]) for i in levels]


def in_use(values, ranks):
  """Returns stacks [..., k, width, height], zero beyond the ranks."""
  is_used = np.arange(values.shape[-2]) < np.array(ranks)[:, None]
  return np.where(is_used[..., None], values, 0).astype(np.float32)


def test_all_methods_share_one_collective_in_a_round():
  tree = {"a": draw(3, 5), "b": draw(7, seed=1), "c": draw(2, seed=2)}

  def rounds(wire, tree):
    leaves = [Leaf()] * 3
    first = wire.send(leaves, [Send(tree["a"]), None, Send(exact=tree["c"])])
    second = wire.send(leaves, [None, Send(tree["b"]), None])
    assert first[1] is second[0] is None
    return first[0].mean, second[1].mean, first[2].exact, first[0].sent

  run = Run(rounds, tree)
  a, b, c, sent = run.found
  assert_replicas_equal((a, b, c))
  for mean, name in ((a, "a"), (b, "b"), (c, "c")):
    np.testing.assert_allclose(mean[0], tree[name].mean(0), 1e-6, 1e-6)
  np.testing.assert_array_equal(sent, tree["a"])
  assert len(hlo.collectives_in_order(run.text)) == 2
  assert run.num_bytes == [4 * (15 + 7 + 2)] * 3
  assert hlo.wire_bytes_outside_branches(run.text) == run.num_bytes[0]


def test_a_round_without_arrays_sends_nothing():
  def rounds(wire, tree):
    nothing, reply = wire.send([Leaf()] * 2, [None, Send()])
    assert nothing is reply.mean is None
    return reply.is_finite

  run = Run(rounds, draw(1))
  assert all(run.is_finite)
  assert run.num_bytes == [0, 0, 0]
  assert not hlo.collectives_in_order(run.text)


@pytest.mark.parametrize("code", [None, Bfloat16(), Blockwise(8, 8)])
def test_factors_are_sent_at_the_rank_in_use(code):
  """The first matrices may have 4 columns, the last at most 2."""
  leaves = [Leaf(cap=4), Leaf(cap=2), Leaf()]
  tree = [draw(3, 4, 10), draw(1, 2, 6, seed=1), draw(9, seed=2)]

  def rounds(wire, tree):
    columns = jnp.array(LADDER)[wire._level]
    ranks = [jnp.full(3, columns), jnp.minimum(columns, 2)[None], None]
    replies = wire.send(leaves, list(map(Send, tree, ranks)))
    return [(reply.mean, reply.sent) for reply in replies]

  run = Run(rounds, tree, code)
  tolerance = {None: 1e-6, Bfloat16(): 0.02}.get(code, 0.05)
  for level, rank in enumerate(LADDER):
    found = run.at(level)
    assert all(run.is_finite)
    # Rows beyond the rank do not count.
    wide, low = in_use(tree[0], [rank] * 3), in_use(tree[1], [min(rank, 2)])
    for (mean, sent), own in zip(found, (wide, low, tree[2]), strict=True):
      assert_replicas_equal(mean)
      np.testing.assert_allclose(mean[0], own.mean(0), 0, tolerance)
      # Nothing is lost, and nothing sent beyond the rank.
      np.testing.assert_allclose(sent.mean(0), mean[0], 1e-5, 1e-5)
      np.testing.assert_array_equal(mean[0][own.mean(0) == 0], 0)
  ladders = hlo.wire_bytes_by_rank(run.text)  # with a code of each half
  assert len(ladders) == (1 if code is None else 2)
  ladder = [sum(both) for both in zip(*ladders, strict=True)]
  assert ladder == run.num_bytes
  if code is None:
    assert ladder == [4 * (30 * r + 6 * min(r, 2) + 9) for r in LADDER]


def test_equal_lengths_need_no_branch():
  """Of a matrix whose cap is the smallest rank."""
  send = lambda x: [Send(x, jnp.ones(1, jnp.int32))]  # noqa: E731
  run = Run(
    lambda wire, x: wire.send([Leaf(1)], send(x))[0].mean, draw(1, 1, 6)
  )
  assert " conditional(" not in run.text
  assert run.num_bytes == [24] * 3


@pytest.mark.parametrize("where", ["exact", "values"])
def test_a_number_that_is_not_finite_makes_all_zero(where):
  tree = {"bad": draw(5), "good": draw(4, seed=1)}
  tree["bad"][2, 3] = np.inf

  def rounds(wire, tree):
    good, leaves = Send(tree["good"]), [Leaf()] * 2
    first = wire.send(leaves, [Send(**{where: tree["bad"]}), good])
    second = wire.send(leaves, [None, good])
    flags = jnp.stack([first[0].is_finite, second[1].is_finite])
    return [first[0].mean, first[0].exact, first[1].mean, second[1].mean], flags

  run = Run(rounds, tree)
  means, flags = run.found
  assert not any(run.is_finite) and not flags.any()
  for mean in jax.tree.leaves(means):
    np.testing.assert_array_equal(mean, 0)


def test_measured_numbers_may_be_not_finite():
  tree = {"measured": draw(2), "values": draw(4, seed=1)}
  tree["measured"][1, 0] = np.nan
  run = Run(lambda wire, tree: wire.send([Leaf()], [Send(**tree)]), tree)
  assert all(run.is_finite)
  (reply,) = run.found
  np.testing.assert_allclose(reply.mean[0], tree["values"].mean(0), 1e-6, 1e-6)
  assert np.isnan(reply.measured[0]).tolist() == [True, False]


def test_gathered_trees():
  """One collective of their bytes; replicas keep their order."""
  tree = {"x": draw(3, 2), "i": draw(5).astype(np.int32), "y": draw(4)}
  tree["b"], tree["h"] = tree["y"] > 0, tree["x"].astype(np.float16)

  def rounds(wire, tree):
    both = Send(gathered=(tree["x"], tree["i"]))
    others = Send(gathered=[tree["y"], tree["b"], tree["h"]])
    replies = wire.send([Leaf()] * 2, [both, others])
    return *replies[0].gathered, *replies[1].gathered

  run = Run(rounds, tree)
  for found, name in zip(run.found, "xiybh", strict=True):
    np.testing.assert_array_equal(found[1], tree[name])
    assert found.dtype == tree[name].dtype
  kinds = [one.kind for one in hlo.collectives_in_order(run.text)]
  assert kinds == ["all-gather"]
  assert run.num_bytes == [REPLICAS * (4 * 15 + 4 + 2 * 6) // 2] * 3
  assert hlo.wire_bytes_outside_branches(run.text) == run.num_bytes[0]


@pytest.mark.parametrize(
  "code", [None, Bfloat16(), Blockwise(4, 16), Levels(16)]
)
@pytest.mark.slow
def test_counts_what_the_wire_sends(code):
  tree = {"factors": in_use(draw(2, 4, 10), [1, 1]), "plain": draw(9)}

  def rounds(wire, tree):
    leaves = [Leaf(cap=4), Leaf()]
    ranks, plain = jnp.ones(2, jnp.int32), tree["plain"]
    sends = [Send(tree["factors"], ranks), Send(plain, exact=plain[:3])]
    replies = wire.send(leaves, sends)
    more = Send(gathered=plain, measured=plain)
    return replies + wire.send(leaves, [more, Send(plain)])

  run = Run(rounds, tree, code=code)
  counting = CountingWire(REPLICAS, LADDER, code)
  local = jax.tree.map(lambda x: x[0], tree)
  counted = jax.eval_shape(functools.partial(rounds, counting), local)
  assert counting.num_bytes.tolist() == run.num_bytes
  chex.assert_trees_all_equal_shapes_and_dtypes(
    counted, jax.tree.map(lambda x: x[0], run.found)
  )
