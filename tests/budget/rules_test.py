"""Ranks from entropies against exact decompositions."""

import jax.numpy as jnp
import numpy as np
import pytest

from edgc_jax.budget import error_model
from edgc_jax.budget.rules import Window, cqm, round_to_ladder
from edgc_jax.leaves.leaf import leaves_in
from edgc_jax.methods.low_rank import with_factors


def errors_of(shapes, rank_max):
  """Returns ln G by rank for matrices of the given shapes."""
  leaves = leaves_in([jnp.zeros(shape) for shape in shapes])
  matrices = with_factors(leaves, (1, rank_max), 0.0, None)
  table = error_model.loss_table(matrices, rank_max)
  sizes = np.array([leaf.size for leaf in matrices], np.float32)
  return error_model.log_error(table, sizes, jnp.ones(len(sizes)))


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


def test_ranks_are_allowed_and_never_far():
  random = np.random.default_rng(0)
  for ranks, step in (((8, 12, 16, 20), 4), ((4, 8, 12), 8), ((5,), 4)):
    for current in range(len(ranks)):  # a rule that finds no number
      nan = jnp.float32(jnp.nan)
      assert round_to_ladder(nan, jnp.int32(current), ranks, step) == current
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
