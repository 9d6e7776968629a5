"""Caps of columns, and what is static about the leaves of a tree."""

import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized

from edgc_jax.leaves.leaf import cap_of, joined, leaves_in, split_by_leaf
from edgc_jax.leaves.views import MatrixView
from edgc_jax.methods.low_rank import with_factors


def view_of(rows, cols, count=1):
  return MatrixView(count, rows, cols)


class CapTest(parameterized.TestCase):
  @parameterized.parameters(
    (64, 64, 2.0, 16),
    (64, 64, 1.0, 32),
    (32, 64, 1.5, 14),  # 14.2
    (96, 40, 1.5, 18),  # 18.8
    (768, 3072, 2.0, 307),  # 307.2
    (50257, 768, 2.0, 378),
    # Exactly at the ratio: m n = 2 r (m + n).
    (256, 256, 2.0, 64),
    (30, 60, 2.0, 10),
    # Never more than the smaller side.
    (8, 4096, 0.5, 8),
    (64, 64, 0.1, 64),
  )
  def test_by_hand(self, rows, cols, min_ratio, cap):
    self.assertEqual(cap_of(view_of(rows, cols), min_ratio, 1), cap)
    self.assertEqual(cap_of(view_of(cols, rows), min_ratio, 1), cap)
    self.assertEqual(cap_of(view_of(rows, cols, 7), min_ratio, 1), cap)

  @parameterized.parameters((20, 20, 5), (64, 64, 16), (30, 60, 10))
  def test_dense_below_the_least_rank(self, rows, cols, cap):
    """A leaf has factors only if the smallest rank of the ladder may be."""
    for least in range(1, 40):
      found = cap_of(view_of(rows, cols), 2.0, least)
      self.assertEqual(found, cap if least <= cap else 0)

  @parameterized.parameters((20, 30), (8, 4096), (5, 5))
  def test_without_a_ratio_the_smaller_side_is_the_cap(self, rows, cols):
    """Such leaves always have factors, even if they send more."""
    for least in (1, 4, 8, 100):
      found = cap_of(view_of(rows, cols), 0.0, least)
      self.assertEqual(found, min(rows, cols))
      self.assertEqual(cap_of(view_of(rows, cols), 0, least), found)

  def test_a_small_side_needs_fewer_columns_than_the_least_rank(self):
    """All of its columns are then enough, if they save enough."""
    self.assertEqual(cap_of(view_of(4, 4096), 0.9, 8), 4)
    self.assertEqual(cap_of(view_of(4, 4096), 1.0, 8), 0)

  def test_nothing_to_compress(self):
    for view in (None, view_of(20, 20, 0), view_of(0, 0), view_of(0, 5)):
      for min_ratio in (0.0, 2.0):
        self.assertEqual(cap_of(view, min_ratio, 1), 0)

  def test_any_ratio_is_kept_and_used(self):
    random = np.random.default_rng(0)
    for _ in range(300):
      m, n = (int(x) for x in random.integers(1, 200, 2))
      ratio = float(random.choice([0.3, 1.0, 1.5, 2.0, 4.0]))
      cap = cap_of(view_of(m, n), ratio, 1)
      self.assertLessEqual(cap, min(m, n))
      self.assertGreaterEqual(m * n, ratio * cap * (m + n))
      is_full = cap == min(m, n)
      self.assertTrue(is_full or m * n < ratio * (cap + 1) * (m + n))


TREE = {
  "bias": jnp.zeros(40),
  "stack": jnp.zeros((3, 48, 40), jnp.bfloat16),
  "tall": jax.ShapeDtypeStruct((96, 40), jnp.float32),
}


class LeafTest(parameterized.TestCase):
  def test_leaves_of_a_tree(self):
    bias, stack, tall = leaves_in(TREE)
    self.assertEqual([x.path for x in (bias, stack)], ["['bias']", "['stack']"])
    self.assertEqual((bias.view, stack.view), (None, (3, 48, 40)))
    self.assertEqual((stack.dtype, stack.size), (jnp.bfloat16, 3 * 48 * 40))
    self.assertEqual([x.placement for x in (bias, stack, tall)], ["own"] * 3)
    self.assertEqual((stack.sides, tall.sides), ((40, 48), (40, 96)))
    self.assertTrue(tall.is_tall)
    self.assertFalse(leaves_in(jnp.zeros((40, 96)))[0].is_tall)

  def test_columns_end_at_the_cap(self):
    bias, _, tall = with_factors(leaves_in(TREE), (4, 32), 2.0, None)
    self.assertEqual([tall.columns(r) for r in (0, 4, 14, 32)], [0, 4, 14, 14])
    self.assertEqual(tall.width, 14)
    self.assertEqual([bias.columns(r) for r in (0, 4, 32)], [0, 0, 0])
    self.assertTrue(tall.is_compressed)
    self.assertFalse(bias.is_compressed)

  def test_a_leaf_is_dense_only_below_the_least_rank(self):
    tree = {"w": jnp.zeros((20, 20))}  # at most 5 columns
    for ranks, cap in (((8,), 0), ((8, 16), 0), ((4, 8), 5), ((4,), 5)):
      (leaf,) = with_factors(leaves_in(tree), ranks, 2.0, None)
      self.assertEqual(leaf.cap, cap)
      self.assertEqual(leaf.is_compressed, cap > 0)
      self.assertEqual(leaf.has_residual, cap > 0)

  def test_shared_leaves_have_no_matrices(self):
    placements = {"['stack']": "split", "['tall']": "shared"}
    place = lambda path, _: placements.get(path, "own")  # noqa: E731
    _, stack, tall = leaves_in(TREE, placement_fn=place)
    self.assertEqual((stack.placement, stack.view), ("split", (3, 48, 40)))
    self.assertEqual((tall.placement, tall.view), ("shared", None))

  def test_views_are_given_by_path_and_shape(self):
    view = lambda path, shape: (6, 24, 40) if "stack" in path else None  # noqa: E731
    _, stack, tall = leaves_in(TREE, view)
    self.assertEqual((stack.view, tall.view), (MatrixView(6, 24, 40), None))

  def test_errors(self):
    with self.assertRaisesRegex(TypeError, r"real floating.*int32 at \['a'\]"):
      leaves_in({"a": jnp.zeros(3, jnp.int32)})
    with self.assertRaisesRegex(ValueError, "`matrix_view` must keep.*5760"):
      leaves_in(
        TREE, lambda path, shape: (1, 48, 40) if len(shape) > 2 else None
      )
    with self.assertRaisesRegex(ValueError, "`placement` must return.*'mine'"):
      leaves_in(TREE, placement_fn=lambda path, shape: "mine")

  def test_a_stack_of_equal_leaves_is_one_leaf(self):
    tree = {"a": jnp.zeros((3, 48, 40)), "b": jnp.zeros((48, 40))}
    leaves = with_factors(leaves_in(tree), (4,), 2.0, None)
    both = joined(leaves)
    self.assertEqual(both.view, (4, 48, 40))
    self.assertEqual((both.shape, both.cap), ((4, 48, 40), leaves[0].cap))

  def test_arrays_over_matrices_are_split_by_leaf(self):
    _, stack, tall = leaves_in(TREE)
    parts = split_by_leaf((stack, tall), jnp.arange(4))
    self.assertEqual([x.tolist() for x in parts], [[0, 1, 2], [3]])


if __name__ == "__main__":
  absltest.main()
