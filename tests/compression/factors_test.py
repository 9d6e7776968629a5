"""Packing keeps values and their places, at any ranks."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

from edgc_jax.compression import factors as packed
from edgc_jax.compression import linear_algebra

SHAPES = ((3, 4, 5), (1, 6, 7), (2, 3, 2))  # count, width, height


def factors(seed):
  random = np.random.default_rng(seed)
  return [
    jnp.asarray(random.standard_normal(shape), jnp.float32) for shape in SHAPES
  ]


def split(ranks):
  ranks = jnp.asarray(ranks, jnp.int32)
  return [ranks[:3], ranks[3:4], ranks[4:]]


def live(values, ranks):
  """Returns the values with zeros in columns beyond the rank."""
  return [
    jnp.where((jnp.arange(value.shape[1]) < own[:, None])[:, :, None], value, 0)
    for value, own in zip(values, split(ranks), strict=True)
  ]


@functools.partial(jax.jit, static_argnames="length")
def pack(values, ranks, length):
  return packed.pack(live(values, ranks), split(ranks), length)


@jax.jit
def unpack(buffer, values, ranks):
  return packed.unpack(buffer, values, split(ranks))


RANKS = (
  (4, 4, 4, 6, 3, 3),
  (0, 0, 0, 0, 0, 0),
  (1, 0, 4, 2, 0, 3),
  (0, 3, 0, 6, 3, 0),
  (2, 2, 2, 0, 1, 1),
)


class PackingTest(parameterized.TestCase):
  @parameterized.product(ranks=RANKS, spare=[0, 9])
  def test_unpacking_inverts_packing(self, ranks, spare):
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

  def test_random_ranks(self):
    random = np.random.default_rng(0)
    widths = [4, 4, 4, 6, 3, 3]
    values = factors(seed=1)
    length = 3 * 5 * 4 + 7 * 6 + 2 * 2 * 3
    for _ in range(50):
      ranks = np.array([random.integers(w + 1) for w in widths])
      received = unpack(pack(values, ranks, length), values, ranks)
      chex.assert_trees_all_equal(received, live(values, ranks))


def stack_of(classes, ranks, seed=0):
  """Returns a stack of matrices [4, 24, 40] in classes of width."""
  random = np.random.default_rng(seed)
  draw = lambda *shape: jnp.asarray(  # noqa: E731
    random.standard_normal(shape), jnp.float32
  )
  shape = (len(ranks), 24, 40)
  return packed.Stack(
    leaf=0, gradient=draw(*shape), residual=draw(*shape),
    factor=draw(len(ranks), 40, 16), ranks=jnp.array(ranks, jnp.int32),
    classes=classes,
  )  # fmt: skip


class ClassesTest(parameterized.TestCase):
  """A matrix in its class has the result of the full width."""

  @parameterized.parameters([[16, 1, 4, 5]], [[0, 0, 16, 8]], [[8, 8, 8, 8]])
  def test_factors(self, ranks):
    results = []
    for classes in ((16,), (4, 8, 12, 16)):
      stack = stack_of(classes, ranks)
      rows = jnp.where(
        (jnp.arange(16) < stack.ranks[:, None])[:, :, None],
        jnp.swapaxes(stack.factor, 1, 2),
        0.0,
      )
      (p,) = packed.map_rows(
        [stack],
        [rows],
        linear_algebra.unit_columns,
        lambda tall, q, m, more: (
          linear_algebra.product(tall, q, m) * (1 + more)
        ),
        [(jnp.arange(4.0),)],
      )
      results.append(p)
    self.assertEqual(results[0].shape, (4, 16, 24))
    chex.assert_trees_all_close(*results, rtol=1e-4, atol=1e-4)
    for own, rank in zip(results[1], ranks, strict=True):
      np.testing.assert_array_equal(own[rank:], 0)

  @parameterized.parameters(
    [[16, 1, 4, 5]], [[0, 0, 16, 8]], [[3, 1, 4, 2]], [[8, 8, 5, 1]],
    [[0, 0, 0, 0]],
  )  # fmt: skip
  def test_matrices(self, ranks):
    results = []
    for classes in ((16,), (4, 8, 12, 16)):
      stack = stack_of(classes, ranks)
      live = (jnp.arange(16) < stack.ranks[:, None])[:, :, None]
      p = jnp.where(live, 0.1 * jnp.ones((4, 16, 24)), 0.0)
      q = jnp.where(live, jnp.swapaxes(stack.factor, 1, 2), 0.0)
      results += packed.map_matrices(
        [stack],
        [(p, q, 2 * q)],
        linear_algebra.outer_products,
        lambda mean, left, g, e: (mean, left),
      )
    chex.assert_trees_all_close(*results, rtol=1e-4, atol=1e-4)


if __name__ == "__main__":
  absltest.main()
