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


def test_any_ratio_is_kept_and_used():
  random = np.random.default_rng(0)
  sides = [*random.integers(1, 200, (300, 2)), (256, 256), (30, 60), (8, 4096)]
  for m, n in sides:
    ratio = float(random.choice([0.3, 1.0, 1.5, 2.0, 4.0]))
    cap = cap_of(view_of(int(m), int(n)), ratio, 1)
    assert cap <= min(m, n)
    assert m * n >= ratio * cap * (m + n)
    is_full = cap == min(m, n)
    assert is_full or m * n < ratio * (cap + 1) * (m + n)


def test_dense_below_the_least_rank():
  """A leaf has factors only if the smallest rank of the ladder may be."""
  for rows, cols, cap in ((20, 20, 5), (64, 64, 16), (30, 60, 10)):
    for least in range(1, 40):
      found = cap_of(view_of(rows, cols), 2.0, least)
      assert found == (cap if least <= cap else 0)
  # Without a ratio the smaller side is the cap: such leaves have factors.
  for sides in ((20, 30), (8, 4096), (5, 5)):
    for least in (1, 4, 8, 100):
      assert cap_of(view_of(*sides), 0.0, least) == min(sides)
  # A small side needs fewer columns than the least rank, if they save enough.
  assert cap_of(view_of(4, 4096), 0.9, 8) == 4
  assert cap_of(view_of(4, 4096), 1.0, 8) == 0
  for view in (None, view_of(20, 20, 0), view_of(0, 0), view_of(0, 5)):
    assert [cap_of(view, ratio, 1) for ratio in (0.0, 2.0)] == [0, 0]


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


def test_views_and_placements_are_given_by_path_and_shape():
  """Shared leaves have no matrices."""
  placements = {"['stack']": "split", "['tall']": "shared"}
  place = lambda path, _: placements.get(path, "own")  # noqa: E731
  view = lambda path, shape: {"['stack']": (6, 24, 40)}.get(path)  # noqa: E731
  _, stack, tall = leaves_in(TREE, placement_fn=place)
  assert (stack.placement, stack.view) == ("split", (3, 48, 40))
  assert (tall.placement, tall.view) == ("shared", None)
  _, stack, tall = leaves_in(TREE, view)
  assert (stack.view, tall.view) == (MatrixView(6, 24, 40), None)


def test_errors():
  with pytest.raises(TypeError, match=r"real floating.*int32 at \['a'\]"):
    leaves_in({"a": jnp.zeros(3, jnp.int32)})
  with pytest.raises(ValueError, match=r"`matrix_view` must keep.*5760"):
    leaves_in(TREE, lambda path, shape: (1, 48, 40) if len(shape) > 2 else None)
  with pytest.raises(ValueError, match=r"`placement` must return.*'mine'"):
    leaves_in(TREE, placement_fn=lambda path, shape: "mine")


def test_leaves_are_joined_and_split():
  leaves = leaves_in({"a": jnp.zeros((3, 48, 40)), "b": jnp.zeros((48, 40))})
  leaves = with_factors(leaves, (4,), 2.0, None)
  both = joined(leaves)
  assert both.view == both.shape == (4, 48, 40)
  assert both.cap == leaves[0].cap
  parts = split_by_leaf(leaves, jnp.arange(4))
  assert [x.tolist() for x in parts] == [[0, 1, 2], [3]]
