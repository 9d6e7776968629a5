"""Packing keeps values and their places, at any ranks."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from edgc_jax.wire import packing

SHAPES = ((3, 4, 5), (1, 6, 7), (2, 3, 2))  # count, width, height
WIDTHS = (4, 4, 4, 6, 3, 3)
RANKS = [
  WIDTHS, (0,) * 6, (1, 0, 4, 2, 0, 3), (0, 3, 0, 6, 3, 0), (2, 2, 2, 0, 1, 1),
  *np.random.default_rng(0).integers(0, np.array(WIDTHS) + 1, (50, 6)),
]  # fmt: skip


@functools.partial(jax.jit, static_argnames="length")
def both(values, ranks, length):
  ranks = [ranks[:3], ranks[3:4], ranks[4:]]
  used = list(map(packing.in_use, values, ranks))
  buffer = packing.pack(used, ranks, length)
  return buffer, packing.unpack(buffer, values, ranks)


@pytest.mark.parametrize("spare", [0, 9])
def test_unpacking_inverts_packing(spare):
  """Values that stay are where NumPy puts them; the rest is zero."""
  random = np.random.default_rng(0)
  values = [random.standard_normal(shape, np.float32) for shape in SHAPES]
  most = sum(value.size for value in values) + spare
  for i, ranks in enumerate(RANKS):
    expected, rows = [value.copy() for value in values], []
    stacks = [matrix for value in expected for matrix in value]
    for matrix, rank in zip(stacks, ranks, strict=True):
      matrix[rank:] = 0
      rows.append(matrix[:rank].ravel())
    packed = np.concatenate(rows)
    # The tightest for some; each length is compiled.
    length = len(packed) + spare if i < 5 else most
    buffer, received = both(values, jnp.array(ranks, jnp.int32), length)
    np.testing.assert_array_equal(
      buffer, np.pad(packed, (0, length - len(packed)))
    )
    for found, value in zip(received, expected, strict=True):
      np.testing.assert_array_equal(found, value)
