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
from edgc_jax.budget.fixed_budget import FixedBudget
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
    full(width if limits is None else jnp.array(limits)),
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
  for i in range(num):
    if ranks[i] < limits[i]:
      assert np.any(left < sides[i]), i


def test_equal_matrices_get_equal_ranks():
  for row in (0.5 ** np.arange(8.0), np.ones(8), 1 + np.arange(8.0)):
    gains = np.tile(row, (5, 1))
    sides = np.tile([6, 9], (5, 1))
    ranks = allocate(gains, sides, 4 * sides.sum(axis=0), 1)
    assert_array_equal(ranks, 4)


def test_a_matrix_without_gain_stays_at_its_floor():
  gains = np.array([[4.0, 3, 2, 1, 1, 1, 1, 1], [0.0] * 8])
  sides = np.array([[6, 9], [6, 9]])
  assert_array_equal(allocate(gains, sides, (48, 72), 2), [6, 2])
  assert_array_equal(allocate(np.zeros((2, 8)), sides, (48, 72), 2), [2, 2])


def test_limit_0_gives_rank_0():
  gains = np.ones((3, 4))
  sides = np.tile([2, 3], (3, 1))
  ranks = _allocate(
    gains, ((2, 3),) * 3, jnp.array([8, 12]), jnp.array([1, 0, 1]),
    jnp.array([4, 0, 4]),
  )  # fmt: skip
  assert_array_equal(ranks, [2, 0, 2])
  assert np.all(np.asarray(ranks) @ sides <= (8, 12))


def test_any_scale():
  gains = spectra(np.random.default_rng(0), 4, 6)
  sides = np.tile([2, 3], (4, 1))
  expected = allocate(gains, sides, (20, 30))
  for scale in (1e-30, 1e30):
    assert_array_equal(allocate(gains * scale, sides, (20, 30)), expected)


def test_calibrated_curves_of_known_spectra():
  """Measured losses give nearly the ranks that the exact spectra give."""
  random = np.random.default_rng(0)
  num, width, rank = 6, 24, 8
  exact = spectra(random, num, width)
  sides = np.tile([32, 64], (num, 1))
  energy = exact.sum(axis=1)
  gains = error_model.calibrated_gains(
    jnp.asarray(energy / (32 * 64), jnp.float32),
    sides,
    width,
    jnp.asarray(exact[:, rank:].sum(axis=1) / energy, jnp.float32),
    jnp.full(num, rank),
  )
  budgets = rank * sides.sum(axis=0)
  found = removed(exact, allocate(gains, sides, budgets, 2))
  oracle = removed(exact, allocate(exact, sides, budgets, 2))
  uniform = removed(exact, np.full(num, rank))
  assert found > 0.98 * oracle
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


def fresh(scale_exponent=0.0):
  """Returns a run in its first state, compiled once for the same options."""
  return run_of(scale_exponent).restart()


@pytest.mark.slow
def test_bytes_go_where_they_remove_most():
  run = fresh()
  owed, before = np.zeros((3, 32, 64)), np.full(5, 8)
  for step in range(10):
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
  assert ranks.argmax() == 1
  assert ranks[1] >= 12
  assert ranks[4] == 2  # the floor
  # Ranks differ, bytes do not.
  sent = float32.wire_bytes(PARAMS, values["rank"], min_ratio=1.5, rank_min=4)
  assert values["wire_bytes"] - 4 * 4 * 5 == sent


@pytest.mark.slow
def test_a_scale_exponent_of_two_of_a_run_ignores_the_scale():
  found = []
  for loud in (1.0, 8.0):
    run = fresh(scale_exponent=2.0)
    for step in range(8):
      run.step(gradients(step, loud))
      found.append(ranks_of(run))
  assert_array_equal(found[:8], found[8:])
  # Without the exponent the same gradients move ranks.
  other = fresh()
  for step in range(8):
    other.step(gradients(step))
  assert ranks_of(other)[1] >= 12


@pytest.mark.slow
def test_the_packed_exchange_equals_one_matrix_at_a_time():
  """Holds for any ranks within the budget, against NumPy."""
  run = fresh()
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
  first = factors(state)
  references = [
    PowerSGD(first[name][0, i], 4, *PARAMS[name].shape[-2:])
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


@pytest.mark.slow
def test_columns_serve_again_when_a_rank_grows_back():
  """Q keeps its columns beyond the rank, bit for bit."""
  run = fresh()
  for step in range(4):
    run.step(gradients(step))
  before = np.asarray(factors(run.state)["stack"])[0]
  run.step(gradients(4, loud=0.1))
  ranks = ranks_of(run)
  run.step(gradients(5, loud=0.1))
  after = np.asarray(factors(run.state)["stack"])[0]
  for i in range(3):
    assert_array_equal(after[i][ranks[i] :], before[i][ranks[i] :])
    assert np.any(after[i] != before[i])


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
  same = gradients_like({"stack": jnp.zeros((1, 32, 64))}, 0)["stack"]
  for _ in range(5):
    run.step({"stack": jnp.repeat(same, 4, axis=1)})
  values = edgc_jax.metrics(run.state)
  ranks = np.array(values["matrix_rank"]["stack"])
  # Equal matrices: up to the noise of the estimate of each one's error.
  assert ranks.sum() == 4 * values["rank"]
  assert np.ptp(ranks) <= 2
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
def test_a_step_that_is_not_finite_is_not_measured():
  run = fresh()
  for step in range(3):
    run.step(gradients(step))
  before = run.state.allocation
  tree = gradients(3)
  tree["tall"] = tree["tall"].at[2, 0, 0].set(jnp.nan)
  run.step(tree)
  chex.assert_trees_all_equal(run.state.allocation.sums, before.sums)
  chex.assert_trees_all_equal(run.state.allocation.num_steps, before.num_steps)


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


SQUARES = {"small": jnp.zeros((24, 24)), "stack": jnp.zeros((5, 48, 48))}
SQUARE_SIDES = np.array([(24, 24)] + [(48, 48)] * 5)
LADDER = (0, 4, 8, 16, 24)


@functools.cache
def allocator_of(ladder=LADDER, exponent=0.0, without=""):
  """Returns an allocator with compiled programs.

  24 x 24 has at most 12 columns, 48 x 48 has 24.
  """
  tree = {name: leaf for name, leaf in SQUARES.items() if name != without}
  ranks = [rank for rank in ladder if rank]
  leaves = with_factors(leaves_in(tree), ranks, 1.0, None)
  shared = ErrorAllocation(exponent)
  allocator = ErrorAllocator(matrices_of(leaves), ladder, shared)
  return allocator, jax.jit(allocator.share_out), jax.jit(allocator.observe)


def uniform_of(level):
  rank = LADDER[level]
  return np.array([min(rank, 12), *[min(rank, 24)] * 5])


def advance(ranks, levels, loud=1.0, lost=0.5):
  """Returns ranks after a window; matrix 1 has `loud` times the energy.

  All have lost a share of their energy.
  """
  allocator, share_out, _ = allocator_of()
  total = SQUARE_SIDES.prod(axis=1) * np.array([1, loud, 1, 1, 1, 1.0])
  state = allocator.init(levels[0])._replace(
    ranks=jnp.array(ranks, jnp.int32),
    sums=Measured(jnp.float32(lost * total), jnp.float32(total)),
    num_steps=jnp.float32(1.0),
  )
  state = share_out(state, jnp.int32(levels[1]), None)
  ranks, uniform = np.asarray(state.ranks), uniform_of(levels[1])
  assert int(state.level) == levels[1]
  assert float(state.num_steps) == 0.0
  assert_array_equal(state.sums, 0.0)
  budget = uniform @ SQUARE_SIDES
  assert np.all(ranks @ SQUARE_SIDES <= budget), (ranks, budget)
  return ranks, uniform, budget


def test_after_dense_steps_all_have_the_uniform_rank():
  ranks, uniform, _ = advance([0] * 6, (0, 3), loud=1000.0)
  assert_array_equal(ranks, uniform)
  assert_array_equal(ranks, [12, 16, 16, 16, 16, 16])


@pytest.mark.parametrize(
  "ranks", [[12, 16, 16, 16, 16, 16], [12, 24, 14, 14, 14, 14], [2, 24] * 3]
)
@pytest.mark.slow
def test_a_capped_matrix_stays_below_its_cap(ranks):
  """24 x 24 has at most 12 columns, however many bytes are left."""
  for levels in ((3, 2), (3, 3), (3, 4)):
    after, *_ = advance(ranks, levels)
    assert 2 <= after[0] <= 12
    assert np.all(after <= 24), after


@pytest.mark.parametrize(
  "before, after", [(1, 3), (1, 4), (2, 4), (4, 1), (3, 1), (0, 3)]
)
def test_no_level_leaves_the_buffer_half_empty(before, after):
  """Ranks follow the level, however far it jumps."""
  # If less is lost at rank 4, the model gains nothing in the last columns, up
  # to rounding, and they need not be taken.
  ranks, uniform, budget = advance(
    uniform_of(before).tolist(), (before, after), lost=0.6
  )
  # Less than one column of a matrix is left in either buffer.
  assert np.all(budget - ranks @ SQUARE_SIDES < 48), (ranks, uniform)


def test_bounded_by_half_and_twice_in_proportion_to_the_level():
  ranks, _, _ = advance([8, 8, 8, 8, 8, 8], (2, 2), loud=1000.0)
  assert ranks[1] == 16
  assert np.all(ranks[[0, 2, 3, 4, 5]] >= 4), ranks
  ranks, _, _ = advance([4, 4, 4, 4, 4, 4], (1, 2), loud=1000.0)
  assert ranks[1] == 16


@pytest.mark.parametrize("scale", [1e-3, 8.0, 100.0])
@pytest.mark.parametrize("sampled", [True, False])
@pytest.mark.slow
def test_a_scale_exponent_of_two_ignores_the_scale(scale, sampled):
  """Matrices of equal spectra have equal ranks, whatever their scale."""
  squared = jnp.array([1, scale**2, 1, 1, 1], jnp.float32)
  variance = squared if sampled else None
  ranks = {}
  for exponent in (0.0, 2.0):
    allocator, share_out, _ = allocator_of(exponent=exponent, without="small")
    total = 48 * 48 * squared
    state = allocator.init(2)._replace(
      sums=Measured(0.5 * total, total), num_steps=jnp.float32(1.0)
    )
    ranks[exponent] = share_out(state, jnp.int32(2), variance).ranks
  assert_array_equal(ranks[2.0], 8)
  assert ranks[0.0][1] == (16 if scale > 1 else 4)


def test_without_measurements_all_have_one_rank():
  allocator, share_out, _ = allocator_of(ladder=(0, 4, 8), exponent=1.0)
  state = allocator.init(2)._replace(num_steps=jnp.float32(3.0))
  for variance in (jnp.zeros(6), None):
    after = share_out(state, jnp.int32(2), variance)
    assert_array_equal(after.ranks, 8)


def test_another_level_starts_the_window_anew():
  """Its ranks are equal, and the measurements of the old ones are dropped."""
  allocator, _, observe = allocator_of()
  state = allocator.init(3)
  mixed = jnp.array([2, 20, 16, 16, 16, 16], jnp.int32)
  state = state._replace(ranks=mixed)
  ones = jnp.ones(6)
  for _ in range(2):
    state = observe(
      state, jnp.int32(3), Measured(ones, 2 * ones), jnp.array(True)
    )
  assert_array_equal(allocator.ranks(state, jnp.int32(3)), mixed)
  assert_array_equal(state.sums.total, 4.0)
  for level in range(len(LADDER)):
    if level != 3:
      assert_array_equal(
        allocator.ranks(state, jnp.int32(level)), uniform_of(level)
      )
  after = observe(
    state, jnp.int32(1), Measured(3 * ones, 5 * ones), jnp.array(True)
  )
  assert (int(after.level), float(after.num_steps)) == (1, 1.0)
  assert_array_equal(after.ranks, uniform_of(1))
  assert_array_equal(after.sums, [[3.0] * 6, [5.0] * 6])
  # Even if nothing of the step can be used.
  bad = Measured(3 * ones, 5 * ones * jnp.inf)
  for measured, is_usable in ((bad, True), (Measured(ones, ones), False)):
    after = observe(state, jnp.int32(1), measured, jnp.array(is_usable))
    assert (int(after.level), float(after.num_steps)) == (1, 0.0)
    assert_array_equal(after.sums, 0.0)
  # Dense steps measure nothing.
  after = observe(state, jnp.int32(0), Measured(ones, ones), jnp.array(True))
  assert (int(after.level), float(after.num_steps)) == (0, 0.0)
  assert_array_equal(after.ranks, 0)


@pytest.mark.parametrize(
  "before, after, level, ranks, expected",
  [
    # The level is an index, and the state says nothing of its ladder.
    ((4, 16), (2, 16), 0, [4, 7, 4, 4, 4, 4], [2] * 6),
    ((0, 8), (8,), 0, [0] * 6, [8] * 6),
    ((8,), (0, 8), 0, [8] * 6, [0] * 6),
  ],
)
def test_ranks_of_another_ladder_are_not_used(
  before, after, level, ranks, expected
):
  (old, *_), (new, *_) = allocator_of(before), allocator_of(after)
  level = jnp.int32(level)
  state = old.init(0)._replace(ranks=jnp.array(ranks, jnp.int32))
  assert_array_equal(new.ranks(state, level), expected)
  ones = jnp.ones(6)
  seen = new.observe(state, level, Measured(ones, ones), jnp.array(True))
  assert_array_equal(seen.ranks, expected)


def test_a_fixed_budget_may_change_the_level_in_mid_window():
  """As the reducer runs them: the budget names the level of each step."""
  budget = FixedBudget({0: 16, 6: 8}, window=4)
  allocator, share_out, observe = allocator_of(ladder=(8, 16))
  state, ranks = allocator.init(budget.first_level), []
  total = SQUARE_SIDES.prod(axis=1) * jnp.array([1, 9.0, 1, 1, 1, 1])
  for count in range(12):
    level, _ = budget.levels((), jnp.int32(count))
    if count and count % budget.window == 0:
      state = share_out(state, level, budget.variance(()))
    ranks.append(np.asarray(allocator.ranks(state, level)))
    state = observe(state, level, Measured(0.5 * total, total), jnp.array(True))
  for count, row in enumerate(ranks):
    uniform = uniform_of(3 if count < 6 else 2)
    if count < 4 or 6 <= count < 8:
      assert_array_equal(row, uniform, f"step {count}")
    else:
      assert row[1] > uniform[1], f"step {count}"


def test_limits_keep_the_least_ratio():
  leaves = with_factors(leaves_in(PARAMS), (4, 8), 1.5, None)
  for leaf in matrices_of(leaves):
    m, n = leaf.sides
    for rank in (4, 8):
      limit = allocation.most_columns(leaf.columns(rank), leaf.cap)
      assert m * n >= 1.5 * limit * (m + n)
      assert rank <= limit <= 3 * rank
    assert allocation.most_columns(leaf.columns(0), leaf.cap) == 0


@pytest.mark.parametrize(
  "columns, cap, most",
  [
    (8, 100, 24),  # three times the rank
    (8, 10, 10),  # the cap
    (10, 10, 10),
    (30, 500, 64),  # the larger of 64 and twice the rank
    (40, 500, 80),
    (40, 70, 70),
    (0, 100, 0),
  ],
)
def test_by_hand(columns, cap, most):
  assert allocation.most_columns(columns, cap) == most


def test_names():
  state = float32.powersgd(8, min_ratio=1.5).init(PARAMS)
  assert state.allocation == ()
  assert allocation.allocation_of("uniform") is None
  assert allocation.allocation_of("error") == ErrorAllocation(1.0)
  own = ErrorAllocation(0.5)
  assert allocation.allocation_of(own) is own


@pytest.mark.parametrize("exponent", [0.0, 1.0, 2.0])
def test_a_power_of_the_relative_scale(exponent):
  variance = jnp.array([4.0, 1.0, 1e-30, 0.0])
  found = allocation.scale_weights(variance, exponent)
  expected = [1.0, 2.0**exponent, 1e12 ** (exponent / 2), 1.0]
  assert_allclose(found, expected, rtol=1e-5)


def test_nothing_measured():
  found = allocation.scale_weights(jnp.zeros(3), 1.0)
  assert_array_equal(found, 1.0)
