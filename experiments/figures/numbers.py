"""Computes the numbers of the figures: pure functions of arrays."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from edgc_jax.budget.error_model import lost_energy

_LIMIT = 6.0  # of a histogram's bins, in units of the values' rms


def svd_error(matrices: np.ndarray) -> np.ndarray:
  """Returns the smallest error of each rank, reached by a truncated SVD.

    g(r) = (sum_(i > r) s_i^2 / sum_i s_i^2)^(1/2)

  Args:
    matrices: [..., m, n], none of them zero.

  Returns:
    float64 [..., min(m, n) + 1], falling from 1 to 0.

  Source: the theorem of Eckart, Young and Mirsky.
  """
  energies = np.linalg.svd(np.asarray(matrices, float), compute_uv=False) ** 2
  # Summed from the smallest value up, or rounding would hide the tail.
  lost = np.cumsum(energies[..., ::-1], axis=-1)[..., ::-1]
  lost = np.concatenate([lost, np.zeros_like(lost[..., :1])], axis=-1)
  return np.sqrt(lost / lost[..., :1])


def model_error(rows: int, cols: int) -> np.ndarray:
  """Returns the error of each rank in the model of independent entries.

    g(r) = T(r)^(1/2)

  Args:
    rows: Rows of a matrix.
    cols: Columns of a matrix.

  Returns:
    float64 [min(rows, cols) + 1].
  """
  return np.sqrt(lost_energy(rows, cols))


def gaussian_error(
  rows: int, cols: int, draws: int, seed: int = 0
) -> np.ndarray:
  """Returns `svd_error` of random Gaussian matrices.

  Args:
    rows: Rows of a matrix.
    cols: Columns of a matrix.
    draws: Number of matrices.
    seed: Seed of the draws.

  Returns:
    float64 [draws, min(rows, cols) + 1].
  """
  random = np.random.default_rng(seed)
  return svd_error(random.standard_normal((draws, rows, cols)))


def rank_after(errors: np.ndarray, rank: float, fall: float) -> float:
  """Returns the rank that keeps the absolute error when entropy falls.

    g(r_1) = e^fall g(r_0)

  Args:
    errors: [max_rank + 1], g by rank, decreasing.
    rank: r_0.
    fall: The fall of the entropy in nats.

  Returns:
    r_1, not rounded; 0 if even rank 0 has a smaller error.
  """
  ranks = np.arange(len(errors))
  target = np.exp(fall) * np.interp(rank, ranks, errors)
  return float(np.interp(-target, -np.asarray(errors), ranks))


def histogram(values: np.ndarray, bins: int = 121) -> dict[str, Any]:
  """Computes a histogram of values around zero.

  Args:
    values: Any shape. Exact zeros are left out, such as rows of an embedding
      without a token in the batch, and so are values that are not finite.
    bins: Number of bins; odd, so that one is around zero.

  Returns:
    rms: Root mean square of the values.
    excess_kurtosis: 0 for a Gaussian and 3 for a Laplacian.
    beyond: Fraction of values outside of the bins, which reach to 6 rms.
    centres: Centres of the bins, in units of rms.
    densities: Densities of the bins, in units of 1 / rms.
  """
  values = np.asarray(values, float).ravel()
  values = values[np.isfinite(values) & (values != 0)]
  rms = np.sqrt(np.mean(values**2))
  units = values / rms
  counts, edges = np.histogram(units, bins, (-_LIMIT, _LIMIT))
  return {
    "rms": float(rms),
    "excess_kurtosis": float(np.mean(units**4) - 3.0),
    "beyond": float(1 - counts.sum() / len(units)),
    "centres": ((edges[1:] + edges[:-1]) / 2).tolist(),
    "densities": (counts / len(units) / np.diff(edges)).tolist(),
  }


def window_means(
  steps: Sequence[int], values: Sequence[float], window: int
) -> tuple[np.ndarray, np.ndarray]:
  """Returns middle step and mean of all windows [k w + 1, (k + 1) w]."""
  number = (np.asarray(steps) - 1) // window
  which = np.unique(number)
  means = [np.mean(np.asarray(values)[number == k]) for k in which]
  return which * window + (window + 1) / 2, np.array(means)


def sampling_error(
  estimates: np.ndarray, full: np.ndarray, window: int, period: int
) -> float:
  """Returns the error of a window's mean entropy due to sampling.

  Args:
    estimates: [steps], estimates from a sample of the entries, in nats.
    full: [steps], estimates from all entries by the same estimator.
    window: Steps in a window; an incomplete last window is left out.
    period: Steps from one sample to the next.

  Returns:
    Root mean square, in nats, over all windows and over all first steps of
    sampling in a window.
  """
  num_windows = len(full) // window
  shape = (num_windows, window)
  estimates, full = (
    np.asarray(x)[: num_windows * window].reshape(shape)
    for x in (estimates, full)
  )
  errors = [
    estimates[:, first::period].mean(axis=1) - full.mean(axis=1)
    for first in range(min(period, window))
  ]
  return float(np.sqrt(np.mean(np.square(errors))))


def cost_ratios(
  seconds: Mapping[str, Sequence[float]], base: str
) -> dict[str, float]:
  """Returns each median over rounds of the time relative to `base`."""
  return {
    name: float(np.median(np.divide(each, seconds[base])))
    for name, each in seconds.items()
    if name != base
  }
