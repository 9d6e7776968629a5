"""Warm-up, windows and ranks for scripted entropies."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.flat_options import edgc
from helpers.meshes import Pmap, find, gradients_like, traced_once
from numpy.testing import assert_allclose, assert_array_equal

import edgc_jax
from edgc_jax.budget.entropy import EntropySample, Sampling
from edgc_jax.budget.entropy_budget import EntropyBudget, restarted
from edgc_jax.budget.error_model import lost_energy
from edgc_jax.budget.rules import cqm
from edgc_jax.leaves.leaf import leaves_in
from edgc_jax.methods.low_rank import with_factors

near = functools.partial(pytest.approx, rel=0, abs=5e-6)

RANKS = (4, 8, 12, 16)
WINDOW = 4


def make(rule=cqm, warmup=4, most=None, max_rank_step=4, warmup_rank=0):
  leaves = leaves_in({"w": jnp.zeros((96, 192))})
  return EntropyBudget(
    ladder=RANKS if warmup_rank else (0, *RANKS),
    window=WINDOW,
    warmup_steps=warmup,
    max_warmup_steps=warmup if most is None else most,
    warmup_rank=warmup_rank,
    rule=rule,
    max_rank_step=max_rank_step,
    sampling=Sampling(),
    matrices=with_factors(leaves, RANKS, 2.0, None),
  )


def log_loss(rank):
  return np.log(lost_energy(96, 192)[rank])


@functools.cache
def programs_of(budget):
  """Returns the ends of windows and the samples of a budget, compiled."""
  return jax.jit(budget.close_window), jax.jit(budget.observe)


def sample_of(entropy, weight=1.0):
  return EntropySample(
    jnp.float32(entropy), jnp.ones(1), jnp.zeros(1), jnp.float32(weight)
  )


def run(budget, num_steps, entropy_at, marks=(), is_used=lambda step: True):
  """Returns the rank of each step, and the state after the last.

  Args:
    budget: The budget.
    num_steps: Steps to run; the last window is closed, too.
    entropy_at: From a step to the entropy that is sampled in it.
    marks: Steps before which the reference restarts.
    is_used: From a step to whether its gradients were finite.
  """
  close, observe = programs_of(budget)
  state, ranks = budget.init(), []
  for step in range(num_steps + 1):
    if step in marks:
      state = restarted(state)
    if step > 0 and step % WINDOW == 0:
      state = close(state, jnp.int32(step))
    level, _ = budget.levels(state, jnp.int32(step))
    ranks.append(budget.ladder[int(level)])
    assert ranks[-1] == int(state.decision.rank)
    if step < num_steps:
      sample = sample_of(entropy_at(step))
      state = observe(state, sample, jnp.array(is_used(step)))
  return ranks[:num_steps], state


def drive(budget, entropies, used=None):
  """Returns ranks by window, the state and ranks by step.

  Each window has one of the entropies; in it the samples scatter, and only
  their mean counts.
  """
  ranks, state = run(
    budget,
    WINDOW * len(entropies),
    lambda step: entropies[step // WINDOW] + (-1) ** step * 0.3,
    is_used=lambda step: used is None or bool(used[step // WINDOW]),
  )
  return ranks[::WINDOW], state, ranks


BACK = [0, -1, -1, -1, 0.01, 0.01, 0.01, 0.01]


@pytest.mark.parametrize(
  "options, entropies, used, ranks",
  [
    # Falling: dense, then rank_max, then down by at most the step limit.
    ({}, [0, -1, -1, -1, -1, -1, -1], None, [0, 16, 12, 8, 4, 4, 4]),
    # Ranks return to where they began: chained windows do not drift.
    ({}, BACK, None, [0, 16, 12, 8, 4, 8, 12, 16]),
    # The same with a ladder without dense, whose warm-up has a rank.
    ({"warmup_rank": 8}, BACK, None, [8, 16, 12, 8, 4, 8, 12, 16]),
    ({"max_rank_step": 8}, [0, -1, -1, 0.01, 0.01], None, [0, 16, 8, 4, 12]),
    # Windows without samples change nothing.
    ({}, [0, -1, -1, -9, -1, -1], [1, 1, 1, 0, 1, 1], [0, 16, 12, 8, 8, 4]),
  ],
)
def test_ranks_by_window(options, entropies, used, ranks):
  """They change at the ends of windows only."""
  by_window, state, by_step = drive(make(**options), entropies, used)
  assert by_window == ranks
  assert by_step == [r for r in by_window for _ in range(WINDOW)]
  assert float(state.reference_entropy) == near(0.0)


def test_a_sample_of_weight_0_counts_as_none():
  budget = make()
  state = budget.observe(budget.init(), sample_of(2.0), jnp.array(True))
  for sample, is_used in ((sample_of(7.0, 0.0), True), (sample_of(7), False)):
    after = budget.observe(state, sample, jnp.array(is_used))
    chex.assert_trees_all_equal(after, state)


def test_predicted_error_is_from_the_model():
  budget = make()
  _, state, _ = drive(budget, [0])  # and the next window begins
  for own, expected in ((state, np.exp(log_loss(16))), (budget.init(), 0.0)):
    report = budget.report(own)
    assert_allclose(report.predicted_error, expected, rtol=0, atol=5e-5)
    assert_allclose(report.predicted_errors, [expected], rtol=1e-4)
  assert float(report.predicted_error) == 0.0  # of the first state


def test_warm_up_is_whole_windows():
  for steps, windows in ((0, 1), (1, 1), (4, 1), (5, 2), (8, 2), (12, 3)):
    by_window, state, _ = drive(make(warmup=steps), [0] * 6)
    assert by_window[: windows + 1] == [0] * windows + [16], steps
    assert bool(state.decision.is_warm)


def test_warm_up_lasts_until_the_entropy_has_fallen():
  """rank_min must lose no more than rank_max would have lost at first."""
  gap = 0.5 * float(log_loss(RANKS[0]) - log_loss(RANKS[-1]))
  falling = [0, -0.5 * gap, -1.01 * gap, -1.01 * gap, -1.01 * gap]
  for most, entropies, reference in (
    (40, falling, -1.01 * gap), (10, [0, 1, 2, 3, 4], 2.0)  # or to its end
  ):  # fmt: skip
    by_window, state, _ = drive(make(warmup=4, most=most), entropies)
    assert by_window == [0, 0, 0, 16, 16]
    assert float(state.reference_entropy) == near(reference)


@pytest.mark.parametrize("late", [0, 1, 3])
def test_the_next_whole_window_moves_the_reference(late):
  """Entropies are 0.2 higher from the mark on, and ranks do not see it."""
  entropies = [0, -1, -1, -1, -0.7, -0.7, -0.3, 0.01]
  marked = WINDOW * 5 + late  # at a window's end, or within it
  ranks, state = run(
    make(),
    WINDOW * len(entropies),
    lambda step: entropies[step // WINDOW] + 0.2 * (step >= marked),
    marks=[marked],
  )
  plain, _, _ = drive(make(), entropies)
  assert int(state.restarts) == 0
  # The window that the mark ends or interrupts is dropped, and the first
  # whole one after it counts as the last one before it.
  dropped, first = (4, 5) if late == 0 else (5, 6)
  change = entropies[first] - entropies[dropped - 1]
  # All references shift: the rule does not see the change of the batch.
  assert float(state.reference_entropy) == near(0.2 + change)
  assert float(state.first_entropy) == near(0.2 + change)
  assert float(state.first_change) == near(-1.0)
  assert float(state.window_entropy) == near(0.2 + entropies[-1])
  before = dropped + 1
  assert ranks[: WINDOW * before : WINDOW] == plain[:before]
  # The rank stays until the measurement has ended, and through it.
  stays = ranks[WINDOW * dropped : WINDOW * (first + 1) + 1 : WINDOW]
  assert len(set(stays)) == 1


def test_a_window_without_samples_shifts_nothing():
  """The first whole window that has one shifts the references instead."""
  offset = lambda step: -1.0 * (step >= WINDOW) + 0.2 * (step >= 20)  # noqa: E731
  for steps, is_used, restarts, shift in (
    (28, lambda step: not 20 <= step < 24, 0, 0.2),
    (24, lambda step: step < 20, 1, 0.0),
  ):
    _, state = run(make(), steps, offset, marks=[20], is_used=is_used)
    assert int(state.restarts) == restarts
    assert float(state.reference_entropy) == near(shift)


@pytest.mark.parametrize(
  "marks, offset, shift",
  [
    # Twice, the first time for one whole window: once more, and back.
    ((20, 24), lambda step: 0.2 * (step >= 20) + 0.2 * (step >= 24), 0.4),
    ((20, 24), lambda step: 0.2 * (20 <= step < 24), 0.0),
    ((20, 28), lambda step: 0.2 * (20 <= step < 28), 0.0),
    # And for parts of windows.
    ((20, 23), lambda step: 0.2 * (20 <= step < 23), 0.0),
    ((22, 24), lambda step: 9.0 * (22 <= step < 24), 0.0),
    ((21, 22, 23), lambda step: 0.2 * (step == 21) + 0.3 * (step > 22), 0.3),
  ],
)
def test_again(marks, offset, shift):
  """The rank stays: what moves is the batch, not the training."""
  entropy = lambda step: -0.3 * (step >= WINDOW) + offset(step)  # noqa: E731
  ranks, state = run(make(), 12 * WINDOW, entropy, marks)
  assert float(state.reference_entropy) == near(shift)
  assert int(state.restarts) == 0
  assert len(set(ranks[6 * WINDOW :])) == 1


def test_in_warm_up():
  """Warm-up ends by the fall of the entropy, not by the mark."""
  budget = make(warmup=4, most=40)
  close, observe = programs_of(budget)
  state = restarted(observe(budget.init(), sample_of(0), jnp.array(True)))
  state = close(state, jnp.int32(WINDOW))
  assert int(state.restarts) == 1
  assert not bool(state.decision.is_warm)
  # Of the first whole window there is nothing to compare with: no shift.
  state = observe(state, sample_of(3.0), jnp.array(True))
  state = close(state, jnp.int32(2 * WINDOW))
  assert int(state.restarts) == 0
  assert not bool(state.decision.is_warm)
  assert float(state.first_entropy) == near(3.0)
  # In the warm-up H_ref is the mean of the newest window.
  assert float(state.reference_entropy) == near(3.0)


def test_marks_states_of_any_kind():
  """Of one device, stacked by pmap, and fetched to the host."""
  state = make().init()
  stacked = jax.tree.map(lambda x: jnp.stack([x, x]), state)
  for own in (state, stacked, jax.device_get(state), jax.device_get(stacked)):
    after = restarted(own)
    assert_array_equal(after.restarts, own.restarts + 2)
    assert after.restarts.dtype == own.restarts.dtype
    assert after._replace(restarts=own.restarts) == own


@pytest.mark.slow
def test_the_rank_stays_when_the_scale_of_the_loss_changes():
  """Gradients of half the scale have 0.69 nats less, in mid-window."""
  params = {"w": jnp.zeros((32, 64))}
  tx = edgc(
    rank_max=10, rank_min=2, rank_multiple=2, window=4, warmup_steps=4,
    max_warmup_steps=4, step_rate=1.0, entry_rate=1.0, max_rank_step=10,
  )  # fmt: skip
  run = Pmap(traced_once(tx), params)
  draw, ranks = gradients_like(params, 0)["w"], []
  for step in range(24):
    if step == 14:
      before = find(run.state).budget.reference_entropy[0]
      run.state = edgc_jax.restart_reference(run.state)
    # 0.1 nats less after the warm-up, and 0.69 less from the mark on.
    scale = np.exp(-0.1 * (step >= 4)) * (0.5 if step >= 14 else 1.0)
    run.step({"w": scale * draw})
    ranks.append(edgc_jax.metrics(run.state)["rank"])
  after = find(run.state).budget.reference_entropy[0]
  assert len(set(ranks[8:])) == 1
  assert 3 <= ranks[8] <= 9  # and not the least
  assert after - before == pytest.approx(np.log(0.5), rel=0, abs=5e-5)
