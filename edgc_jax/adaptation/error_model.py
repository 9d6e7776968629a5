"""How much of a random matrix a rank-r approximation loses.

For A [m, n] with independent entries of variance s^2 and m <= n,

  E |A - A_r|_F^2 = s^2 m n T(r / m; c),     c = m / n.

T follows from the Marchenko-Pastur law of the eigenvalues of A A^T. Weighted
by energy that law is exactly a semicircle, so with an angle phi in [0, pi]:

  kept fraction of ranks  rho(phi) = int_0^phi (2/pi) sin^2 t
                                     / (1 + c + 2 sqrt(c) cos t) dt
  lost energy fraction    T(phi) = (d - sin d cos d) / pi,   d = pi - phi

Source: the model of arXiv:2511.10333 (g = sqrt(T)); the semicircle form is
our own derivation, tested against singular values in tests/spectrum_test.py.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.special import logsumexp

from edgc_jax.plan.plan import Plan

# Keeps logarithms finite where nothing is lost.
SMALLEST_LOSS = 1e-12


@functools.lru_cache(maxsize=256)
def lost_energy(rows: int, cols: int, num_nodes: int = 1025) -> np.ndarray:
  """T(r / m; m / n) for every rank r = 0 ... min(rows, cols).

  Args:
    rows: Height of the matrix.
    cols: Width of the matrix.
    num_nodes: Nodes of the quadrature over phi.

  Returns:
    float64 [min(rows, cols) + 1], falling from 1 to `SMALLEST_LOSS`.

  >>> lost_energy(512, 2048)[[8, 32, 128, 384]].round(3).tolist()
  [0.966, 0.873, 0.573, 0.106]
  """
  small, large = sorted((rows, cols))
  aspect = small / large
  phi = np.linspace(0.0, np.pi, num_nodes)
  if small == large:  # the general form is 0 / 0 at phi = pi
    density = (1.0 - np.cos(phi)) / np.pi
  else:
    denominator = 1.0 + aspect + 2.0 * np.sqrt(aspect) * np.cos(phi)
    density = (2.0 / np.pi) * np.sin(phi) ** 2 / denominator
  areas = 0.5 * (density[1:] + density[:-1]) * np.diff(phi)
  kept = np.concatenate([[0.0], np.cumsum(areas)])
  kept /= kept[-1]
  at_rank = np.interp(np.arange(small + 1) / small, kept, phi)
  rest = np.pi - at_rank
  lost = (rest - np.sin(rest) * np.cos(rest)) / np.pi
  return np.maximum(lost, SMALLEST_LOSS)


def loss_table(plan: Plan) -> np.ndarray:
  """ln T(r) per matrix and rank, ready for `log_error`.

  Where a rank would send a matrix dense nothing is lost: T is
  `SMALLEST_LOSS`.

  Args:
    plan: Gives the matrices, the ladder and the least ratio.

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
  """ln of the modelled squared error of all matrices, by rank.

    ln G(r) = ln sum_i  (entries) variance T_i(r)

  Args:
    table: float32 [K, rank_max + 1], from `loss_table`.
    sizes: float32 [K], `Plan.sizes`.
    variance: float32 [K], mean square of a matrix's entries.

  Returns:
    float32 [rank_max + 1], falling; entry 0 is the whole energy.
  """
  smallest = float(jnp.finfo(jnp.float32).tiny)
  weights = jnp.log(sizes) + jnp.log(jnp.maximum(variance, smallest))
  return logsumexp(table + weights[:, None], axis=0)


def energy_gains(
  columns: jax.Array, energy: jax.Array, ranks: jax.Array
) -> jax.Array:
  """Gains from what was measured, and a geometric tail beyond the rank.

  With P orthonormal, the squared column norms of Q are the squared singular
  values of what was sent. The j-th column after them gains q rho^j, with q the
  gain of the last one and rho the factor at which all of them together would
  be what was not sent, E, or, if that is less, the factor by which the
  measured columns fell over their second half:

    sum_(j > 0) q rho^j = E    for    rho = E / (E + q)

  Args:
    columns: float32 [K, width], mean squared norms of Q's columns; those
      within the rank count.
    energy: float32 [K], mean squared norm of the matrices.
    ranks: int32 [K], at which this was measured; at least 1.

  Returns:
    float32 [K, width].
  """
  width = columns.shape[1]
  index = jnp.arange(width)
  live = index < ranks[:, None]
  # Each column's mean is its own: they need not be in order. The rest is last.
  columns = -jnp.sort(jnp.where(live, -columns, jnp.inf), axis=1)
  at = lambda i: jnp.take_along_axis(columns, i[:, None], 1)[:, 0]  # noqa: E731
  last, middle = at(ranks - 1), at((ranks - 1) // 2)
  lost = energy - jnp.sum(jnp.where(live, columns, 0.0), axis=1)
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
  """Gains of matrices with independent entries.

    gain(c) = variance m n (T(c / m) - T((c + 1) / m))

  Args:
    variance: float32 [K], mean square of the entries.
    sides: int [K, 2], static.
    width: Columns to return.

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
  """Gains of the model, stretched to a measured error.

  Real gradients are far from independent entries, and lose less. One number
  per matrix makes up for it: the stretch s with T(s r / m) = lost.

    gain(c) = variance m n (T(s c / m) - T(s (c + 1) / m))

  Args:
    variance: float32 [K], mean square of what is sent, entry by entry.
    sides: int [K, 2], static.
    width: Columns to return.
    lost: float32 [K], measured share of the energy that was not sent.
    ranks: int32 [K], at which it was measured; at least 1.

  Returns:
    float32 [K, width].
  """
  tables = _loss_tables(sides)
  indices = jnp.arange(tables.shape[1], dtype=jnp.float32)
  rank_for = jax.vmap(lambda loss, t: jnp.interp(-loss, -t, indices))
  # Nothing is lost at the full rank; tables of shorter sides go on beyond it.
  shorter = np.min(sides, axis=1)
  stretch = jnp.minimum(rank_for(lost, jnp.asarray(tables)), shorter) / ranks
  at = stretch[:, None] * jnp.arange(width + 1)
  return -jnp.diff(_model_loss(variance, sides, at))


def _model_loss(
  variance: jax.Array, sides: np.ndarray, ranks: jax.Array | np.ndarray
) -> jax.Array:
  """Squared error at real-valued ranks [width + 1], or one row per matrix."""
  tables = jnp.asarray(_loss_tables(sides))
  ranks = jnp.broadcast_to(ranks, (len(sides), ranks.shape[-1]))
  indices = jnp.arange(tables.shape[1], dtype=jnp.float32)
  lost = jax.vmap(lambda r, t: jnp.interp(r, indices, t))(ranks, tables)
  sizes = np.prod(np.asarray(sides, np.float32), axis=1)
  return (variance * sizes)[:, None] * lost


def _loss_tables(sides: np.ndarray) -> np.ndarray:
  """T by rank for each matrix, float32 [K, longest + 1], level at the end."""
  longest = int(np.min(sides, axis=1).max(initial=0))
  tables = np.empty((len(sides), longest + 1), np.float32)
  for row, (m, n) in zip(tables, sides.tolist(), strict=True):
    curve = lost_energy(m, n)
    row[:] = curve[np.minimum(np.arange(longest + 1), len(curve) - 1)]
  return tables
