"""Packing keeps values and their places, at any ranks."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from edgc_jax.wire import packing

SHAPES = ((3, 4, 5), (1, 6, 7), (2, 3, 2))  # count, width, height


def factors(seed):
  random = np.random.default_rng(seed)
  return [
    jnp.asarray(random.standard_normal(shape), jnp.float32) for shape in SHAPES
  ]


def split(ranks):
  ranks = jnp.asarray(ranks, jnp.int32)
  return [ranks[:3], ranks[3:4], ranks[4:]]


def in_use(values, ranks):
  """Returns the values with zeros in columns beyond the rank."""
  return [
    jnp.where((jnp.arange(value.shape[1]) < own[:, None])[:, :, None], value, 0)
    for value, own in zip(values, split(ranks), strict=True)
  ]


@functools.partial(jax.jit, static_argnames="length")
def pack(values, ranks, length):
  return packing.pack(in_use(values, ranks), split(ranks), length)


@jax.jit
def unpack(buffer, values, ranks):
  return packing.unpack(buffer, values, split(ranks))


RANKS = (
  (4, 4, 4, 6, 3, 3),
  (0, 0, 0, 0, 0, 0),
  (1, 0, 4, 2, 0, 3),
  (0, 3, 0, 6, 3, 0),
  (2, 2, 2, 0, 1, 1),
)


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("spare", [0, 9])
def test_unpacking_inverts_packing(ranks, spare):
  values = factors(seed=0)
  expected, columns, place = [], [], 0
  for value in map(np.asarray, values):
    kept = np.zeros_like(value)
    for i in range(len(value)):
      kept[i, : ranks[place]] = value[i, : ranks[place]]
      columns.append(value[i, : ranks[place]].ravel())
      place += 1
    expected.append(kept)
  columns = np.concatenate(columns)
  buffer = pack(values, np.array(ranks), len(columns) + spare)
  np.testing.assert_array_equal(buffer[: len(columns)], columns)
  np.testing.assert_array_equal(buffer[len(columns) :], 0)
  received = unpack(buffer, values, np.array(ranks))
  chex.assert_trees_all_equal(received, expected)


def test_random_ranks():
  random = np.random.default_rng(0)
  widths = [4, 4, 4, 6, 3, 3]
  values = factors(seed=1)
  length = 3 * 5 * 4 + 7 * 6 + 2 * 2 * 3
  for _ in range(50):
    ranks = np.array([random.integers(w + 1) for w in widths])
    received = unpack(pack(values, ranks, length), values, ranks)
    chex.assert_trees_all_equal(received, in_use(values, ranks))
