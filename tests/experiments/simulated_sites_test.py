"""Tests the simulation of sites of which one is often away or slow."""

import pytest

from configs.protocol import gpt
from experiments.lab.benchmarks import sites


@pytest.mark.parametrize(
  ("arm", "away", "members"),
  [
    ("all there", 0, 90), ("a tenth away", 9, 81), ("a third away", 30, 60),
    ("slow, late", 0, 30), ("slow, timed", 0, 90),
    ("all entries", 0, 90),
  ],
)  # fmt: skip
def test_rounds_of_the_fourth_site(arm, away, members):
  arm, rounds = sites.ARMS[arm], range(90)
  assert sum(map(arm.is_away, rounds)) == away
  assert sum(map(arm.is_in, rounds)) == members


@pytest.mark.soak("experiments/lab/benchmarks", "edgc_jax/sites")
@pytest.mark.parametrize(
  ("arm", "every", "members", "steps"),
  [
    # Of each round, and of the fourth site alone.
    ("slow, late", 3, [3, 3, 4], 3), ("slow, timed", 3, [4, 4, 4], 3),
    ("a third away", 1, 10 * [4] + 10 * [3] + 2 * [4], 12),
  ],
)  # fmt: skip
def test_a_short_run(arm, every, members, steps, monkeypatch):
  """Changes have their bytes; a site that was killed returns."""
  monkeypatch.setattr(sites, "EVERY", every)
  config = gpt.get_config("allreduce")
  config.steps, config.batch_size = every * len(members), 8
  config.optimizer.warmup_steps = 2
  config.evaluation.batches = 1
  config.model.update(width=16, num_layers=1, context=16, num_heads=2)
  found = sites.simulate(config, sites.ARMS[arm])
  assert found["rounds"] == len(members)
  assert found["tokens"] == (3 * config.steps + steps) * 2 * 16
  # Each member uploads once a round, and downloads the other members' changes.
  size = found["sent"] / sum(members)
  others = sum(count * (count - 1) for count in members)
  assert found["received"] == pytest.approx(size * others, rel=0.01)
