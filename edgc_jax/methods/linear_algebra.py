"""Linear algebra of single matrices and their factors.

A factor is an array of rows [r, m]: row c is the c-th column of P or of Q. So
the first columns of a factor are contiguous, and no product reads along them.

Bases. Every replica computes an orthonormal basis of a factor that all have
received, and the bases must agree although the replicas' processors round
differently. The factor is tall and may be rank-deficient. So the basis is a
continuous function of the factor: Gram-Schmidt in the order of the columns,
without eigenvectors, pivoting or decisions. It is computed by a Cholesky
factorisation of the Gram matrix in two or three passes (shifted Cholesky-QR,
Fukaya et al. 2020, arXiv:1809.11085). With the columns as the rows of Y:

  U = D Y                       rows scaled to length one
  L L^T = (1 - s) U U^T + s I   s is the rounding error of a Gram matrix
  Y <- L^-1 U

The factorisation is unique for any scales of the columns, so each pass corrects
the rounding of the pass before. Departures from the paper: columns are scaled
in each pass (every column of the result has length one even if the spectrum is
wider than float32's precision); the shift preserves lengths; it does not grow
with the length of the columns, because Gram matrices are summed over blocks;
and a column that is mostly rounding noise is damped.

Precision. Accelerators may round the operands of a product. Bases and updates
have the highest precision, or a replica would subtract another P Q^T than it
applies. M Q, M^T P, and u^T M of a sketch have not: what they lose stays in the
residual, and in the error that the sketch measures.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np

# Three passes make a column orthogonal of which a share of 1e-5 is new. Two are
# enough if each column was nearly orthogonal to those before it when the second
# began. Then the third changes roundings only, so hosts need not agree on it.
_PASSES = 3
_NEAR = 0.999  # share of a column that is orthogonal to those before it
# The shift s per column, about 8 roundings: with many equal columns the Gram
# matrix may need as much to remain positive definite.
_SHIFT = 8 * float(np.finfo(np.float32).eps)
_BLOCK = 128  # entries of a column per partial sum of a Gram matrix
# A column is damped if less than this share of its length is new, orthogonal
# to the columns before it. Rounding is 1e-7 of a column, so a new part of 1e-5
# is known to 1 %.
_DAMPED = 1e-5
# Below the share _FADING a column may be vanishing: it gets up to _NEW of a new
# direction, more the smaller the share.
_FADING, _NEW = 1e-2, 1e-3
# Length given to a zero column, in units of the largest number received.
_LEAST = 1e-6
_EXACT = jax.lax.Precision.HIGHEST
_Function = TypeVar("_Function", bound=Callable[..., Any])


def _traced_once(function: _Function) -> _Function:
  """Lets JAX trace a function once for all arrays of a shape.

  Tracing these functions for every leaf took much of the time of `advise`.
  They are inlined, so programs are as they would be without.
  """
  return cast(_Function, jax.jit(function, inline=True))


class Basis(NamedTuple):
  """An orthonormal basis."""

  rows: jax.Array  # float32 [r, m], the columns
  # float32 [r], in [0, 1]: share of each column's length that is orthogonal to
  # the columns before it
  shares: jax.Array


@_traced_once
def orthonormalize(rows: jax.Array) -> Basis:
  """Orthonormalises columns in their order, by Gram-Schmidt.

    p_i = d(t_i) (y_i - sum_(j < i) p_j p_j^T y_i) / |...|
    d(t) = min(1, t / 1e-5)

  with t_i the share of y_i's length that is orthogonal to the columns before
  it. The factor d is 1 unless t_i is close to rounding noise; then the column
  is short and has little weight, since hosts cannot agree on its direction.
  From equal input, hosts whose rounding differs by e get p_i that differ by
  e / t_i. If Y = M B, the length of the update p_i p_i^T M is about t_i times
  the length of Y, so updates still differ by about e only. The exception is a
  new direction of M that B hardly contains: updates then differ by e / t_i for
  one step, until Q contains the direction.

  Args:
    rows: float32 [r, m], the columns y_i.

  Returns:
    Columns of the same shape, P P^T = diag(d^2) to about 1e-6, and t. The
    first c columns span the first c columns of Y. A column of zeros stays zero.

  >>> y = jnp.array([[3.0, 4.0, 0.0], [1.0, 1.0, 0.0]])
  >>> orthonormalize(y).rows.round(3) + 0.0
  Array([[ 0.6,  0.8,  0. ],
         [ 0.8, -0.6,  0. ]], dtype=float32)
  """
  rows, size = _in_range(rows)
  # A column of zeros has no share, but must not stop the factorisation.
  start = (0, Basis(rows, jnp.sign(size)), jnp.sign(size))

  def is_needed(carry: tuple) -> jax.Array:
    done, _, pivots = carry
    return (done < 2) | (done < _PASSES) & (jnp.min(pivots) < _NEAR)

  def one_more(carry: tuple) -> tuple:
    done, (rows, shares), _ = carry
    rows, new = _one_pass(rows)
    # In the first pass lengths are the columns' own scales, not shares.
    lengths = jnp.where(done > 0, new.lengths, 1.0)
    return done + 1, Basis(rows, shares * lengths * new.pivots), new.pivots

  _, (rows, shares), _ = jax.lax.while_loop(is_needed, one_more, start)
  # p_i <- d(t_i) p_i
  return Basis(rows * jnp.minimum(1.0, shares / _DAMPED)[:, None], shares)


@_traced_once
def unit_columns(rows: jax.Array) -> jax.Array:
  """Scales columns to length one and makes them nearly orthogonal.

  The age and the scale of a column of Q must not count in the search for P.
  One pass of Gram-Schmidt is enough: replicas need not agree to the last digit
  here, since all continue from the mean of their products.

  Args:
    rows: float32 [r, n], the columns.

  Returns:
    An array of the same shape; columns of zeros stay zero.
  """
  rows, _ = _in_range(rows)
  return _one_pass(rows)[0]


def revive(
  rows: jax.Array, shares: jax.Array, signs: jax.Array, unit: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """Adds a small random direction to columns that are vanishing.

    q_c + 1e-3 max(0, 1 - t_c / 1e-2) max(|q_c|, 1e-6 unit) n_c

  A gradient of low rank leaves columns of zeros or of rounding noise, and
  M^T M 0 = 0 would keep them zero permanently. With n_c added, such a column
  points along n_c when it is next scaled to length one, on every replica.
  A column with a share t_c of at least 1e-2 stays as it is.

  The n_c are random signs times Walsh functions, which do as well as Gaussian
  numbers (Halko et al. 2011, arXiv:0909.4061) and need one draw per entry.

  Args:
    rows: float32 [r, n], the columns q_c.
    shares: t, [r], from the basis P; 1 for columns not in use.
    signs: Random signs, [n]; equal on all replicas.
    unit: float32 [], the largest number received, positive.

  Returns:
    Columns of the same shape, and |Q|^2 before, in units of unit^2.
  """
  energies = jnp.square(rows / unit).sum(1)
  size = jnp.maximum(jnp.sqrt(energies), _LEAST) * unit
  # Zero at the threshold, so replicas on either side of it do not diverge.
  weight = _NEW * jnp.maximum(0.0, 1.0 - shares / _FADING) * size
  new = signs * jax.lax.rsqrt(jnp.square(signs).sum()) * _walsh(*rows.shape)
  return rows + weight[:, None] * new, energies.sum()


class _New(NamedTuple):
  """The new part of each column in one pass."""

  lengths: jax.Array  # float32 [r], before the pass
  pivots: jax.Array  # float32 [r], share that is orthogonal to those before


def _one_pass(rows: jax.Array) -> tuple[jax.Array, _New]:
  """Returns L^-1 U, the columns' lengths, and the pivots."""
  # U = D Y; scaling the Gram matrix instead would scale its rounding, too.
  lengths = jnp.sqrt(_row_sums(jnp.square(rows)))
  unit = rows / jnp.where(lengths > 0, lengths, 1.0)
  inverse, pivots = _inverse_root(_gram(unit))
  # Y <- L^-1 U
  rows = jnp.matmul(inverse, unit, precision=_EXACT)
  return rows, _New(lengths[:, 0], pivots)


def _row_sums(rows: jax.Array) -> jax.Array:
  """Sums each row over blocks, [r, 1].

  A product, since XLA's CPU backend is slow to reduce rows.
  """
  ones = jnp.ones_like(rows, shape=(_BLOCK, 1))
  return jnp.sum(jnp.matmul(_blocks(rows), ones, precision=_EXACT), axis=1)


def _blocks(rows: jax.Array) -> jax.Array:
  """Cuts rows [r, m] into [r, blocks, 128], padded with zeros.

  One long sum of equal terms always rounds the same way, by more than the shift
  compensates: with parallel columns of few distinct values the Gram matrix
  would not be positive definite.
  """
  width, length = rows.shape
  blocks = -(-length // _BLOCK)
  padded = jnp.pad(rows, ((0, 0), (0, blocks * _BLOCK - length)))
  return padded.reshape(width, blocks, _BLOCK)


def _in_range(rows: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Divides columns by about their sum of |y|, so squares stay in range."""
  # The sum of larger numbers might not.
  size = _row_sums(jnp.minimum(jnp.abs(rows), 2.0**100))
  return rows / jnp.where(size > 0, size, 1.0), size[:, 0]


def _gram(rows: jax.Array) -> jax.Array:
  """Returns Y Y^T of [r, m], summed over blocks of entries."""
  parts = _blocks(rows)
  grams = jnp.einsum("rbx,sbx->brs", parts, parts, precision=_EXACT)
  return jnp.sum(grams, axis=0)


def _inverse_root(gram: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Returns L^-1 of the Gram matrix of unit columns, and the pivots L_ii."""
  size = gram.shape[-1]
  eye = jnp.zeros_like(gram) + jnp.eye(size, dtype=gram.dtype)
  # L L^T = (1 - s) U U^T + s I; columns of zeros have ones, too.
  root = jax.lax.linalg.cholesky(
    jnp.where(eye > 0, 1.0, (1.0 - _SHIFT * size) * gram),
    symmetrize_input=False,
  )
  inverse = jax.lax.linalg.triangular_solve(
    root, eye, left_side=True, lower=True
  )
  # If rounding still exceeds the shift, the basis of that matrix is zero for
  # a step, and the residual keeps the whole gradient.
  is_sound = jnp.isfinite(root[-1, -1])
  inverse = jnp.where(is_sound, inverse, 0.0)
  return inverse, jnp.where(is_sound, jnp.diagonal(root), 0.0)


def _walsh(width: int, length: int) -> jax.Array:
  """Returns different Walsh functions, 1 and -1, [width, length]."""
  row = jax.lax.broadcasted_iota(jnp.uint32, (width, length), 0)
  entry = jax.lax.broadcasted_iota(jnp.uint32, (width, length), 1)
  is_odd = jax.lax.population_count(row & entry) & 1
  return 1.0 - 2.0 * is_odd.astype(jnp.float32)


def product(is_tall: bool, q: jax.Array, m: jax.Array) -> jax.Array:
  """Returns the rows of M Q, or if M [m, n] is tall, of M^T Q.

  >>> m = jnp.arange(6.0).reshape(3, 2)
  >>> product(False, jnp.ones((1, 2)), m), product(True, jnp.ones((1, 3)), m)
  (Array([[1., 5., 9.]], dtype=float32), Array([[6., 9.]], dtype=float32))
  """
  if is_tall:
    return q @ m
  return jax.lax.dot_general(m, q, (((1,), (1,)), ((), ()))).T


def outer_product(is_tall: bool, p: jax.Array, q: jax.Array) -> jax.Array:
  """Returns P Q^T of the rows of P and Q, or Q P^T if M is tall."""
  left, right = (q, p) if is_tall else (p, q)
  # Without a barrier the compiler uses its slower kernel for A^T B.
  left = jax.lax.optimization_barrier(left.T)
  return jnp.matmul(left, right, precision=_EXACT)


@_traced_once
def unit_of(x: jax.Array) -> jax.Array:
  """Returns the power of two below the largest |x|, a unit for energies.

  Numbers are exact in it, and their squares in range. 1 if the largest is zero
  or not finite.
  """
  largest = jnp.max(jnp.abs(x), initial=0.0)
  exponent = jnp.uint32(0x7F800000)  # the bits of float32's exponent
  bits = jax.lax.bitcast_convert_type(largest, jnp.uint32) & exponent
  # Neither the unit nor its inverse may be denormal.
  unit = jnp.minimum(jax.lax.bitcast_convert_type(bits, jnp.float32), 2.0**126)
  return jnp.where(
    (largest > 0) & jnp.isfinite(largest) & (unit > 0), unit, 1.0
  )


def energy(m: jax.Array, unit: jax.Array) -> jax.Array:
  """Returns the sums of squares of matrices [k, m, n], in units of unit^2."""
  return jnp.sum(jnp.square(m * (1.0 / unit)), axis=(-2, -1))
