"""Arrays of several types as one array of bytes, for one collective.

A collective takes a round trip or more, however little it sends.
"""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

Split = Callable[[jax.Array], list[jax.Array]]


def as_one(rows: Sequence[jax.Array]) -> tuple[jax.Array, Split]:
  """Joins arrays [m, n_i]; a single one of numbers is left as it is.

  Args:
    rows: Arrays of real numbers of whole bytes, or bool.

  Returns:
    uint8 [m, bytes], and a function from uint8 [N, bytes] to arrays [N, n_i] of
    the given types.
  """
  if len(rows) == 1 and rows[0].dtype != bool:
    return rows[0], lambda whole: [whole]
  joined = jnp.concatenate([_bytes_of(x) for x in rows], axis=1)
  ends = np.cumsum([x.shape[1] * x.dtype.itemsize for x in rows])[:-1]

  def split(whole: jax.Array) -> list[jax.Array]:
    pieces = jnp.split(whole, ends.tolist(), axis=1)
    return [
      _of_bytes(piece, x.dtype) for piece, x in zip(pieces, rows, strict=True)
    ]

  return joined, split


def _bytes_of(x: jax.Array) -> jax.Array:
  """Returns the bytes of each row, uint8 [m, bytes]."""
  x = x.astype(jnp.uint8) if np.issubdtype(x.dtype, np.bool_) else x
  return jax.lax.bitcast_convert_type(x, jnp.uint8).reshape(len(x), -1)


def _of_bytes(piece: jax.Array, dtype: np.dtype) -> jax.Array:
  """Reverses `_bytes_of`."""
  if np.issubdtype(dtype, np.bool_):
    return piece.astype(bool)
  if dtype.itemsize > 1:
    piece = piece.reshape(len(piece), -1, dtype.itemsize)
  return jax.lax.bitcast_convert_type(piece, dtype)
