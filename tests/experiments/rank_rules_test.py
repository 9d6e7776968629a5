"""Rules of configurations, by name."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import edgc_jax
from experiments.trainer.training import rules


def window(**more):
  """Returns statistics of a window; the first change of entropy is -0.5."""
  values = {
    "entropy": -1.0, "previous": -0.9, "reference": -0.5, "first": 0.0,
    "first_change": -0.5, **more,
  }  # fmt: skip
  return edgc_jax.Window(
    **{name: jnp.float32(x) for name, x in values.items()},
    errors=-0.1 * jnp.arange(33, dtype=jnp.float32), rank_min=8, rank_max=32,
  )  # fmt: skip


def test_reverse_rises_as_entropy_falls():
  """The mirror image of `cqm` within the ladder."""
  high, low = (window(entropy=h) for h in (-0.55, -0.6))
  fallen = [float(rules.reverse(own)) for own in (high, low)]
  cqm = [float(edgc_jax.cqm(own)) for own in (high, low)]
  np.testing.assert_allclose(fallen, [40.0 - rank for rank in cqm], rtol=1e-6)
  assert 8 <= fallen[0] < fallen[1] <= 32


def test_linear():
  for more, expected in (
    ({}, 8 + 24 * 0.1 / 0.5),  # by hand
    ({"previous": -1.1}, 8 + 24 * 0.1 / 0.5),  # a rise counts as a fall
    ({"previous": -1.0}, 8),
    ({"previous": 0.0}, 8 + 24 * 2),  # above rank_max, which edgc clamps
    ({"first_change": 0.0}, 32),
  ):
    found = rules.linear(window(**more))
    np.testing.assert_allclose(found, expected, rtol=1e-6)
  # It is finite under jit, too.
  still = jax.tree.map(jnp.float32, window(first_change=0.0)._asdict())
  still |= {"rank_min": 8, "rank_max": 32}
  assert jax.jit(lambda x: rules.linear(edgc_jax.Window(**x)))(still) == 32


def test_rules_by_name():
  for exponent in (1.0, 2.0, 4.0):
    found = rules.rule_of("cqm", exponent)(window())
    np.testing.assert_array_equal(found, edgc_jax.cqm(window(), exponent))
  assert rules.rule_of("linear", 2.0) is rules.linear
  for name, exponent, message in (
    ("cmq", 2.0, "`edgc.rule` must be one of cqm, linear, reverse, got 'cmq'"),
    ("cqm", 0.0, r"`edgc\.exponent` must be positive, got 0\.0"),
  ):
    with pytest.raises(ValueError, match=message):
      rules.rule_of(name, exponent)
