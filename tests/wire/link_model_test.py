"""Times by hand, and fits of lines."""

import numpy as np
import pytest

from edgc_jax import CompressionModel, LinkModel
from edgc_jax.wire.link_model import fit_line


def test_seconds_and_static_arguments():
  assert LinkModel(latency=0.5, bandwidth=100.0).seconds(300) == 3.5
  compression = CompressionModel(base=2.0, per_rank=0.25)
  assert [compression.seconds(r) for r in (0, 1, 8)] == [0, 2.25, 4]
  assert LinkModel(0.5, 9.0, r_squared=0.9) == LinkModel(0.5, 9.0)
  assert hash(LinkModel(0.5, 9.0, r_squared=0.9)) == hash(LinkModel(0.5, 9.0))
  assert LinkModel(0.5, 9.0) != LinkModel(0.5, 8.0)
  assert hash(CompressionModel(0.0, 0.0)) == hash(CompressionModel(0, 0))
  LinkModel(0, 1)  # an ideal link


@pytest.mark.parametrize(
  ("x", "y", "scale", "line"),
  [
    ((1, 4, 9), (2.5, 4, 6.5), 1, (2, 0.5)),
    ((1, 4, 9), (2.5, 4, 6.5), (1, 5, 0.1), (2, 0.5)),
    # Not with a negative intercept: then through the origin.
    ((1, 2), (1, 4), 1, (0, 9 / 5)),
    # With deviations in proportion to y, both points weigh the same.
    ((1, 2), (1, 4), (1, 4), (0, (1 + 0.5) / (1 + 0.25))),
  ],
)
def test_fits(x, y, scale, line):
  x, y, scale = (np.array(values, float) for values in (x, y, scale))
  np.testing.assert_allclose(fit_line(x, y, scale), line, rtol=1e-9)


def test_a_small_deviation_binds():
  x, y = np.array([1.0, 2.0, 3.0]), np.array([1.0, 2.0, 9.0])
  intercept, slope = fit_line(x, y, np.array([1e-3, 1e-3, 1e3]))
  np.testing.assert_allclose((intercept, slope), (0.0, 1.0), atol=1e-4)
