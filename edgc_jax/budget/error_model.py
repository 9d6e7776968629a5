"""Models the error of a rank-r approximation, and the gain of every column.

For A [m, n] with independent entries of variance s^2 and m <= n,

  E |A - A_r|_F^2 = s^2 m n T(r / m; c),     c = m / n.

T follows from the Marchenko-Pastur law of the eigenvalues of A A^T. Weighted
by energy this law is exactly a semicircle, so with an angle phi in [0, pi]:

  kept fraction of ranks  rho(phi) = int_0^phi (2/pi) sin^2 t
                                     / (1 + c + 2 sqrt(c) cos t) dt
  lost energy fraction    T(phi) = (d - sin d cos d) / pi,   d = pi - phi

`loss_table` and `log_error` apply T to all matrices at one rank, for the rank
rule. `calibrated_gains` returns the squared error that each further column of a
matrix removes, for the allocation: the model, calibrated by a measured error.

Source: the model of arXiv:2511.10333 (g = sqrt(T)). The semicircle form is our
own derivation, tested against singular values in
tests/budget/error_model_test.py.
"""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.special import logsumexp

from edgc_jax.leaves.leaf import Leaf

# Lower bound of T: keeps logarithms finite at the full rank.
SMALLEST_LOSS = 1e-12
_NODES = 1025  # of the quadrature over phi


@functools.lru_cache(maxsize=256)
def lost_energy(rows: int, cols: int) -> np.ndarray:
  """Returns T(r / m; m / n) for every rank r = 0 ... min(rows, cols).

  Args:
    rows: Height of the matrix.
    cols: Width of the matrix.

  Returns:
    float64 [min(rows, cols) + 1], falling from 1 to `SMALLEST_LOSS`.

  >>> lost_energy(512, 2048)[[8, 32, 128, 384]].round(3).tolist()
  [0.966, 0.873, 0.573, 0.106]
  """
  small, large = sorted((rows, cols))
  aspect = small / large
  phi = np.linspace(0.0, np.pi, _NODES)
  # The integrand of rho(phi), integrated by the trapezoidal rule.
  if small == large:  # the general form is 0 / 0 at phi = pi
    density = (1.0 - np.cos(phi)) / np.pi
  else:
    denominator = 1.0 + aspect + 2.0 * np.sqrt(aspect) * np.cos(phi)
    density = (2.0 / np.pi) * np.sin(phi) ** 2 / denominator
  areas = 0.5 * (density[1:] + density[:-1]) * np.diff(phi)
  kept = np.concatenate([[0.0], np.cumsum(areas)])
  kept /= kept[-1]
  # phi from rho(phi) = r / m; d = pi - phi; T = (d - sin d cos d) / pi.
  at_rank = np.interp(np.arange(small + 1) / small, kept, phi)
  rest = np.pi - at_rank
  lost = (rest - np.sin(rest) * np.cos(rest)) / np.pi
  return np.maximum(lost, SMALLEST_LOSS)


def loss_table(matrices: Sequence[Leaf], rank_max: int) -> np.ndarray:
  """Tabulates ln T(r) of each matrix and rank, for `log_error`.

  Args:
    matrices: The leaf of each of K matrices.
    rank_max: The largest rank; matrices have at most their cap.

  Returns:
    float32 [K, rank_max + 1].
  """
  table = np.empty((len(matrices), rank_max + 1))
  for row, leaf in zip(table, matrices, strict=True):
    columns = np.minimum(np.arange(rank_max + 1), leaf.cap)
    row[:] = np.log(lost_energy(*leaf.sides)[columns])
  return table.astype(np.float32)


def log_error(
  table: np.ndarray, sizes: np.ndarray, variance: jax.Array
) -> jax.Array:
  """Returns ln of the modelled squared error of all matrices, by rank.

    ln G(r) = ln sum_i m_i n_i s_i^2 T_i(r)

  Args:
    table: float32 [K, rank_max + 1], ln T, from `loss_table`.
    sizes: float32 [K], m n.
    variance: float32 [K], s^2, mean square of each matrix's entries.

  Returns:
    float32 [rank_max + 1], falling; entry 0 is ln of the whole energy.
  """
  smallest = float(jnp.finfo(jnp.float32).tiny)
  weights = jnp.log(sizes) + jnp.log(jnp.maximum(variance, smallest))
  return logsumexp(table + weights[:, None], axis=0)


def calibrated_gains(
  variance: jax.Array,
  sides: np.ndarray,
  width: int,
  lost: jax.Array,
  ranks: jax.Array,
) -> jax.Array:
  """Returns the modelled gains, calibrated by a measured error.

  The entries of real gradients are correlated, so low ranks lose less than the
  model says. One number per matrix corrects for this: the stretch a for which
  the model gives the measured loss, T(a r / m) = lost. Then

    gain(c) = s^2 m n (T(a c / m) - T(a (c + 1) / m))

  Args:
    variance: float32 [K], s^2, mean square entry of gradient plus residual.
    sides: int [K, 2], both sides of each matrix, static.
    width: Number of columns to return.
    lost: float32 [K], measured share of the energy that was not sent.
    ranks: int32 [K], at least 1, ranks at which it was measured.

  Returns:
    float32 [K, width].
  """
  tables = _loss_tables(sides)
  indices = jnp.arange(tables.shape[1], dtype=jnp.float32)
  rank_for = jax.vmap(lambda loss, t: jnp.interp(-loss, -t, indices))
  # At most the full rank, where nothing is lost: tables are longer than m.
  shorter = np.min(sides, axis=1)
  stretch = jnp.minimum(rank_for(lost, jnp.asarray(tables)), shorter) / ranks
  at = stretch[:, None] * jnp.arange(width + 1)
  interpolated = jax.vmap(lambda r, t: jnp.interp(r, indices, t))
  sizes = np.prod(np.asarray(sides, np.float32), axis=1)
  left = interpolated(at, jnp.asarray(tables))
  return -jnp.diff((variance * sizes)[:, None] * left)


def _loss_tables(sides: np.ndarray) -> np.ndarray:
  """Tabulates T by rank for each matrix, float32 [K, largest m + 1].

  Rows of smaller matrices repeat their last value.
  """
  longest = int(np.min(sides, axis=1).max(initial=0))
  tables = np.empty((len(sides), longest + 1), np.float32)
  for row, (m, n) in zip(tables, sides.tolist(), strict=True):
    curve = lost_energy(m, n)
    row[:] = curve[np.minimum(np.arange(longest + 1), len(curve) - 1)]
  return tables
