"""Alignment of stages, over many random ladders."""

import numpy as np
import pytest
from numpy.testing import assert_array_equal

from edgc_jax.budget.alignment import aligned_levels, finish_seconds


def random_ladders(number, seed=0):
  """Yields times of levels, stages and t_b, with ties and slow levels."""
  random = np.random.default_rng(seed)
  for _ in range(number):
    num_levels = int(random.integers(1, 12))
    steps = random.exponential(size=num_levels) * (
      random.random(num_levels) < 0.7
    )
    compressed = random.exponential() + 0.1 + np.cumsum(steps)[1:]
    dense = random.choice([1.0, 0.5, 0.8]) * (compressed.max(initial=0.1) + 0.1)
    if random.random() < 0.2 and num_levels > 1:
      dense = random.choice(compressed)
    backward = random.choice([0.01, 0.3, 2.0]) * random.exponential()
    stages = int(random.integers(1, 7))
    yield np.append(dense, compressed), stages, float(backward)


def quality(levels):
  """Returns a number that rises with the rank, dense above all ranks."""
  return np.where(levels == 0, 1000, levels)


def test_by_hand():
  """Budgets of stage 1 are T + 2, of stage 2 T + 4; dense takes 7.5."""
  seconds = np.array([7.5, 1.0, 2.0, 3.0, 3.0, 5.0])
  expected = [[0, 1, 2, 3, 4, 5], [0, 4, 4, 5, 5, 5], [0, 5, 5, 5, 5, 0]]
  assert_array_equal(aligned_levels(seconds, 3, 2.0), expected)
  # Dense as soon as it fits.
  found = aligned_levels(np.array([3.0, 1.0, 2.0]), 3, 1.0)
  assert_array_equal(found, [[0, 1, 2], [0, 2, 0], [0, 0, 0]])


def test_properties():
  for seconds, num_stages, backward in random_ladders(500):
    levels = aligned_levels(seconds, num_stages, backward)
    assert levels.shape == (num_stages, len(seconds))
    own = np.arange(len(seconds))
    assert_array_equal(levels[0], own)
    assert_array_equal(levels[:, 0], 0)
    assert_array_equal(
      aligned_levels(seconds, num_stages, 0.0), [own] * num_stages
    )
    # More time never gives less: dense beats every rank.
    assert np.all(np.diff(quality(levels), axis=0) >= 0)
    assert np.all(quality(levels) >= quality(own))
    # Times rise too, unless dense is faster than stage 0's level.
    times = seconds[levels]
    usual = seconds <= seconds[0]
    assert np.all(np.diff(times[:, usual], axis=0) >= 0)
    assert np.all(np.diff(times[1:], axis=0) >= 0)


def test_levels_fill_the_slack():
  """No stage finishes late, and none has time for another level."""
  for seconds, num_stages, backward in random_ladders(500, seed=1):
    levels = aligned_levels(seconds, num_stages, backward)
    for i, column in enumerate(levels.T):
      finish = finish_seconds(seconds, column, backward)
      assert finish[0] == seconds[i]
      assert finish.max() <= seconds[i] + 1e-12
      for stage, level in list(enumerate(column))[1:]:
        budget = seconds[i] + stage * backward
        assert (level == 0) == (seconds[0] <= budget)
        if 0 < level < len(seconds) - 1:
          assert seconds[level + 1] > budget


BAD_SECONDS = (
  [], [[1.0, 2.0]], 1.0, [1.0, 0.0], [-1.0, 1.0], [1.0, np.nan],
  [np.inf, 1.0], [9.0, 2.0, 1.0],
)  # fmt: skip
BAD_BACKWARD = (-1.0, np.inf, np.nan, None)


@pytest.mark.parametrize(
  "name, arguments",
  [
    *(("seconds", (seconds, 2, 1.0)) for seconds in BAD_SECONDS),
    *(("num_stages", ([1.0], num, 1.0)) for num in (0, 2.0)),
    *(("backward_seconds", ([1.0], 2, x)) for x in BAD_BACKWARD),
  ],
)
def test_errors(name, arguments):
  message = f"`{name}` must be .*, got .*[;:] "
  with pytest.raises((ValueError, TypeError), match=message):
    aligned_levels(*arguments)
  seconds, _, backward = arguments
  if name != "num_stages":
    with pytest.raises((ValueError, TypeError), match=message):
      finish_seconds(seconds, np.array([0, 0]), backward)
