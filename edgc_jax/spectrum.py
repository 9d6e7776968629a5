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

import numpy as np

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
