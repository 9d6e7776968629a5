"""Times by hand, and fits of lines."""

import jax.numpy as jnp
import numpy as np
import pytest

from edgc_jax.wire.link_model import (
  CompressionModel,
  LinkModel,
  fit_line,
  ring_bytes,
)


def test_seconds():
  link = LinkModel(latency=0.5, bandwidth=100.0)
  assert link.seconds(300) == 3.5
  assert link.seconds(300, num_collectives=3) == 4.5
  compression = CompressionModel(base=2.0, per_rank=0.25)
  assert [compression.seconds(r) for r in (0, 1, 8)] == [0, 2.25, 4]


def test_static_arguments():
  assert LinkModel(0.5, 9.0, r_squared=0.9) == LinkModel(0.5, 9.0)
  assert hash(LinkModel(0.5, 9.0, r_squared=0.9)) == hash(LinkModel(0.5, 9.0))
  assert LinkModel(0.5, 9.0) != LinkModel(0.5, 8.0)
  assert hash(CompressionModel(0.0, 0.0)) == hash(CompressionModel(0, 0))
  LinkModel(0, 1)  # an ideal link


@pytest.mark.parametrize(
  ("model", "name", "values"),
  [
    (LinkModel, "latency", (-1.0, 1.0)),
    (LinkModel, "latency", (float("nan"), 1.0)),
    (LinkModel, "latency", (float("inf"), 1.0)),
    (LinkModel, "bandwidth", (0.0, 0.0)),
    (LinkModel, "bandwidth", (0.0, -5.0)),
    (LinkModel, "bandwidth", (0.0, float("inf"))),
    (LinkModel, "bandwidth", (0.0, float("nan"))),
    (CompressionModel, "base", (-1e-9, 0.0)),
    (CompressionModel, "base", (float("inf"), 0.0)),
    (CompressionModel, "per_rank", (0.0, -1e-9)),
    (CompressionModel, "per_rank", (0.0, float("nan"))),
  ],
)
def test_out_of_range(model, name, values):
  with pytest.raises(ValueError, match=f"`{name}` must be .*, got .*; "):
    model(*values)


@pytest.mark.parametrize("model", [LinkModel, CompressionModel])
def test_no_number(model):
  with pytest.raises(TypeError, match="must be a Python number"):
    model(1.0, "fast")
  with pytest.raises(TypeError, match="must be a Python number"):
    model(jnp.ones(()), 1.0)


def test_recovers_a_line():
  x = np.array([1.0, 4.0, 9.0])
  for scale in (1.0, np.array([1.0, 5.0, 0.1])):
    found = fit_line(x, 2.0 + 0.5 * x, scale)
    np.testing.assert_allclose(found, (2.0, 0.5), rtol=1e-9)


def test_no_negative_intercept():
  """The line is then through the origin."""
  x, y = np.array([1.0, 2.0]), np.array([1.0, 4.0])
  assert fit_line(x, y) == (0.0, 9 / 5)
  # With deviations in proportion to y, both points weigh the same.
  intercept, slope = fit_line(x, y, y)
  assert intercept == 0.0
  assert abs(slope - ((1 + 0.5) / (1 + 0.25))) < 0.5e-7


def test_a_small_deviation_binds():
  x, y = np.array([1.0, 2.0, 3.0]), np.array([1.0, 2.0, 9.0])
  intercept, slope = fit_line(x, y, np.array([1e-3, 1e-3, 1e3]))
  np.testing.assert_allclose((intercept, slope), (0.0, 1.0), atol=1e-4)


def test_by_hand():
  """Each of N parts is sent N - 1 times, twice."""
  for replicas in (1, 2, 5):
    assert (
      abs(ring_bytes(60, replicas) - (2 * (replicas - 1) * 60 / replicas))
      < 0.5e-7
    )
