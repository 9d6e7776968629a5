"""Models the error of a rank-r approximation, and the gain of every column.

For A [m, n] with independent entries of variance s^2 and m <= n,

  E |A - A_r|_F^2 = s^2 m n T(r / m; c),     c = m / n.

T follows from the Marchenko-Pastur law of the eigenvalues of A A^T. Weighted
by energy this law is exactly a semicircle, so with an angle phi in [0, pi]:

  kept fraction of ranks  rho(phi) = int_0^phi (2/pi) sin^2 t
                                     / (1 + c + 2 sqrt(c) cos t) dt
  lost energy fraction    T(phi) = (d - sin d cos d) / pi,   d = pi - phi

`loss_table` and `log_error` apply T to all matrices at one rank, for the rank
rule. The `*_gains` functions return the squared error that each further column
of a matrix removes, for the allocation: from the measured energies of columns,
from the model, or from the model calibrated by a measured error.

Source: the model of arXiv:2511.10333 (g = sqrt(T)). The semicircle form is our
own derivation, tested against singular values in
tests/adaptation/error_model_test.py.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.special import logsumexp

from edgc_jax.plan.plan import Plan

# Lower bound of T: keeps logarithms finite at the full rank.
SMALLEST_LOSS = 1e-12


@functools.lru_cache(maxsize=256)
def lost_energy(rows: int, cols: int, num_nodes: int = 1025) -> np.ndarray:
  """Returns T(r / m; m / n) for every rank r = 0 ... min(rows, cols).

  Args:
    rows: Height of the matrix.
    cols: Width of the matrix.
    num_nodes: Number of nodes of the quadrature over phi.

  Returns:
    float64 [min(rows, cols) + 1], falling from 1 to `SMALLEST_LOSS`.

  >>> lost_energy(512, 2048)[[8, 32, 128, 384]].round(3).tolist()
  [0.966, 0.873, 0.573, 0.106]
  """
  small, large = sorted((rows, cols))
  aspect = small / large
  phi = np.linspace(0.0, np.pi, num_nodes)
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


def loss_table(plan: Plan) -> np.ndarray:
  """Tabulates ln T(r) of each matrix and rank, for `log_error`.

  A matrix that is sent dense at a rank loses nothing: T is `SMALLEST_LOSS`.

  Args:
    plan: The matrices, the ladder and the least ratio.

  Returns:
    float32 [K, rank_max + 1].
  """
  rank_max = max(plan.ladder)
  ranks = np.arange(rank_max + 1)
  table = np.empty((len(plan.matrices), rank_max + 1))
  all_save = plan.saves(plan.sides[:, :1], plan.sides[:, 1:], ranks)
  for row, saves, (m, n) in zip(
    table, all_save, plan.sides.tolist(), strict=True
  ):
    lost = lost_energy(m, n)[np.minimum(ranks, min(m, n))]
    row[:] = np.log(np.where(saves, lost, SMALLEST_LOSS))
  return table.astype(np.float32)


def log_error(
  table: np.ndarray, sizes: np.ndarray, variance: jax.Array
) -> jax.Array:
  """Returns ln of the modelled squared error of all matrices, by rank.

    ln G(r) = ln sum_i m_i n_i s_i^2 T_i(r)

  Args:
    table: float32 [K, rank_max + 1], ln T, from `loss_table`.
    sizes: float32 [K], m n, `Plan.sizes`.
    variance: float32 [K], s^2, mean square of each matrix's entries.

  Returns:
    float32 [rank_max + 1], falling; entry 0 is ln of the whole energy.
  """
  smallest = float(jnp.finfo(jnp.float32).tiny)
  weights = jnp.log(sizes) + jnp.log(jnp.maximum(variance, smallest))
  return logsumexp(table + weights[:, None], axis=0)


def energy_gains(
  columns: jax.Array, energy: jax.Array, ranks: jax.Array
) -> jax.Array:
  """Returns the measured gain of each column, with a geometric tail.

  With P orthonormal, the squared column norms of Q are the squared singular
  values of P Q^T. The j-th column beyond the measured rank gains q rho^j, where
  q is the gain of the last measured column. With rho = E / (E + q) the tail
  sums to the energy E that was not sent:

    sum_(j > 0) q rho^j = E    for    rho = E / (E + q)

  If the measured columns fell by a smaller factor per column over their second
  half, rho is this factor.

  Args:
    columns: float32 [K, width], mean squared norms of the columns of Q; entries
      beyond the rank are ignored.
    energy: float32 [K], mean squared norm of the matrices.
    ranks: int32 [K], at least 1, ranks at which both were measured.

  Returns:
    float32 [K, width].
  """
  width = columns.shape[1]
  index = jnp.arange(width)
  live = index < ranks[:, None]
  # Means over steps need not fall from column to column, so sort them; columns
  # beyond the rank come last.
  columns = -jnp.sort(jnp.where(live, -columns, jnp.inf), axis=1)
  at = lambda i: jnp.take_along_axis(columns, i[:, None], 1)[:, 0]  # noqa: E731
  last, middle = at(ranks - 1), at((ranks - 1) // 2)
  lost = energy - jnp.sum(jnp.where(live, columns, 0.0), axis=1)
  # rho = E / (E + q), or the slope of the second half if that is less.
  ratio = jnp.maximum(lost, 0.0) / jnp.maximum(lost + last, 1e-30)
  steps = jnp.maximum(ranks - 1 - (ranks - 1) // 2, 1).astype(jnp.float32)
  slope = (last / jnp.maximum(middle, 1e-30)) ** (1.0 / steps)
  ratio = jnp.where(ranks > 2, jnp.minimum(ratio, slope), ratio)
  beyond = jnp.maximum(index - ranks[:, None] + 1, 0)
  tail = last[:, None] * ratio[:, None] ** beyond
  return jnp.where(live, columns, tail)


def model_gains(
  variance: jax.Array, sides: np.ndarray, width: int
) -> jax.Array:
  """Returns the modelled gains of matrices with independent entries.

    gain(c) = s^2 m n (T(c / m) - T((c + 1) / m))

  Args:
    variance: float32 [K], s^2, mean square of the entries.
    sides: int [K, 2], both sides of each matrix, static.
    width: Number of columns to return.

  Returns:
    float32 [K, width].
  """
  return -jnp.diff(
    _model_loss(variance, sides, np.arange(width + 1, dtype=np.float32))
  )


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
  return -jnp.diff(_model_loss(variance, sides, at))


def _model_loss(
  variance: jax.Array, sides: np.ndarray, ranks: jax.Array | np.ndarray
) -> jax.Array:
  """Returns the modelled squared error at real-valued ranks.

  Args:
    variance: float32 [K], s^2.
    sides: int [K, 2], both sides of each matrix.
    ranks: float32 [width + 1] or [K, width + 1].

  Returns:
    float32 [K, width + 1], s^2 m n T(r / m).
  """
  tables = jnp.asarray(_loss_tables(sides))
  ranks = jnp.broadcast_to(ranks, (len(sides), ranks.shape[-1]))
  indices = jnp.arange(tables.shape[1], dtype=jnp.float32)
  lost = jax.vmap(lambda r, t: jnp.interp(r, indices, t))(ranks, tables)
  sizes = np.prod(np.asarray(sides, np.float32), axis=1)
  return (variance * sizes)[:, None] * lost


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
