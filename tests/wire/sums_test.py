"""Sums by halves: equal to sums, and what the compiler makes of them."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.meshes import AXIS

from edgc_jax.wire import averages, sums
from edgc_jax.wire.channel import Channel
from edgc_jax.wire.codes import Blockwise

# An instruction that returns at least a thousand sums of rows.
SUM_OF_ROWS = re.compile(r"f32\[\d{4,}[\d,]*\]\S* reduce\(.*dimensions=\{0\}")


@pytest.mark.parametrize("count", [1, 2, 3, 5, 6, 7, 8, 12, 33])
def test_of_rows(count):
  x = np.arange(count * 6).reshape(count, 2, 3)
  np.testing.assert_array_equal(sums.of_rows(jnp.asarray(x)), x.sum(0))


@pytest.mark.parametrize("count", [1, 2, 16, 24, 31, 32, 48, 64, 96, 100, 4096])
def test_of_last(count):
  x = np.arange(2 * count).reshape(2, count)
  found = sums.of_last(jnp.asarray(x, jnp.float32))
  np.testing.assert_array_equal(found, x.sum(-1, keepdims=True))


def test_means_of_replicas_are_not_reductions():
  """A reduction of two rows of two million numbers takes 55 ms, halves 1 ms."""
  x = jnp.zeros((2, 64, 1024))

  def program(mean):
    fn = jax.pmap(mean, axis_name=AXIS, devices=jax.devices()[:2])
    return fn.lower(x).compile().as_text()

  def average(value):
    keys = jax.random.key(0)
    return averages.average(
      [value], Channel(AXIS), [Blockwise(8, 128)], keys
    ).mean

  assert not SUM_OF_ROWS.search(program(average))
  text = program(lambda value: jnp.mean(value.reshape(2, -1), axis=0))
  assert SUM_OF_ROWS.search(text), "the pattern finds them"
