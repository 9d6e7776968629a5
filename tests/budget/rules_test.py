"""Ranks from entropies against exact decompositions."""

import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose

from edgc_jax.budget import error_model
from edgc_jax.budget.rules import Window, cqm, round_to_ladder
from edgc_jax.leaves.leaf import leaves_in
from edgc_jax.methods.low_rank import with_factors


def errors_of(shapes, rank_max, variance=None, min_ratio=0.0):
  """Returns ln G by rank for matrices of the given shapes."""
  tree = {f"{i:02}": jnp.zeros(shape) for i, shape in enumerate(shapes)}
  matrices = with_factors(leaves_in(tree), (1, rank_max), min_ratio, None)
  table = error_model.loss_table(matrices, rank_max)
  sizes = np.array([leaf.size for leaf in matrices], np.float32)
  if variance is None:
    variance = np.ones(len(sizes))
  return error_model.log_error(table, sizes, jnp.asarray(variance, jnp.float32))


def window_of(errors, entropy, rank_min=1, **fields):
  """Returns a window; what is not given is 0."""
  names = ("previous", "reference", "first", "first_change")
  rest = {name: jnp.float32(fields.get(name, 0.0)) for name in names}
  return Window(
    entropy=jnp.float32(entropy), errors=errors, rank_min=rank_min,
    rank_max=len(errors) - 1, **rest,
  )  # fmt: skip


def rank_for(errors, entropy, **options):
  """Returns the rank of the rule, with a reference entropy of 0."""
  return float(cqm(window_of(errors, entropy), **options))


def test_constant_absolute_error_by_svd():
  """The exact rank is where a quieter matrix leaves the same error."""
  random = np.random.default_rng(0)
  drop, rank_max = 0.2, 64
  values = np.linalg.svd(random.standard_normal((192, 768)), compute_uv=False)
  tail = lambda s: np.append(np.cumsum((s**2)[::-1])[::-1], 0.0)  # noqa: E731
  allowed = tail(values)[rank_max]
  left = tail(values * np.exp(-drop))
  exact = np.interp(-allowed, -left, np.arange(len(left)))
  errors = errors_of([(192, 768)], rank_max)
  rank = rank_for(errors, -drop)
  assert rank == pytest.approx(exact, rel=0, abs=0.5)
  assert rank == pytest.approx(31.9, rel=0, abs=0.1)
  other = rank_for(errors, -drop, exponent=1.0)
  assert other == pytest.approx(48.5, rel=0, abs=0.1)


@pytest.mark.parametrize(
  "rows, cols, rank_max", [(512, 2048, 32), (96, 96, 64), (64, 4096, 48)]
)
def test_inverts_the_model(rows, cols, rank_max):
  errors = errors_of([(rows, cols)], rank_max)
  for rank in range(1, rank_max + 1):
    # The entropy at which this very rank keeps the error.
    entropy = 0.5 * (errors[rank_max] - errors[rank])
    assert rank_for(errors, entropy) == pytest.approx(rank, rel=0, abs=0.01)


def test_only_the_change_since_the_reference_counts():
  errors = errors_of([(64, 128)], 24)
  window = window_of(
    errors, -5.1, 9, previous=8.0, reference=-5.0, first=7.0, first_change=-6.0
  )
  rank = float(cqm(window))
  assert rank == pytest.approx(rank_for(errors, -0.1), rel=0, abs=5e-4)
  assert 1 <= rank <= 23


def test_falls_with_entropy_and_saturates():
  errors = errors_of([(64, 128), (128, 64), (32, 32)], 24)
  ranks = [rank_for(errors, h) for h in np.linspace(-3, 1, 50)]
  assert np.all(np.diff(ranks) >= 0)
  assert (ranks[0], ranks[-1]) == (0.0, 24.0)


def test_error_of_several_shapes_is_their_sum():
  shapes, variance = [(64, 128), (32, 32)], [0.5, 3.0]
  both = np.exp(errors_of(shapes, 8, variance))
  single = [
    np.exp(errors_of([shape], 8, [v]))
    for shape, v in zip(shapes, variance, strict=True)
  ]
  assert_allclose(both, sum(single), rtol=1e-5)
  assert both[0] == pytest.approx(
    64 * 128 * 0.5 + 32 * 32 * 3.0, rel=0, abs=0.1
  )


def test_a_capped_shape_loses_what_it_loses_at_its_cap():
  """At ratio 2, 32 x 32 has at most 8 columns; 64 x 128 has up to 21."""
  small = np.exp(errors_of([(32, 32)], 12, min_ratio=0.0))
  mixed = [(32, 32), (64, 128)]
  with_cap = np.exp(errors_of(mixed, 12, min_ratio=2.0))
  without = np.exp(errors_of(mixed, 12, min_ratio=0.0))
  assert_allclose(with_cap[:9], without[:9], rtol=1e-5)
  assert_allclose(with_cap[9:] - without[9:], small[8] - small[9:], rtol=1e-3)


def test_a_rule_that_finds_no_number_keeps_the_rank():
  for current in range(4):
    index = round_to_ladder(
      jnp.float32(jnp.nan), jnp.int32(current), (8, 12, 16, 20), 4
    )
    assert int(index) == current


def test_always_allowed_and_never_far():
  random = np.random.default_rng(0)
  for ranks, step in (((8, 12, 16, 20), 4), ((4, 8, 12), 8), ((5,), 4)):
    for _ in range(100):
      wish = jnp.float32(random.uniform(-5, 40))
      current = random.integers(len(ranks))
      index = int(round_to_ladder(wish, jnp.int32(current), ranks, step))
      assert index in range(len(ranks))
      assert abs(ranks[index] - ranks[current]) <= step
      step_up = ranks[1] - ranks[0] if len(ranks) > 1 else 1
      if index == current and wish >= ranks[index] - step_up / 2:
        continue  # not left for so little
      if ranks[0] <= wish and abs(wish - ranks[current]) < step:
        assert ranks[index] <= float(wish) + 1e-3
