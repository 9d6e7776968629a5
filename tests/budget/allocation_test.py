"""Ranks under a budget against brute force, and in `edgc` and `powersgd`."""

import functools
import itertools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import float32
from helpers.flat_options import edgc
from helpers.meshes import (
  Pmap,
  factors,
  find,
  first_replica,
  gradients_like,
  traced_once,
)
from helpers.reference import PowerSGD
from numpy.testing import assert_allclose, assert_array_equal

import edgc_jax
from edgc_jax import ErrorAllocation
from edgc_jax.budget import allocation, error_model
from edgc_jax.budget.allocation import ErrorAllocator, Measured
from edgc_jax.leaves.leaf import leaves_in
from edgc_jax.methods.low_rank import with_factors
from edgc_jax.reducer.reducer import matrices_of


@functools.partial(jax.jit, static_argnames=("sides",))
def _allocate(gains, sides, budgets, floors, limits):
  sides = np.array(sides)
  return allocation.allocate(gains, sides, budgets, floors, limits)


def allocate(gains, sides, budgets, floor=0, limits=None):
  """Returns ranks; `floor` and `limits` may be one number for all."""
  gains = np.asarray(gains, np.float32)
  num, width = gains.shape
  full = lambda x: jnp.broadcast_to(jnp.int32(x), num)  # noqa: E731
  ranks = _allocate(
    gains, tuple(map(tuple, sides)), jnp.array(budgets, jnp.int32), full(floor),
    full(width if limits is None else limits),
  )  # fmt: skip
  return np.asarray(ranks)


def removed(gains, ranks):
  return sum(g[:r].sum() for g, r in zip(np.asarray(gains), ranks, strict=True))


def best(gains, sides, budgets, floor=0):
  """Returns the largest energy that ranks within the budgets remove."""
  num, width = np.shape(gains)
  every = itertools.product(range(floor, width + 1), repeat=num)
  return max(
    removed(gains, ranks)
    for ranks in every
    if np.all(np.array(ranks) @ np.array(sides) <= budgets)
  )


def spectra(random, num, width):
  """Draws falling squared singular values of different decay and size."""
  decay = random.uniform(0.3, 0.95, (num, 1))
  size = 10 ** random.uniform(-2, 2, (num, 1))
  return size * decay ** np.arange(width)


def one_by_one(gains, sides, budgets, floor):
  """Takes column after column in the order of gain per price."""
  gains = np.asarray(gains, np.float32)
  gains = np.minimum.accumulate(gains / gains.max(), axis=1)
  share = np.float32(sides) / np.maximum(np.float32(budgets), 1)
  found = []
  for price in allocation._PRICES:
    cost = price * share[:, 0] + (1 - price) * share[:, 1]
    score = gains / cost[:, None]
    ranks = np.full(len(gains), floor)
    left = budgets - ranks @ sides
    for place in np.argsort(-score.T.ravel(), kind="stable"):
      column, i = divmod(place, len(gains))
      if column >= floor and gains[i, column] > 0 and all(sides[i] <= left):
        left, ranks[i] = left - sides[i], ranks[i] + 1
    found.append((removed(gains, ranks), ranks))
  return max(found, key=lambda x: x[0])[1]


@pytest.mark.parametrize("seed", range(4))
def test_whole_runs_of_columns_are_as_one_column_after_the_other(seed):
  random = np.random.default_rng(100 + seed)
  gains = spectra(random, 25, 16)
  sides = random.choice([8, 24, 32, 96], (25, 2))
  floor, rank = int(random.integers(3)), int(random.integers(4, 12))
  budgets = rank * sides.sum(axis=0)
  expected = one_by_one(gains, sides, budgets, floor)
  ranks = allocate(gains, sides, budgets, floor)
  assert np.all(ranks @ sides <= budgets)
  # Prices that remove as much, up to rounding, may leave other ranks.
  assert removed(gains, ranks) / removed(gains, expected) == pytest.approx(
    1, rel=0, abs=5e-7
  )


@pytest.mark.parametrize("seed, floor", [(0, 0), (1, 1), (2, 0), (3, 1)])
def test_best_up_to_a_column(seed, floor):
  random = np.random.default_rng(seed)
  gains = spectra(random, 4, 6)
  # With one shape of matrix there is one budget, and Lagrange is exact.
  sides = np.tile(random.integers(2, 9, 2), (4, 1))
  budgets = random.integers(6, 15) * sides[0]
  ranks = allocate(gains, sides, budgets, floor)
  share = removed(gains, ranks) / best(gains, sides, budgets, floor)
  assert share == pytest.approx(1, rel=0, abs=5e-6)
  # Otherwise the gap is at most the largest gain of one more column.
  random = np.random.default_rng(seed)
  gains = spectra(random, 4, 6)
  sides = np.sort(random.integers(2, 9, (4, 2)), axis=1)
  budgets = 3 * sides.sum(axis=0)
  ranks = allocate(gains, sides, budgets, floor=1)
  assert np.all(ranks @ sides <= budgets)
  more = max(g[r] for g, r in zip(gains, ranks, strict=True) if r < 6)
  most = best(gains, sides, budgets, floor=1)
  assert removed(gains, ranks) + more >= most


@pytest.mark.parametrize("seed", range(3))
def test_the_budget_is_kept_and_spent(seed):
  """The rest of the budget is too small for another column."""
  random = np.random.default_rng(seed)
  num, width = 12, 40
  gains = spectra(random, num, width)
  sides = np.sort(random.integers(8, 300, (num, 2)), axis=1)
  limits = random.integers(10, width + 1, num)
  budgets = 8 * sides.sum(axis=0)
  ranks = allocate(gains, sides, budgets, 2, limits)
  assert np.all((ranks >= 2) & (ranks <= limits))
  left = budgets - ranks @ sides
  assert np.all(left >= 0)
  assert np.all((ranks == limits) | np.any(left < sides, axis=1))


def test_ranks_by_hand():
  sides = np.tile([6, 9], (5, 1))
  for row in (0.5 ** np.arange(8.0), np.ones(8), 1 + np.arange(8.0)):
    ranks = allocate(np.tile(row, (5, 1)), sides, 4 * sides.sum(axis=0), 1)
    assert_array_equal(ranks, 4)  # as many for equal matrices
  # A matrix without gain stays at its floor, and one of limit 0 has none.
  gains, sides = np.array([[4.0, 3, 2, 1, 1, 1, 1, 1], [0.0] * 8]), sides[:2]
  assert_array_equal(allocate(gains, sides, (48, 72), 2), [6, 2])
  assert_array_equal(allocate(0 * gains, sides, (48, 72), 2), [2, 2])
  sides = np.tile([2, 3], (3, 1))
  ranks = allocate(np.ones((3, 4)), sides, (8, 12), [1, 0, 1], [4, 0, 4])
  assert_array_equal(ranks, [2, 0, 2])
  # A gain needs all columns before it.
  ranks = allocate([[1, 9], [4, 4]], sides[:2], (4, 6))
  assert_array_equal(ranks, [0, 2])
  # No scale matters.
  gains = spectra(np.random.default_rng(0), 3, 6)
  expected = allocate(gains, sides, (15, 23))
  for scale in (1e-30, 1e30):
    assert_array_equal(allocate(gains * scale, sides, (15, 23)), expected)


def test_calibrated_curves_of_known_spectra():
  """Measured losses give nearly the ranks that the exact spectra give."""
  random = np.random.default_rng(0)
  num, width, rank = 6, 24, 8
  exact = spectra(random, num, width)
  sides = np.tile([32, 64], (num, 1))
  energy = exact.sum(axis=1)
  gains = error_model.calibrated_gains(
    jnp.asarray(energy / (32 * 64), jnp.float32), sides, width,
    jnp.asarray(exact[:, rank:].sum(axis=1) / energy, jnp.float32),
    jnp.full(num, rank),
  )  # fmt: skip
  budgets = rank * sides.sum(axis=0)
  found = removed(exact, allocate(gains, sides, budgets, 2))
  assert found > 0.98 * removed(exact, allocate(exact, sides, budgets, 2))
  uniform = removed(exact, np.full(num, rank))
  assert exact.sum() - found < 0.25 * (exact.sum() - uniform)


PARAMS = {
  "bias": jnp.zeros((30,)),
  "stack": jnp.zeros((3, 32, 64)),
  "tall": jnp.zeros((96, 40)),
  "zero": jnp.zeros((32, 64)),
}
OPTIONS = {
  "rank_max": 8, "rank_min": 4, "window": 2, "warmup_steps": 2,
  "max_warmup_steps": 2, "step_rate": 1.0, "entry_rate": 1.0,
  "min_ratio": 1.5,
}  # fmt: skip
SIDES = np.array([(32, 64)] * 3 + [(40, 96), (32, 64)])  # of P and Q


def gradients(seed, loud=8.0):
  """Draws gradients; the second of `stack` is loud, and `zero` has none."""
  tree = gradients_like(PARAMS, seed)
  scales = jnp.array([1.0, loud, 1.0])[None, :, None, None]
  return tree | {"stack": scales * tree["stack"], "zero": 0.0 * tree["zero"]}


def ranks_of(run):
  values = edgc_jax.metrics(run.state)["matrix_rank"]
  return np.array(values["stack"] + values["tall"] + values["zero"])


@functools.cache
def run_of(scale_exponent):
  shared = ErrorAllocation(scale_exponent)
  return Pmap(traced_once(edgc(**OPTIONS, allocation=shared)), PARAMS)


@pytest.mark.slow
def test_bytes_go_where_they_remove_most():
  run = run_of(0.0).restart()
  owed, before = np.zeros((3, 32, 64)), np.full(5, 8)
  for step in range(11):
    tree = gradients(step)
    owed += np.asarray(tree["stack"], np.float64).mean(0)
    owed -= run.step(tree)["stack"][0]
    # Reallocation loses nothing: the residual holds the rest.
    kept = run.residual()["stack"].mean(0)
    assert_allclose(kept, owed, rtol=1e-3, atol=2e-4)
    ranks, values = ranks_of(run), edgc_jax.metrics(run.state)
    budget = values["rank"] * SIDES.sum(axis=0)
    assert np.all(ranks @ SIDES <= budget), (ranks, budget)
    if step < 2:
      assert_array_equal(ranks, 8)
    # From one window to the next by a factor of two at most.
    assert np.all(ranks <= 2 * before), (before, ranks)
    assert np.all(ranks >= before // 2), (before, ranks)
    before = ranks
    # Ranks differ, bytes do not.
    if step == 9:
      sent = float32.wire_bytes(
        PARAMS, values["rank"], min_ratio=1.5, rank_min=4
      )
      assert values["wire_bytes"] - 4 * 4 * 5 == sent
  assert ranks.argmax() == 1
  assert ranks[1] >= 12
  assert ranks[4] == 2  # the floor
  # A step that is not finite is not measured.
  before = run.state.allocation
  tree["tall"] = tree["tall"].at[2, 0, 0].set(jnp.nan)
  run.step(tree)
  chex.assert_trees_all_equal(run.state.allocation.sums, before.sums)
  chex.assert_trees_all_equal(run.state.allocation.num_steps, before.num_steps)


@pytest.mark.slow
def test_a_scale_exponent_of_two_of_a_run_ignores_the_scale():
  found = []
  for loud in (1.0, 8.0):
    run = run_of(2.0).restart()
    for step in range(8):
      run.step(gradients(step, loud))
      found.append(ranks_of(run))
  assert_array_equal(found[:8], found[8:])


@pytest.mark.slow
def test_the_packed_exchange_equals_one_matrix_at_a_time():
  """Holds for any ranks within the budget, against NumPy."""
  run = run_of(0.0).restart()
  ranks = np.array([3, 12, 7, 2, 13])
  assert np.all(ranks @ SIDES <= 8 * SIDES.sum(axis=0))
  state = run.state
  stacked = jax.device_put(
    np.tile(np.int32(ranks), (4, 1)), state.allocation.ranks.sharding
  )
  run.state = state._replace(
    allocation=state.allocation._replace(ranks=stacked)
  )
  matrices = [*(("stack", i) for i in range(3)), ("tall", 0), ("zero", 0)]
  first = {name: np.asarray(q)[0] for name, q in factors(state).items()
           if name != "bias"}  # fmt: skip
  references = [
    PowerSGD(first[name][i], 4, *PARAMS[name].shape[-2:])
    for name, i in matrices
  ]
  for step in range(2):  # the ranks stand until the window ends
    tree = gradients_like(PARAMS, step)
    updates = run.step(tree)
    assert_array_equal(ranks_of(run), ranks)
    for (name, i), reference, rank in zip(
      matrices, references, ranks, strict=True
    ):
      shape = (4, -1, *PARAMS[name].shape[-2:])
      own = np.asarray(tree[name], np.float64).reshape(shape)[:, i]
      assert_allclose(
        updates[name].reshape(shape)[0, i], reference.step(own, rank),
        rtol=1e-3, atol=1e-4, err_msg=f"{name} {i}, step {step}",
      )  # fmt: skip
      # Columns beyond the rank serve again when it grows back.
      after = np.asarray(factors(run.state)[name])[0, i]
      assert_array_equal(after[rank:], first[name][i][rank:])
      assert np.all(np.any(after[:rank] != first[name][i][:rank], axis=1))


@pytest.mark.slow
def test_equal_matrices_and_known_spectra():
  """Equal ranks; predicted and measured errors of one spectrum agree."""
  random = np.random.default_rng(0)
  values = 0.8 ** np.arange(30.0)
  u, _ = np.linalg.qr(random.standard_normal((32, 30)))
  v, _ = np.linalg.qr(random.standard_normal((64, 30)))
  w = jnp.asarray((u * values) @ v.T, jnp.float32)
  scales = jnp.array([0.9, 1.0, 1.1, 1.0])[:, None, None]
  run = Pmap(
    edgc(**OPTIONS, allocation=ErrorAllocation(0.0)),
    {"stack": jnp.zeros((4, 32, 64))},
  )
  ranks = []
  for seed in range(16):
    same = gradients_like({"stack": jnp.zeros((1, 32, 64))}, seed)["stack"]
    run.restart()
    for _ in range(5):
      run.step({"stack": jnp.repeat(same, 4, axis=1)})
    values = edgc_jax.metrics(run.state)
    ranks.append(values["matrix_rank"]["stack"])
    assert np.sum(ranks[-1]) == 4 * values["rank"]
  # Equal matrices: the estimates of their errors scatter by a ninth, and one
  # set of them decides ranks that differ by 2 to 6; no matrix is preferred.
  assert np.ptp(ranks, axis=1).max() <= 6
  assert np.ptp(np.mean(ranks, axis=0)) <= 1.5
  run.restart()
  sizes = jnp.array([1.0, 0.5, 1.0, 0.5])[:, None, None]
  predicted, measured = [], []
  for step in range(40):
    run.step({"stack": (w * scales)[:, None] * sizes})
    numbers = edgc_jax.metrics(run.state)
    if step >= 10:
      own = numbers["matrix_predicted_error"]["stack"]
      predicted.append([*own, numbers["predicted_error"]])
      own = numbers["matrix_error"]["stack"]
      measured.append([*own, numbers["relative_error"]])
  # The residual comes back later: single steps are above and below.
  assert_allclose(
    np.mean(predicted, axis=0), np.mean(measured, axis=0), atol=0.05
  )
  assert np.mean(measured) > 0.05


@pytest.mark.slow
def test_a_change_of_the_rank_within_a_window():
  """Ranks are equal from the change to the end of the window."""
  tx = float32.powersgd(
    {0: 8, 6: 4}, allocation=ErrorAllocation(0.0), window=4, min_ratio=1.5
  )
  run = Pmap(traced_once(tx), PARAMS)
  found = []
  for step in range(12):
    run.step(gradients(step))
    found.append(ranks_of(run))
    rank = edgc_jax.metrics(run.state)["rank"]
    assert rank == (8 if step < 6 else 4)
    assert np.all(found[-1] @ SIDES <= rank * SIDES.sum(axis=0))
  assert_array_equal(found[:4], np.full((4, 5), 8))
  assert_array_equal(found[6:8], np.full((2, 5), 4))
  for start, end in ((4, 6), (8, 12)):  # by error
    assert_array_equal(found[start:end], [found[start]] * (end - start))
    assert found[start][1] > found[start][0]
    assert found[start][4] < found[start][0]
  # The loud matrix has the most again, by the errors at the new rank alone.
  assert found[8][1] == 8
  assert int(find(first_replica(run.state)).allocation.level) == 0


# 24 x 24 has at most 12 columns, 48 x 48 has 24.
SQUARES = {"small": jnp.zeros((24, 24)), "stack": jnp.zeros((5, 48, 48))}
SQUARE_SIDES = np.array([(24, 24)] + [(48, 48)] * 5)
LADDER = (0, 4, 8, 16, 24)
YES = jnp.array(True)


@functools.cache
def allocator_of(ladder=LADDER, exponent=0.0):
  """Returns an allocator with compiled programs."""
  ranks = [rank for rank in ladder if rank]
  leaves = with_factors(leaves_in(SQUARES), ranks, 1.0, None)
  shared = ErrorAllocation(exponent)
  allocator = ErrorAllocator(matrices_of(leaves), ladder, shared)
  return allocator, jax.jit(allocator.share_out), jax.jit(allocator.observe)


def uniform_of(level):
  rank = LADDER[level]
  return np.array([min(rank, 12), *[min(rank, 24)] * 5])


def advance(ranks, levels, loud=1.0, lost=0.5):
  """Returns ranks after a window, and what they leave of the budget.

  All matrices have lost a share of their energy; matrix 1 has `loud` times as
  much of it.
  """
  allocator, share_out, _ = allocator_of()
  total = SQUARE_SIDES.prod(axis=1) * np.array([1, loud, 1, 1, 1, 1.0])
  state = allocator.init(levels[0])._replace(
    ranks=jnp.array(ranks, jnp.int32),
    sums=Measured(jnp.float32(lost * total), jnp.float32(total)),
    num_steps=jnp.float32(1.0),
  )
  state = share_out(state, jnp.int32(levels[1]), None)
  ranks = np.asarray(state.ranks)
  assert int(state.level) == levels[1]
  assert float(state.num_steps) == 0.0
  assert_array_equal(state.sums, 0.0)
  left = (uniform_of(levels[1]) - ranks) @ SQUARE_SIDES
  assert np.all(left >= 0), (ranks, left)
  return ranks, left


def test_ranks_of_the_next_window():
  """Between half and twice those before, in proportion to the level."""
  ranks, _ = advance([0] * 6, (0, 3), loud=1000.0)  # after dense steps
  assert_array_equal(ranks, [12, 16, 16, 16, 16, 16])
  ranks, _ = advance([8] * 6, (2, 2), loud=1000.0)
  assert ranks[1] == 16 and np.all(ranks >= 4), ranks
  ranks, _ = advance([4] * 6, (1, 2), loud=1000.0)
  assert ranks[1] == 16
  # However far the level jumps, less than one column of a matrix is left. (If
  # less is lost at rank 4, the model gains nothing in the last columns.)
  for levels in ((1, 3), (1, 4), (2, 4), (4, 1), (3, 1), (0, 3)):
    ranks, left = advance(uniform_of(levels[0]), levels, lost=0.6)
    assert np.all(left < 48), (levels, ranks)
  # 24 x 24 has at most 12 columns, however many bytes are left.
  for before in ([12, *[16] * 5], [12, 24, *[14] * 4], [2, 24] * 3):
    for levels in ((3, 2), (3, 3), (3, 4)):
      ranks, _ = advance(before, levels)
      assert 2 <= ranks[0] <= 12 and np.all(ranks <= 24), (before, ranks)


def test_without_measurements_all_have_one_rank():
  allocator, share_out, _ = allocator_of(ladder=(0, 4, 8), exponent=1.0)
  state = allocator.init(2)._replace(num_steps=jnp.float32(3.0))
  for variance in (jnp.zeros(6), None):
    after = share_out(state, jnp.int32(2), variance)
    assert_array_equal(after.ranks, 8)


def test_another_level_starts_the_window_anew():
  """Its ranks are equal, and the measurements of the old ones are dropped."""
  allocator, _, observe = allocator_of()
  mixed = jnp.array([2, 20, 16, 16, 16, 16], jnp.int32)
  state, ones = allocator.init(3)._replace(ranks=mixed), jnp.ones(6)
  for _ in range(2):
    state = observe(state, jnp.int32(3), Measured(ones, 2 * ones), YES)
  assert_array_equal(state.sums.total, 4.0)
  for level in range(len(LADDER)):
    expected = mixed if level == 3 else uniform_of(level)
    assert_array_equal(allocator.ranks(state, jnp.int32(level)), expected)
  after = observe(state, jnp.int32(1), Measured(3 * ones, 5 * ones), YES)
  assert (int(after.level), float(after.num_steps)) == (1, 1.0)
  assert_array_equal(after.ranks, uniform_of(1))
  assert_array_equal(after.sums, [[3.0] * 6, [5.0] * 6])
  # Even if nothing of the step can be used, and dense steps measure nothing.
  for level, measured, is_usable in (
    (1, Measured(3 * ones, 5 * ones * jnp.inf), YES),
    (1, Measured(ones, ones), ~YES), (0, Measured(ones, ones), YES),
  ):  # fmt: skip
    after = observe(state, jnp.int32(level), measured, is_usable)
    assert (int(after.level), float(after.num_steps)) == (level, 0.0)
    assert_array_equal(after.ranks, uniform_of(level))
    assert_array_equal(after.sums, 0.0)


@pytest.mark.parametrize(
  "before, after, ranks, expected",
  [
    # The level is an index, and the state says nothing of its ladder.
    ((4, 16), (2, 16), [4, 7, 4, 4, 4, 4], [2] * 6),
    ((0, 8), (8,), [0] * 6, [8] * 6),
    ((8,), (0, 8), [8] * 6, [0] * 6),
  ],
)
def test_ranks_of_another_ladder_are_not_used(before, after, ranks, expected):
  (old, *_), (new, *_) = allocator_of(before), allocator_of(after)
  level, ones = jnp.int32(0), jnp.ones(6)
  state = old.init(0)._replace(ranks=jnp.array(ranks, jnp.int32))
  assert_array_equal(new.ranks(state, level), expected)
  seen = new.observe(state, level, Measured(ones, ones), YES)
  assert_array_equal(seen.ranks, expected)


def test_most_columns():
  """Three times the rank, or the larger of 64 and twice it, or the cap."""
  for columns, cap, most in (
    (8, 100, 24), (8, 10, 10), (10, 10, 10), (30, 500, 64), (40, 500, 80),
    (40, 70, 70), (0, 100, 0),
  ):  # fmt: skip
    assert allocation.most_columns(columns, cap) == most


def test_a_power_of_the_relative_scale():
  variance = jnp.array([4.0, 1.0, 1e-30, 0.0])
  for exponent in (0.0, 1.0, 2.0):
    found = allocation.scale_weights(variance, exponent)
    expected = [1.0, 2.0**exponent, 1e12 ** (exponent / 2), 1.0]
    assert_allclose(found, expected, rtol=1e-5)
  assert_array_equal(allocation.scale_weights(jnp.zeros(3), 1.0), 1.0)
