"""Ranks of many matrices under one budget: bytes go where they remove most.

A column more of matrix i removes some of its squared error and sends
m_i + n_i values. With the gain of every column known and falling from column
to column, taking columns by gain per value until the budget is spent leaves
the least total error, up to a column: reverse water-filling. How the errors of
a loud and a quiet matrix compare is for the caller to say (`scale_weights`).

Where the gains come from:

  energy      measured: squared column norms of Q, and the energy not sent
  entropy     sigma_i^2 m_i n_i T(r / m_i), the model of `spectrum`
  calibrated  the same, with the spectrum of each matrix made as narrow as its
              measured error says

Pure functions of arrays over the K matrices of a model.
"""

import jax
import jax.numpy as jnp
import numpy as np

from edgc_jax.spectrum import lost_energy

CURVES = ("energy", "entropy", "calibrated")
# P and Q travel in buffers of their own; how scarce either is decides what a
# column costs, and is found by trying these shares.
_PRICES = np.linspace(0.0, 1.0, 9, dtype=np.float32)


def allocate(
  gains: jax.Array,
  sides: np.ndarray,
  budgets: jax.Array,
  floors: jax.Array,
  limits: jax.Array,
) -> jax.Array:
  """Chooses ranks that remove the most error within the budgets.

    max  sum_i sum_(c < r_i) gains[i, c]
    over floors_i <= r_i <= limits_i
    with sum_i r_i sides[i, j] <= budgets[j]    for P (j = 0) and Q (j = 1)

  Columns are taken in the order of gain per price, where they fit, with the
  price p sides[i, 0] / budgets[0] + (1 - p) sides[i, 1] / budgets[1]; of some
  p between 0 and 1 the one that removes most is kept. Equal matrices differ
  by one column at most, and a matrix without any gain stays at its floor.

  Args:
    gains: float32 [K, width], squared error removed by each column. What
      rises along the columns is levelled: a column is not had without those
      before it.
    sides: int [K, 2], heights of P and Q, static.
    budgets: int32 [2], values in the buffers of P and Q.
    floors: int32 [K], least ranks; they must fit into the budgets.
    limits: int32 [K], largest ranks, at most `width`; 0 leaves one out.

  Returns:
    int32 [K].
  """
  num, width = gains.shape
  largest = jnp.max(gains)
  gains = gains / jnp.where(largest > 0, largest, 1.0)
  gains = jax.lax.cummin(jnp.maximum(gains, 0.0), axis=1)
  columns = jnp.arange(width)
  is_open = (columns >= floors[:, None]) & (columns < limits[:, None])
  is_open &= gains > 0
  sides = jnp.asarray(sides, jnp.int32)
  left = budgets - floors @ sides
  share = sides.astype(jnp.float32) / jnp.maximum(budgets, 1)

  def spend(price: jax.Array) -> tuple[jax.Array, jax.Array]:
    cost = price * share[:, 0] + (1.0 - price) * share[:, 1]
    score = jnp.where(is_open, gains / cost[:, None], -1.0)
    # Column by column: of equal gains every matrix gets one before any two.
    order = jnp.argsort(-score.T.reshape(-1), stable=True)

    def take(carry: tuple, entry: jax.Array) -> tuple[tuple, None]:
      left, ranks, removed = carry
      column, matrix = entry // num, entry % num
      # What does not fit never fits later, so no column is passed over.
      fits = is_open[matrix, column] & jnp.all(sides[matrix] <= left)
      left = left - jnp.where(fits, sides[matrix], 0)
      ranks = ranks.at[matrix].add(fits.astype(jnp.int32))
      removed += jnp.where(fits, gains[matrix, column], 0.0)
      return (left, ranks, removed), None

    start = (left, floors, jnp.zeros_like(largest))
    (_, ranks, removed), _ = jax.lax.scan(take, start, order)
    return ranks, removed

  ranks, removed = jax.vmap(spend)(jnp.asarray(_PRICES))
  return ranks[jnp.argmax(removed)]


def lost_share(lost: jax.Array, energy: jax.Array) -> jax.Array:
  """Share of the energy that was not sent; 0 where there is none."""
  return lost / jnp.where(energy > 0, energy, 1.0)


def scale_weights(variance: jax.Array, exponent: float) -> jax.Array:
  """What a unit of squared error counts in each matrix.

    w_i = sigma_i^(-exponent),   in units of the largest

  0 counts absolute errors; 2 counts errors relative to the matrix's mean
  square entry, which is what is left of them after an optimiser that divides
  by it. No weight is more than 1e12^(exponent / 2).

  Args:
    variance: float32 [K], sigma_i^2; 0 where nothing was measured.
    exponent: The exponent of sigma.

  Returns:
    float32 [K], at least 1; 1 where nothing was measured.
  """
  largest = jnp.max(variance, initial=0.0)
  # A matrix without a gradient so far must not outweigh all others.
  relative = jnp.where(variance > 0, variance / largest, 1.0)
  return jnp.maximum(relative, 1e-12) ** (-0.5 * exponent)


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
