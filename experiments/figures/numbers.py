"""The numbers behind the figures: pure functions of arrays."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from edgc_jax.adaptation.error_model import lost_energy

_LIMIT = 6.0  # of a histogram, in root mean squares of its values


def svd_error(matrices: np.ndarray) -> np.ndarray:
  """The least error of each rank: that of a cut singular value decomposition.

    g(r) = (sum_(i > r) s_i^2 / sum_i s_i^2)^(1/2)

  Args:
    matrices: [..., m, n], none of them zero.

  Returns:
    float64 [..., min(m, n) + 1], falling from 1 to 0.

  Source: the theorem of Eckart, Young and Mirsky.
  """
  energies = np.linalg.svd(np.asarray(matrices, float), compute_uv=False) ** 2
  # Summed from the smallest, or rounding would hide the tail.
  lost = np.cumsum(energies[..., ::-1], axis=-1)[..., ::-1]
  lost = np.concatenate([lost, np.zeros_like(lost[..., :1])], axis=-1)
  return np.sqrt(lost / lost[..., :1])


def model_error(rows: int, cols: int) -> np.ndarray:
  """g(r) = T(r)^(1/2) of independent entries; float64 [min(rows, cols) + 1]."""
  return np.sqrt(lost_energy(rows, cols))


def gaussian_error(
  rows: int, cols: int, draws: int, seed: int = 0
) -> np.ndarray:
  """`svd_error` of Gaussian matrices; float64 [draws, min(rows, cols) + 1]."""
  random = np.random.default_rng(seed)
  return svd_error(random.standard_normal((draws, rows, cols)))


def rank_after(errors: np.ndarray, rank: float, fall: float) -> float:
  """The rank that keeps the absolute error when entropy falls.

    g(r_1) = e^fall g(r_0)

  Args:
    errors: [max_rank + 1], g by rank, falling.
    rank: r_0.
    fall: Of the entropy, nats.

  Returns:
    r_1, not rounded; 0 where even that loses too little.
  """
  ranks = np.arange(len(errors))
  target = np.exp(fall) * np.interp(rank, ranks, errors)
  return float(np.interp(-target, -np.asarray(errors), ranks))


def histogram(values: np.ndarray, bins: int = 121) -> dict[str, Any]:
  """Density of values around zero.

  Args:
    values: Any shape; exact zeros, such as untouched rows, are left out.
    bins: An odd number, so that one is around zero.

  Returns:
    rms; excess_kurtosis, 0 for a Gaussian and 3 for a Laplacian; beyond, the
    share outside of the bins, which reach 6 rms; and lists of the bins'
    centres and densities, in units of rms and its inverse.
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
  """Middle step and mean of every window [k w + 1, (k + 1) w] of steps."""
  number = (np.asarray(steps) - 1) // window
  which = np.unique(number)
  means = [np.mean(np.asarray(values)[number == k]) for k in which]
  return which * window + (window + 1) / 2, np.array(means)


def sampling_error(
  estimates: np.ndarray, full: np.ndarray, window: int, period: int
) -> float:
  """How far a sampled window's mean is from that of everything.

  Args:
    estimates: [steps], of the entropy from some entries, nats.
    full: [steps], from all entries by the same estimator.
    window: Steps in a window; steps beyond the last whole one are left out.
    period: Steps from one sample to the next.

  Returns:
    Root mean square over all windows, and over all steps that sampling could
    begin with; nats.
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
  """Medians over rounds of each one's time as a share of that of `base`."""
  return {
    name: float(np.median(np.divide(each, seconds[base])))
    for name, each in seconds.items()
    if name != base
  }
