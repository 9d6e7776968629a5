"""Caps of columns, and what is static about the leaves of a tree."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from edgc_jax.leaves.leaf import cap_of, joined, leaves_in, split_by_leaf
from edgc_jax.leaves.views import MatrixView
from edgc_jax.methods.low_rank import with_factors


def view_of(rows, cols, count=1):
  return MatrixView(count, rows, cols)


@pytest.mark.parametrize(
  "rows, cols, min_ratio, cap",
  [
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
  ],
)
def test_by_hand(rows, cols, min_ratio, cap):
  assert cap_of(view_of(rows, cols), min_ratio, 1) == cap
  assert cap_of(view_of(cols, rows), min_ratio, 1) == cap
  assert cap_of(view_of(rows, cols, 7), min_ratio, 1) == cap


def test_dense_below_the_least_rank():
  """A leaf has factors only if the smallest rank of the ladder may be."""
  for rows, cols, cap in ((20, 20, 5), (64, 64, 16), (30, 60, 10)):
    for least in range(1, 40):
      found = cap_of(view_of(rows, cols), 2.0, least)
      assert found == (cap if least <= cap else 0)


def test_without_a_ratio_the_smaller_side_is_the_cap():
  """Such leaves always have factors, even if they send more."""
  for sides in ((20, 30), (8, 4096), (5, 5)):
    for least in (1, 4, 8, 100):
      for ratio in (0.0, 0):
        assert cap_of(view_of(*sides), ratio, least) == min(sides)


def test_a_small_side_needs_fewer_columns_than_the_least_rank():
  """All of its columns are then enough, if they save enough."""
  assert cap_of(view_of(4, 4096), 0.9, 8) == 4
  assert cap_of(view_of(4, 4096), 1.0, 8) == 0


def test_nothing_to_compress():
  for view in (None, view_of(20, 20, 0), view_of(0, 0), view_of(0, 5)):
    for min_ratio in (0.0, 2.0):
      assert cap_of(view, min_ratio, 1) == 0


def test_any_ratio_is_kept_and_used():
  random = np.random.default_rng(0)
  for _ in range(300):
    m, n = (int(x) for x in random.integers(1, 200, 2))
    ratio = float(random.choice([0.3, 1.0, 1.5, 2.0, 4.0]))
    cap = cap_of(view_of(m, n), ratio, 1)
    assert cap <= min(m, n)
    assert m * n >= ratio * cap * (m + n)
    is_full = cap == min(m, n)
    assert is_full or m * n < ratio * (cap + 1) * (m + n)


TREE = {
  "bias": jnp.zeros(40),
  "stack": jnp.zeros((3, 48, 40), jnp.bfloat16),
  "tall": jax.ShapeDtypeStruct((96, 40), jnp.float32),
}


def test_leaves_of_a_tree():
  bias, stack, tall = leaves_in(TREE)
  assert [x.path for x in (bias, stack)] == ["['bias']", "['stack']"]
  assert (bias.view, stack.view) == (None, (3, 48, 40))
  assert (stack.dtype, stack.size) == (jnp.bfloat16, 3 * 48 * 40)
  assert [x.placement for x in (bias, stack, tall)] == ["own"] * 3
  assert (stack.sides, tall.sides) == ((40, 48), (40, 96))
  assert tall.is_tall
  assert not leaves_in(jnp.zeros((40, 96)))[0].is_tall


def test_columns_end_at_the_cap():
  bias, _, tall = with_factors(leaves_in(TREE), (4, 32), 2.0, None)
  assert [tall.columns(r) for r in (0, 4, 14, 32)] == [0, 4, 14, 14]
  assert tall.width == 14
  assert [bias.columns(r) for r in (0, 4, 32)] == [0, 0, 0]
  assert tall.is_compressed
  assert not bias.is_compressed


def test_a_leaf_is_dense_only_below_the_least_rank():
  tree = {"w": jnp.zeros((20, 20))}  # at most 5 columns
  for ranks, cap in (((8,), 0), ((8, 16), 0), ((4, 8), 5), ((4,), 5)):
    (leaf,) = with_factors(leaves_in(tree), ranks, 2.0, None)
    assert leaf.cap == cap
    assert leaf.is_compressed == (cap > 0)
    assert leaf.has_residual == (cap > 0)


def test_shared_leaves_have_no_matrices():
  placements = {"['stack']": "split", "['tall']": "shared"}
  place = lambda path, _: placements.get(path, "own")  # noqa: E731
  _, stack, tall = leaves_in(TREE, placement_fn=place)
  assert (stack.placement, stack.view) == ("split", (3, 48, 40))
  assert (tall.placement, tall.view) == ("shared", None)


def test_views_are_given_by_path_and_shape():
  view = lambda path, shape: (6, 24, 40) if "stack" in path else None  # noqa: E731
  _, stack, tall = leaves_in(TREE, view)
  assert (stack.view, tall.view) == (MatrixView(6, 24, 40), None)


def test_errors():
  with pytest.raises(TypeError, match=r"real floating.*int32 at \['a'\]"):
    leaves_in({"a": jnp.zeros(3, jnp.int32)})
  with pytest.raises(ValueError, match=r"`matrix_view` must keep.*5760"):
    leaves_in(TREE, lambda path, shape: (1, 48, 40) if len(shape) > 2 else None)
  with pytest.raises(ValueError, match=r"`placement` must return.*'mine'"):
    leaves_in(TREE, placement_fn=lambda path, shape: "mine")


def test_a_stack_of_equal_leaves_is_one_leaf():
  tree = {"a": jnp.zeros((3, 48, 40)), "b": jnp.zeros((48, 40))}
  leaves = with_factors(leaves_in(tree), (4,), 2.0, None)
  both = joined(leaves)
  assert both.view == (4, 48, 40)
  assert (both.shape, both.cap) == ((4, 48, 40), leaves[0].cap)


def test_arrays_over_matrices_are_split_by_leaf():
  _, stack, tall = leaves_in(TREE)
  parts = split_by_leaf((stack, tall), jnp.arange(4))
  assert [x.tolist() for x in parts] == [[0, 1, 2], [3]]
