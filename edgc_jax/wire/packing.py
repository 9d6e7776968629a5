"""Packs factors whose ranks differ into one buffer of static length.

Factors are stacks of rows [k, width, height], one row for each column of P or
Q. Matrix i uses its first r_i rows. The ranks are numbers in the graph, the
shapes are not, so rows in use are packed end to end:

  | matrix 0: r_0 rows | matrix 1: r_1 rows | ... | zeros |

One buffer holds any ranks with sum_i r_i height_i <= length. Each matrix is
written at its full width where its first row belongs, and the next matrix
overwrites the rows beyond its rank: copies of static size, and no index per
value.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def in_use(rows: jax.Array, ranks: jax.Array, other: Any = 0.0) -> jax.Array:
  """Returns the first rows of each matrix, and `other` beyond its rank.

  Args:
    rows: [k, width, ...].
    ranks: int32 [k].
    other: A number, or an array like `rows`.
  """
  is_used = jnp.arange(rows.shape[1]) < ranks[:, None]
  return jnp.where(is_used.reshape(*is_used.shape, *[1] * (rows.ndim - 2)),
                   rows, other)  # fmt: skip


def pack(
  factors: Sequence[jax.Array], ranks: Sequence[jax.Array], length: int
) -> jax.Array:
  """Packs the rows in use of all matrices end to end.

  Args:
    factors: Stacks of factors, float32 [k, width, height] each; rows beyond the
      rank are zero.
    ranks: int32 [k] for each stack, at most its width.
    length: Values in the buffer, at least the sum of rank times height.

  Returns:
    float32 [length]; zeros after the last row.
  """
  # Room for the rows of the last matrix beyond its rank.
  spare = max(f.shape[1] * f.shape[2] for f in factors)
  buffer = jnp.zeros_like(factors[0], shape=(length + spare,))
  for factor, starts in zip(factors, _starts(factors, ranks), strict=True):

    def write(i: jax.Array, buffer: jax.Array, x: tuple = (factor, starts)):
      return jax.lax.dynamic_update_slice(buffer, x[0][i].ravel(), (x[1][i],))

    buffer = jax.lax.fori_loop(0, len(factor), write, buffer)
  return buffer[:length]


def unpack(
  buffer: jax.Array, factors: Sequence[jax.Array], ranks: Sequence[jax.Array]
) -> list[jax.Array]:
  """Restores the stacks of factors from a buffer: the reverse of `pack`.

  Args:
    buffer: float32 [length], from `pack` with the same shapes and ranks.
    factors: Arrays of the shapes to return.
    ranks: int32 [k] for each stack.

  Returns:
    float32 [k, width, height] each; rows beyond the rank are zero.
  """
  spare = max(f.shape[1] * f.shape[2] for f in factors)
  buffer = jnp.pad(buffer, (0, spare))
  stacks = []
  for factor, own, starts in zip(
    factors, ranks, _starts(factors, ranks), strict=True
  ):

    def read(start: jax.Array, size: int = factor[0].size) -> jax.Array:
      return jax.lax.dynamic_slice(buffer, (start,), (size,))

    rows = jax.lax.map(read, starts).reshape(factor.shape)
    stacks.append(in_use(rows, own))
  return stacks


def _starts(
  factors: Sequence[jax.Array], ranks: Sequence[jax.Array]
) -> list[jax.Array]:
  """Returns the position of each matrix in the buffer, int32 [k] per stack."""
  sizes = [r * f.shape[2] for f, r in zip(factors, ranks, strict=True)]
  values = jnp.concatenate(sizes)
  ends = np.cumsum([len(size) for size in sizes])[:-1]
  return jnp.split(jnp.cumsum(values) - values, ends)
