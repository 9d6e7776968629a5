"""Ranks by step of a schedule."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import float32
from helpers.meshes import Pmap, gradients_like, traced_once

import edgc_jax
from edgc_jax.budget.fixed_budget import FixedBudget


@pytest.mark.parametrize(
  "schedule, ladder, ranks",
  [
    ({0: 8}, (8,), [8] * 6),
    # Steps in any order, ranks that return, and steps without a change.
    ({4: 4, 0: 8, 2: 0}, (0, 4, 8), [8, 8, 0, 0, 4, 4]),
    ({0: 4, 1: 8, 3: 4, 5: 4}, (4, 8), [4, 8, 8, 4, 4, 4]),
    ({0: 4, 9: 8}, (4, 8), [4] * 6),
  ],
)
def test_levels_follow_the_schedule(schedule, ladder, ranks):
  budget = FixedBudget(schedule)
  assert budget.ladder == ladder
  levels = jax.jit(lambda count: budget.levels(budget.init(), count))
  for count, rank in enumerate(ranks):
    level, lead = levels(jnp.int32(count))
    assert level.dtype == jnp.int32
    assert level == lead  # stage 0 has the same
    assert ladder[int(level)] == rank
  assert budget.ladder[budget.first_level] == ranks[0]


def test_a_reducer_sends_the_rank_of_each_step():
  params = {"w": jnp.zeros((32, 48))}
  schedule = {0: 0, 2: 8, 4: 4}
  run = Pmap(traced_once(float32.powersgd(schedule, min_ratio=1.0)), params)
  ranks, sent = [], []
  for step in range(6):
    run.step(gradients_like(params, step))
    found = edgc_jax.metrics(run.state)
    ranks.append(found["rank"])
    sent.append(found["wire_bytes"])
  assert ranks == [0, 0, 8, 8, 4, 4]
  # Later steps send no checks of the replicas.
  np.testing.assert_array_equal(
    sent[4:], [float32.wire_bytes(params, 4, min_ratio=1.0)] * 2
  )
