"""Orthonormal bases for batches of tall, possibly rank-deficient matrices.

Householder QR is slow on every backend and refuses bf16; Cholesky-QR fails on
the nearly rank-deficient factors of real gradients. The eigenvectors of the
[r, r] Gram matrix are cheap, and say which directions are only rounding
noise. Grams are one batch, whatever the matrices' heights, so a whole model
costs one small eigenproblem call.
"""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from edgc_jax.products import transposed_product

# Directions whose squared length is below this fraction of the largest are
# rounding noise in a float32 Gram matrix.
_NOISE_FLOOR = 1e-6
# Of columns beside entries of size one: squares of it are in float32's range.
_SHORTEST = 1e-15
# Newton-Schulz converges quadratically from eigenvalues near one; four steps
# bring an error of 0.3 below float32 resolution.
_NEWTON_SCHULZ_STEPS = 4

Stacks = Sequence[jax.Array]


def principal_columns(
  stacks: Stacks, *, equalized: bool = False
) -> tuple[list[jax.Array], list]:
  """Rotates columns to be orthogonal, longest first, and scales them to one.

  With the Gram matrix G = Y^T Y = V w V^T, returns Y V w^(-1/2). Exact for
  well-conditioned input only: see `orthonormalize` for the second pass.

  Args:
    stacks: float32 arrays [k_i, m_i, r_i]; ranks and heights may differ.
    equalized: Whether all columns count as if they had one length, down to
      1e-15 of the largest entry; shorter ones are noise.

  Returns:
    The arrays, noise directions set to zero, and per array a bool [k_i, r_i]
    that tells which columns are live.
  """
  scaled = [_in_range(y) for y in stacks]
  rotation = _equalized_rotation if equalized else _principal_rotation
  rotations, alive = _batched(rotation, [_gram(y) for y in scaled])
  return [y @ v for y, v in zip(scaled, rotations, strict=True)], alive


def orthonormalize(stacks: Stacks) -> list[jax.Array]:
  """Orthonormal bases of the column spaces, most energetic column first.

  A second, symmetric pass Y (Y^T Y)^(-1/2) removes what rounding left over;
  being symmetric it disturbs the order of the columns least, so that the
  first columns stay the best ones to keep when a rank falls.

  Args:
    stacks: float32 arrays [k_i, m_i, r_i].

  Returns:
    Arrays of the same shapes, with P^T P = diag(1 or 0) to about 1e-6: a
    column is zero where the input had no such direction.

  >>> y = jnp.array([[[3.0, 3.0], [4.0, 4.0], [0.0, 0.0]]])
  >>> orthonormalize([y])[0].round(3) + 0.0
  Array([[[0.6, 0. ],
          [0.8, 0. ],
          [0. , 0. ]]], dtype=float32)
  """
  columns, _ = principal_columns(stacks)
  roots, _ = _batched(_inverse_root, [_gram(y) for y in columns])
  return [y @ root for y, root in zip(columns, roots, strict=True)]


def principal_axes(stacks: Stacks) -> list[jax.Array]:
  """Rotates columns to be orthogonal, longest first; lengths stay.

  Args:
    stacks: float32 arrays [k_i, m_i, r_i].

  Returns:
    Y V with Y^T Y = V w V^T, of the same shapes.
  """
  rotations, _ = _batched(_rotation, [_gram(_in_range(y)) for y in stacks])
  return [y @ v for y, v in zip(stacks, rotations, strict=True)]


def _in_range(y: jax.Array) -> jax.Array:
  """Matrices by their largest entry: squares of 1e-18 and 1e+30 work then."""
  largest = jnp.max(jnp.abs(y), (-2, -1), keepdims=True)
  return y / jnp.where(largest > 0, largest, 1.0)


def _gram(y: jax.Array) -> jax.Array:
  return transposed_product(y, y)


def _principal_rotation(gram: jax.Array) -> tuple[jax.Array, jax.Array]:
  """V w^(-1/2), largest w first and zero for noise, and which are live."""
  v, w = _rotation(gram)
  live = w > jnp.maximum(_NOISE_FLOOR * w[:, :1], 0.0)
  scale = jnp.where(live, jax.lax.rsqrt(jnp.where(live, w, 1.0)), 0.0)
  return v * scale[:, None, :], live


def _equalized_rotation(gram: jax.Array) -> tuple[jax.Array, jax.Array]:
  """The same for columns scaled to length one, where they have any."""
  squares = jnp.diagonal(gram, axis1=-2, axis2=-1)
  has_length = squares > _SHORTEST**2
  scale = jnp.where(
    has_length, jax.lax.rsqrt(jnp.where(has_length, squares, 1.0)), 0.0
  )
  v, live = _principal_rotation(gram * scale[:, :, None] * scale[:, None, :])
  return scale[:, :, None] * v, live


def _rotation(gram: jax.Array) -> tuple[jax.Array, jax.Array]:
  """V, largest w first, and the w."""
  w, v = jnp.linalg.eigh(gram)  # sorted upwards
  return v[:, :, ::-1], w[:, ::-1]


def _inverse_root(gram: jax.Array) -> tuple[jax.Array, jax.Array]:
  """G^(-1/2) for G near the identity, but for columns to be left out."""
  # A direction that was mostly noise has lost its unit length: drop it.
  keep = jnp.diagonal(gram, axis1=-2, axis2=-1) > 0.5
  mask = keep[:, :, None] & keep[:, None, :]
  gram = jnp.where(mask, gram, 0.0)
  three = 3.0 * jnp.eye(gram.shape[-1], dtype=gram.dtype)
  root = jnp.broadcast_to(three / 3.0, gram.shape)
  for _ in range(_NEWTON_SCHULZ_STEPS):
    root = 0.5 * (root @ (three - gram @ (root @ root)))
  return jnp.where(mask, root, 0.0), keep


def _batched(
  fn: Callable[[jax.Array], tuple[jax.Array, jax.Array]],
  grams: Sequence[jax.Array],
) -> tuple[list, list]:
  """Calls `fn` once for all Gram matrices, smaller ones padded with zeros.

  One call for each size would be fewer operations. But XLA's CPU backend may
  start calls that do not depend on each other at once; each waits for its
  parts with a thread of the pool, and a small pool is soon all waiting.
  """
  if not grams:
    return [], []
  size = max(g.shape[-1] for g in grams)
  padded = [jnp.pad(g, ((0, 0), *[(0, size - g.shape[-1])] * 2)) for g in grams]
  first, second = fn(jnp.concatenate(padded))
  firsts, seconds, start = [], [], 0
  for gram in grams:
    stop, own = start + gram.shape[0], gram.shape[-1]
    firsts.append(first[start:stop, :own, :own])
    seconds.append(second[start:stop, :own])
    start = stop
  return firsts, seconds
