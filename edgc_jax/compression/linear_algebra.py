"""Linear algebra of stacks of matrices [k, m, n]: bases, products, sketches.

Bases. Every replica computes an orthonormal basis of a factor that all have
received, and the bases must agree although the replicas' processors round
differently. The factor is tall and may be rank-deficient. So the basis is a
continuous function of the factor: Gram-Schmidt in the order of the columns,
without eigenvectors, pivoting or decisions. It is computed by a Cholesky
factorisation of the Gram matrix, which batches over all matrices of a model,
in three passes (shifted Cholesky-QR, Fukaya et al. 2020, arXiv:1809.11085):

  U = Y D                       columns scaled to length one
  L L^T = (1 - s) U^T U + s I   s is the rounding error of a Gram matrix
  Y <- U L^-T

The QR factorisation is unique for any scales of the columns, so each pass
corrects the rounding of the pass before. Departures from the paper: columns are
scaled in each pass (every column of the result has length one even if the
spectrum is wider than float32's precision); the shift preserves lengths; it
does not grow with the number of rows, because Gram matrices are summed over
blocks of rows; and a column that is mostly rounding noise is damped.

Sketches. A few values per matrix measure the norm of the mean residual. The
norm of one replica's residual E_i = M_i - P Q_i^T says little, since most of
E_i differs between replicas and cancels in their mean. The error of the update
is that mean:

  z_g = sum_(j in g) v_j (u^T mean_i E_i)_j,    E |z|^2 = |mean_i E_i|^2

with random signs u and v, new at each step and the same on all replicas, and
g one of `SKETCH_VALUES` groups of columns. z is linear, so it is averaged with
the factors. If the residual has many directions, the relative standard
deviation of |z|^2 is about (2 / SKETCH_VALUES)^(1/2); the mean over a window
is more precise.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from edgc_jax.plan.plan import SKETCH_VALUES

# Three passes make a column orthogonal of which a share of 1e-5 is new; two
# passes need a share of 1e-3.
_PASSES = 3
# The shift s per column, about 8 roundings: with many equal columns the Gram
# matrix may need as much to remain positive definite.
_SHIFT = 8 * float(np.finfo(np.float32).eps)
_BLOCK = 128  # rows per partial sum of a Gram matrix
# A column is damped if less than this share of its length is new, orthogonal
# to the columns before it. Rounding is 1e-7 of a column, so a new part of 1e-5
# is known to 1 %.
_DAMPED = 1e-5
# Below the share _FADING a column may be vanishing: it gets up to _NEW of a new
# direction, more the smaller the share.
_FADING, _NEW = 1e-2, 1e-3
# Length given to a zero column, in units of the largest number received.
_LEAST = 1e-6
Stacks = Sequence[jax.Array]
Signs = tuple[jax.Array, jax.Array]


class Basis(NamedTuple):
  """An orthonormal basis of each of several stacks of matrices."""

  columns: list[jax.Array]  # float32 [k, m, r]
  # float32 [k, r], in [0, 1]: share of each column's length that is orthogonal
  # to the columns before it
  shares: list[jax.Array]


def orthonormalize(stacks: Stacks) -> Basis:
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
    stacks: float32 arrays [k_i, m_i, r_i]; ranks and heights may differ.

  Returns:
    Columns of the same shapes, P^T P = diag(d^2) to about 1e-6, and t. The
    first c columns span the first c columns of Y. A column of zeros stays zero.

  >>> y = jnp.array([[[3.0, 1.0], [4.0, 1.0], [0.0, 0.0]]])
  >>> orthonormalize([y]).columns[0].round(3) + 0.0
  Array([[[ 0.6,  0.8],
          [ 0.8, -0.6],
          [ 0. ,  0. ]]], dtype=float32)
  """
  columns = list(stacks)
  shares = [jnp.ones_like(y[:, 0]) for y in stacks]
  for i in range(_PASSES):
    columns, lengths, pivots = _one_pass(columns)
    # In the first pass the lengths are the columns' own scales, not shares.
    lengths = lengths if i else [jnp.sign(length) for length in lengths]
    shares = [
      s * x * pivot for s, x, pivot in zip(shares, lengths, pivots, strict=True)
    ]
  # p_i <- d(t_i) p_i
  columns = [
    y * jnp.minimum(1.0, share / _DAMPED)[:, None]
    for y, share in zip(columns, shares, strict=True)
  ]
  return Basis(columns, shares)


def unit_columns(factors: Stacks) -> list[jax.Array]:
  """Scales columns to length one and makes them nearly orthogonal.

  The age and the scale of a column of Q must not count in the search for P.
  One pass of Gram-Schmidt is enough: replicas need not agree to the last digit
  here, since all continue from the mean of their products.

  Args:
    factors: float32 arrays [k_i, n_i, r_i].

  Returns:
    Arrays of the same shapes; columns of zeros stay zero.
  """
  return _one_pass(factors)[0]


def revive(
  factors: Stacks, shares: Stacks, key: jax.Array, unit: jax.Array
) -> list[jax.Array]:
  """Adds a small random direction to columns that are vanishing.

    q_c + 1e-3 max(0, 1 - t_c / 1e-2) max(|q_c|, 1e-6 unit) n_c

  A gradient of low rank leaves columns of zeros or of rounding noise, and
  M^T M 0 = 0 would keep them zero permanently. With n_c added, such a column
  points along n_c when it is next scaled to length one, on every replica.
  A column with a share t_c of at least 1e-2 stays as it is.

  The n_c are random signs of rows times Walsh functions, which do as well as
  Gaussian numbers (Halko et al. 2011, arXiv:0909.4061, on structured random
  matrices) and need one draw per row.

  Args:
    factors: float32 arrays [k_i, n_i, r_i].
    shares: t of each, [k_i, r_i], from the basis P that Q was computed with.
    key: Draws the n_c; equal on all replicas.
    unit: float32 [], the largest number received, positive.

  Returns:
    Arrays of the same shapes.
  """
  if not factors:
    return []

  def mix(factors: list[jax.Array]) -> list[jax.Array]:
    revived = []
    directions = _random_directions(key, factors)
    for q, share, new in zip(factors, shares, directions, strict=True):
      largest = jnp.max(jnp.abs(q), axis=1)
      size = jnp.maximum(largest * q.shape[1] ** 0.5, _LEAST * unit)
      weight = _NEW * jnp.maximum(0.0, 1.0 - share / _FADING) * size
      revived.append(q + weight[:, None] * new)
    return revived

  # At the threshold both branches give the same result, so replicas on either
  # side of it do not diverge.
  fading = jnp.stack([jnp.any(share < _FADING) for share in shares])
  return jax.lax.cond(jnp.any(fading), mix, lambda q: q, list(factors))


def _one_pass(stacks: Stacks) -> tuple[list, list, list]:
  """Returns U L^-T, the columns' lengths [k, r], and the diagonals of L."""
  if not stacks:
    return [], [], []
  scaled = [_unit(y) for y in stacks]
  inverses, pivots = _inverse_roots([_gram(u) for u, _ in scaled])
  columns = [u @ t for (u, _), t in zip(scaled, inverses, strict=True)]
  return columns, [length for _, length in scaled], pivots


def _unit(y: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Returns columns scaled to length one, or zero, and their lengths [k, r]."""
  # By the largest entry first, so squares of 1e-18 and 1e+30 stay in range.
  largest = jnp.max(jnp.abs(y), axis=1, keepdims=True)
  y = y / jnp.where(largest > 0, largest, 1.0)
  length = jnp.sqrt(jnp.sum(jnp.square(y), axis=1, keepdims=True))
  return y / jnp.where(length > 0, length, 1.0), (length * largest)[:, 0]


def _gram(u: jax.Array) -> jax.Array:
  """Returns U^T U of [k, m, r], summed over blocks of rows.

  One long sum of equal terms always rounds the same way, by more than the shift
  compensates: with parallel columns of few distinct values the matrix would not
  be positive definite.
  """
  count, height, width = u.shape
  blocks = -(-height // _BLOCK)
  u = jnp.pad(u, ((0, 0), (0, blocks * _BLOCK - height), (0, 0)))
  parts = u.reshape(count * blocks, _BLOCK, width)
  grams = transposed_product(parts, parts)
  return jnp.sum(grams.reshape(count, blocks, width, width), axis=1)


def _inverse_roots(grams: Sequence[jax.Array]) -> tuple[list, list]:
  """Returns L^-T of Gram matrices of unit columns, and the pivots L_ii.

  One call per size would take fewer operations. But XLA's CPU backend may start
  independent calls at once, each of which blocks a thread of the pool until its
  parts are done; a small pool then deadlocks.
  """
  size = max(g.shape[-1] for g in grams)
  gram = jnp.concatenate(
    [jnp.pad(g, ((0, 0), *[(0, size - g.shape[-1])] * 2)) for g in grams]
  )
  eye = jnp.zeros_like(gram) + jnp.eye(size, dtype=gram.dtype)
  # L L^T = (1 - s) U^T U + s I; zero and padded columns have ones, too.
  root = jax.lax.linalg.cholesky(
    jnp.where(eye > 0, 1.0, (1.0 - _SHIFT * size) * gram),
    symmetrize_input=False,
  )
  inverse = jax.lax.linalg.triangular_solve(
    root, eye, left_side=True, lower=True
  )
  # If rounding still exceeds the shift, the basis of that matrix is zero for
  # a step, and the residual keeps the whole gradient.
  is_sound = jnp.all(jnp.isfinite(inverse), (1, 2), keepdims=True)
  inverse = jnp.where(is_sound, jnp.swapaxes(inverse, 1, 2), 0.0)
  pivot = jnp.diagonal(root, axis1=-2, axis2=-1)
  pivot = jnp.where(is_sound[:, 0], pivot, 0.0)
  inverses, pivots, start = [], [], 0
  for g in grams:
    stop, own = start + g.shape[0], g.shape[-1]
    inverses.append(inverse[start:stop, :own, :own])
    pivots.append(pivot[start:stop, :own])
    start = stop
  return inverses, pivots


def _random_directions(key: jax.Array, stacks: Stacks) -> list[jax.Array]:
  """Returns random columns of length one, [k, n, r] for each stack."""
  # One draw for all stacks: one generator per stack compiles slowly.
  rows = [k * n for k, n, _ in (stack.shape for stack in stacks)]
  draw = jax.random.rademacher(key, (sum(rows),), jnp.float32)
  directions = []
  for signs, stack in zip(
    jnp.split(draw, np.cumsum(rows[:-1])), stacks, strict=True
  ):
    count, height, width = stack.shape
    row = jax.lax.broadcasted_iota(jnp.uint32, (height, width), 0)
    column = jax.lax.broadcasted_iota(jnp.uint32, (height, width), 1)
    is_odd = jax.lax.population_count(row & column) & 1
    walsh = (1.0 - 2.0 * is_odd.astype(jnp.float32)) * height**-0.5
    directions.append(signs.reshape(count, height, 1) * walsh)
  return directions


def transposed_product(a: jax.Array, b: jax.Array) -> jax.Array:
  """Returns A^T B, computed as (B^T A)^T.

  A^T B reads A along its columns. The kernel of XLA's CPU backend for that is
  two to four times slower than the others, so the factor B, which is much
  smaller than the gradient A, is transposed instead.

  Args:
    a: float32 [k, m, n].
    b: float32 [k, m, r], the smaller one.

  Returns:
    float32 [k, n, r].

  >>> a = jnp.arange(6.0).reshape(1, 3, 2)
  >>> transposed_product(a, jnp.ones((1, 3, 1)))[0]
  Array([[6.],
         [9.]], dtype=float32)
  """
  # Without barriers the compiler rewrites this to the slower form.
  transposed = jax.lax.optimization_barrier(jnp.swapaxes(b, 1, 2))
  product = jax.lax.optimization_barrier(transposed @ a)
  return jnp.swapaxes(product, 1, 2)


def transposed_products(
  stacks: Stacks, factors: Stacks, rows: Stacks
) -> tuple[list[jax.Array], list[jax.Array]]:
  """Returns A^T B and u A of each stack, in one pass over A.

  Args:
    stacks: A, float32 [k, m, n] each.
    factors: B, float32 [k, m, r] each.
    rows: u, float32 [k, 1, m] each.

  Returns:
    Lists of float32 [k, n, r] and of [k, 1, n].

  >>> a = jnp.arange(6.0).reshape(1, 3, 2)
  >>> b, u = jnp.ones((1, 3, 1)), jnp.array([[[1.0, 0.0, 0.0]]])
  >>> transposed_products([a], [b], [u])[1][0]
  Array([[[0., 1.]]], dtype=float32)
  """
  both = [
    transposed_product(a, jnp.append(b, jnp.swapaxes(u, 1, 2), axis=2))
    for a, b, u in zip(stacks, factors, rows, strict=True)
  ]
  return [x[:, :, :-1] for x in both], [
    jnp.swapaxes(x[:, :, -1:], 1, 2) for x in both
  ]


def products(stacks: Stacks, factors: Stacks) -> list[jax.Array]:
  """Returns M B, float32 [k, m, r], of [k, m, n] and [k, n, r] each."""
  return [m @ b for m, b in zip(stacks, factors, strict=True)]


def outer_products(p: Stacks, q: Stacks) -> list[jax.Array]:
  """Returns P Q^T, float32 [k, m, n], of [k, m, r] and [k, n, r] each."""
  return [a @ jnp.swapaxes(b, 1, 2) for a, b in zip(p, q, strict=True)]


def largest_magnitude(arrays: Stacks) -> jax.Array:
  """Returns the largest |x| of all entries; 1 if it is zero or not finite."""
  largest = jnp.max(jnp.stack([jnp.max(jnp.abs(x)) for x in arrays]))
  return jnp.where((largest > 0) & jnp.isfinite(largest), largest, 1.0)


def gaussian_columns(key: jax.Array, shape: tuple[int, int, int]) -> jax.Array:
  """Draws Gaussian columns of expected length one; float32 [k, n, r]."""
  return jax.random.normal(key, shape, jnp.float32) * shape[1] ** -0.5


def energies(stacks: Stacks, unit: jax.Array) -> list[jax.Array]:
  """Returns the sum of squares of each matrix, in units of unit^2; [k] each."""
  return [jnp.sum(jnp.square(m / unit), axis=(1, 2)) for m in stacks]


def draw_signs(key: jax.Array, stacks: Sequence[jax.Array]) -> list[Signs]:
  """Draws signs u [k, 1, m] and v [k, n] for each stack [k, m, n]."""
  if not stacks:
    return []
  shapes = [
    shape
    for k, m, n in (stack.shape for stack in stacks)
    for shape in ((k, 1, m), (k, n))
  ]
  # One draw for all stacks: one generator per stack compiles slowly.
  sizes = [int(np.prod(shape)) for shape in shapes]
  draw = jax.random.rademacher(key, (sum(sizes),), jnp.float32)
  parts = jnp.split(draw, np.cumsum(sizes[:-1]))
  signs = [part.reshape(s) for part, s in zip(parts, shapes, strict=True)]
  return list(zip(signs[::2], signs[1::2], strict=True))


def sketches(
  stacks: Sequence[jax.Array], signs: Sequence[Signs]
) -> list[jax.Array]:
  """Returns the sketch z of each stack, float32 [k, SKETCH_VALUES]."""
  return [
    _in_groups((u @ m)[:, 0] * v)
    for m, (u, v) in zip(stacks, signs, strict=True)
  ]


def residual_sketches(
  rows: Sequence[jax.Array],
  p: Sequence[jax.Array],
  q: Sequence[jax.Array],
  signs: Sequence[Signs],
) -> list[jax.Array]:
  """Returns the sketch z of M - P Q^T of each stack, without forming it.

  Args:
    rows: u^T M, float32 [k, 1, n] each.
    p: float32 [k, m, r] each.
    q: float32 [k, n, r] each.
    signs: From `draw_signs`.

  Returns:
    float32 [k, SKETCH_VALUES] each.
  """
  return [
    _in_groups((row - (u @ a) @ jnp.swapaxes(b, 1, 2))[:, 0] * v)
    for row, a, b, (u, v) in zip(rows, p, q, signs, strict=True)
  ]


def _in_groups(row: jax.Array) -> jax.Array:
  """Sums [k, n] over `SKETCH_VALUES` groups of columns."""
  row = jnp.pad(row, ((0, 0), (0, -row.shape[1] % SKETCH_VALUES)))
  return jnp.sum(row.reshape(len(row), SKETCH_VALUES, -1), axis=2)
