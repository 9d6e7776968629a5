"""A channel keeps the order of collectives, and counts their bytes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.collective_order import unordered
from helpers.meshes import AXIS

from edgc_jax.measure import hlo
from edgc_jax.wire.channel import Channel

REPLICAS = 4


def compiled(fn, *args):
  """Compiles a function of a channel and of what is the same on all devices."""
  mapped = jax.pmap(
    lambda index, *args: fn(Channel(AXIS), index.astype(jnp.float32), *args),
    AXIS, in_axes=(0, *[None] * len(args)), devices=jax.devices()[:REPLICAS],
  )  # fmt: skip
  index = np.arange(REPLICAS)
  program = mapped.lower(index, *args).compile()
  return program.as_text(), lambda *args: program(index, *args)


def before_and_after(channel, own, is_due):
  """Sends before a conditional, in one branch of it, and after it."""
  gathered = channel.gather(own[None])
  parts = channel.exchange_parts(own + jnp.zeros((REPLICAS, 3)))
  mean = channel.cond(is_due, lambda: channel.mean(own + jnp.zeros(5)))
  total = channel.total(own)
  return gathered, parts, mean, total, channel.num_bytes


def test_each_collective_waits_for_the_one_before():
  """Also those side by side, which two hosts may compile in two orders."""
  text, _ = compiled(before_and_after, True)
  assert unordered(text) == []
  kinds = [one.kind for one in hlo.collectives_in_order(text)]
  assert kinds == ["all-gather", "all-to-all", "all-reduce"]


@pytest.mark.parametrize("is_due", [False, True])
def test_bytes_are_those_of_the_branch(is_due):
  _, run = compiled(before_and_after, True)
  gathered, parts, mean, total, num_bytes = run(is_due)
  np.testing.assert_array_equal(gathered[1, :, 0], np.arange(REPLICAS))
  np.testing.assert_array_equal(parts[2, :, 0], np.arange(REPLICAS))
  np.testing.assert_array_equal(mean, np.full((REPLICAS, 5), 1.5 * is_due))
  np.testing.assert_array_equal(total, np.full(REPLICAS, 6.0))
  # Half of 4 numbers, half of 12, the branch's 5, and 1.
  assert set(num_bytes.tolist()) == {4 * (2 + 6 + 5 * is_due + 1)}


def test_branches_in_a_branch():
  def nested(channel, own, level):
    def inner():
      sums = [lambda n=n: channel.total(own + jnp.zeros(n))[0] for n in (1, 7)]
      return channel.switch(level - 1, sums) + channel.mean(own)

    found = channel.switch(jnp.minimum(level, 1), [lambda: 0.0 * own, inner])
    return found, channel.mean(own), channel.num_bytes

  text, run = compiled(nested, 1)
  assert unordered(text) == []
  for level, values in enumerate((0, 1 + 1, 7 + 1)):
    assert set(run(level)[2].tolist()) == {4 * (values + 1)}


def test_the_first_decides():
  """Flags are sent as numbers, so all have 4 bytes."""

  def decide(channel, own):
    return channel.from_first((own, own < 2)), channel.num_bytes

  (number, flag), num_bytes = compiled(decide)[1]()
  assert set(number.tolist()) == {0.0}
  assert flag.dtype == bool and flag.all()
  assert set(num_bytes.tolist()) == {8.0}


def test_one_device_decides_alone():
  def decide(own):
    channel = Channel(AXIS)
    return channel.from_first(own), channel.num_bytes

  _, num_bytes = jax.pmap(decide, AXIS, devices=jax.devices()[:1])(np.ones(1))
  assert num_bytes == 0
