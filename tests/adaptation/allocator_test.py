"""Ranks that `edgc` gives to matrices, for scripted gradients."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
from absl.testing import absltest, parameterized
from helpers.flat_options import edgc
from helpers.meshes import Pmap, find, gradients_like, traced_once
from helpers.reference import PowerSGD

import edgc_jax
from edgc_jax.adaptation.allocation import Allocation, Allocator
from edgc_jax.plan.leaves import Measurement
from edgc_jax.plan.plan import make_plan

PARAMS = {
  "bias": jnp.zeros((30,)),
  "stack": jnp.zeros((3, 32, 64)),
  "tall": jnp.zeros((96, 40)),
  "zero": jnp.zeros((32, 64)),
}
OPTIONS = {
  "rank_max": 8, "rank_min": 4, "window": 2, "warmup_steps": 2,
  "max_warmup_steps": 2, "step_rate": 1.0, "entry_rate": 1.0,
  "min_ratio": 1.5, "scale_exponent": 0.0,
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
def run_of(options):
  return Pmap(traced_once(edgc(**(OPTIONS | dict(options)))), PARAMS)


def fresh(**options):
  """Returns a run in its first state, compiled once for the same options."""
  options = {"curves": "energy"} | options
  run = run_of(tuple(options.items()))
  run.state = run.first_state
  return run


class AllocatorTest(parameterized.TestCase):
  @parameterized.parameters("energy", "entropy", "calibrated")
  def test_bytes_go_where_they_remove_most(self, curves):
    run = fresh(curves=curves)
    owed, before = np.zeros((3, 32, 64)), np.full(5, 8)
    for step in range(10):
      tree = gradients(step)
      owed += np.asarray(tree["stack"], np.float64).mean(0)
      owed -= run.step(tree)["stack"][0]
      # Reallocation loses nothing: the residual holds the rest.
      kept = run.residual()["stack"].mean(0)
      np.testing.assert_allclose(kept, owed, rtol=1e-3, atol=2e-4)
      ranks, values = ranks_of(run), edgc_jax.metrics(run.state)
      budget = values["rank"] * SIDES.sum(axis=0)
      self.assertTrue(np.all(ranks @ SIDES <= budget), (ranks, budget))
      if step < 2:
        np.testing.assert_array_equal(ranks, 8)
      # From one window to the next by a factor of two at most.
      self.assertTrue(np.all(ranks <= 2 * before), (before, ranks))
      self.assertTrue(np.all(ranks >= before // 2), (before, ranks))
      before = ranks
    self.assertEqual(ranks.argmax(), 1)
    self.assertGreaterEqual(ranks[1], 12)
    self.assertEqual(ranks[4], 2)  # the floor
    # Ranks differ, bytes do not.
    self.assertEqual(
      values["wire_bytes"] - 4 * 4 * 5, edgc_jax.wire_bytes(
        PARAMS, values["rank"], min_ratio=1.5
      )
    )  # fmt: skip

  def test_equal_matrices_get_equal_ranks(self):
    params = {"stack": jnp.zeros((4, 32, 64))}
    options = OPTIONS | {"curves": "entropy"}
    run = Pmap(edgc(**options), params)
    same = gradients_like({"stack": jnp.zeros((1, 32, 64))}, 0)["stack"]
    for _ in range(5):
      run.step({"stack": jnp.repeat(same, 4, axis=1)})
    values = edgc_jax.metrics(run.state)
    self.assertEqual(values["matrix_rank"], {"stack": [values["rank"]] * 4})

  def test_a_scale_exponent_of_two_ignores_the_scale(self):
    run = fresh(scale_exponent=2.0)
    for step in range(8):
      run.step(gradients(step))
    self.assertLessEqual(np.ptp(ranks_of(run)[:3]), 2)
    # Without the exponent the same gradients move ranks.
    other = fresh()
    for step in range(8):
      other.step(gradients(step))
    self.assertGreaterEqual(ranks_of(other)[1], 12)

  def test_the_packed_exchange_equals_one_matrix_at_a_time(self):
    """Holds for any ranks within the budget, against NumPy."""
    run = fresh()
    ranks = np.array([3, 12, 7, 2, 13])
    self.assertTrue(np.all(ranks @ SIDES <= 8 * SIDES.sum(axis=0)))
    state = run.state
    stacked = jax.device_put(
      np.tile(np.int32(ranks), (4, 1)), state.allocator.ranks.sharding
    )
    run.state = state._replace(
      allocator=state.allocator._replace(ranks=stacked)
    )
    matrices = [
      ("stack", 0),
      ("stack", 1),
      ("stack", 2),
      ("tall", 0),
      ("zero", 0),
    ]
    references = [
      PowerSGD(state.exchange.factor_q[name][0, i], 4, *PARAMS[name].shape[-2:])
      for name, i in matrices
    ]
    for step in range(2):  # the ranks stand until the window ends
      tree = gradients_like(PARAMS, step)
      updates = run.step(tree)
      for (name, i), reference, rank in zip(
        matrices, references, ranks, strict=True
      ):
        shape = (4, -1, *PARAMS[name].shape[-2:])
        own = np.asarray(tree[name], np.float64).reshape(shape)[:, i]
        np.testing.assert_allclose(
          updates[name].reshape(shape)[0, i], reference.step(own, rank),
          rtol=1e-3, atol=1e-4, err_msg=f"{name} {i}, step {step}",
        )  # fmt: skip

  def test_columns_serve_again_when_a_rank_grows_back(self):
    """Q keeps its columns beyond the rank, bit for bit."""
    run = fresh()
    for step in range(4):
      run.step(gradients(step))
    before = np.asarray(find(run.state).exchange.factor_q["stack"])[0]
    run.step(gradients(4, loud=0.1))
    ranks = ranks_of(run)
    run.step(gradients(5, loud=0.1))
    after = np.asarray(find(run.state).exchange.factor_q["stack"])[0]
    for i in range(3):
      np.testing.assert_array_equal(
        after[i][:, ranks[i] :], before[i][:, ranks[i] :]
      )
      self.assertTrue(np.any(after[i] != before[i]))

  def test_predicted_error_of_known_spectra(self):
    """On gradients of one spectrum, predicted and measured errors agree."""
    random = np.random.default_rng(0)
    values = 0.8 ** np.arange(30.0)
    u, _ = np.linalg.qr(random.standard_normal((32, 30)))
    v, _ = np.linalg.qr(random.standard_normal((64, 30)))
    w = jnp.asarray((u * values) @ v.T, jnp.float32)
    scales = jnp.array([0.9, 1.0, 1.1, 1.0])[:, None, None]
    params = {"a": jnp.zeros((32, 64)), "b": jnp.zeros((32, 64))}
    run = Pmap(edgc(**OPTIONS), params)
    predicted, measured = [], []
    for step in range(40):
      run.step({"a": w * scales, "b": 0.5 * w * scales})
      numbers = edgc_jax.metrics(run.state)
      if step >= 10:
        keys = ("matrix_predicted_error", "matrix_error")
        both = [[numbers[key][name][0] for name in params] for key in keys]
        predicted.append([*both[0], numbers["predicted_error"]])
        measured.append([*both[1], numbers["relative_error"]])
    # The residual comes back later: single steps are above and below.
    np.testing.assert_allclose(
      np.mean(predicted, axis=0), np.mean(measured, axis=0), atol=0.05
    )
    self.assertGreater(np.mean(measured), 0.05)

  def test_limits_keep_the_least_ratio(self):
    plan = make_plan(PARAMS, (0, 4, 8), 1.5)
    wide = plan.__class__(plan.leaves, plan.ladder, 1.5, plan.positions, 3)
    for leaf in wide.matrices:
      for rank in (4, 8):
        limit = wide.limit(leaf, rank)
        self.assertTrue(wide.saves(leaf.view.rows, leaf.view.cols, limit))
        self.assertBetween(limit, rank, 3 * rank)
      self.assertEqual(wide.limit(leaf, 0), 0)

  def test_a_step_that_is_not_finite_is_not_measured(self):
    run = fresh()
    for step in range(3):
      run.step(gradients(step))
    before = run.state.allocator
    tree = gradients(3)
    tree["tall"] = tree["tall"].at[2, 0, 0].set(jnp.nan)
    run.step(tree)
    chex.assert_trees_all_equal(run.state.allocator.sums, before.sums)


SQUARES = {"small": jnp.zeros((24, 24)), "stack": jnp.zeros((5, 48, 48))}
SQUARE_SIDES = np.array([(24, 24)] + [(48, 48)] * 5)


class AdvanceTest(parameterized.TestCase):
  """Ranks from window to window, with made-up measurements."""

  def advance(self, ranks, rungs, loud=1.0):
    """Returns ranks after a window; columns of matrix 1 have gain `loud`."""
    plan = make_plan(SQUARES, (0, 4, 8, 16, 24), 1.0)
    plan = dataclasses.replace(plan, spread=3)
    allocator = Allocator(plan, Allocation(curves="energy", scale_exponent=0.0))
    state = allocator.init(rungs[0])
    width = state.sums.columns.shape[1]
    gains = np.array([1.0, loud, 1.0, 1.0, 1.0, 1.0])[:, None]
    columns = np.where(np.arange(width) < np.array(ranks)[:, None], gains, 0.0)
    state = state._replace(
      ranks=jnp.array(ranks, jnp.int32),
      sums=Measurement(
        *(jnp.asarray(x, jnp.float32) for x in (50 * gains[:, 0], columns))
      ),
      num_steps=jnp.float32(1.0),
    )
    rungs = [jnp.int32(rung) for rung in rungs]
    state = jax.jit(allocator.share_out)(state, rungs, jnp.ones(6))
    uniform, ranks = plan.uniform_ranks[int(rungs[1])], np.asarray(state.ranks)
    budget = uniform @ SQUARE_SIDES
    self.assertTrue(np.all(ranks @ SQUARE_SIDES <= budget), (ranks, budget))
    return ranks, uniform, budget

  @parameterized.parameters(
    ([0, 16, 16, 16, 16, 16],), ([0, 40, 10, 10, 10, 10],)
  )
  def test_a_dense_matrix_gets_the_uniform_rank(self, ranks):
    """24 x 24 is compressed at ranks up to 8."""
    after, uniform, _ = self.advance(ranks, (3, 2))
    self.assertEqual(after[0], uniform[0])
    self.assertEqual(uniform[0], 8)

  @parameterized.parameters((1, 3), (1, 4), (2, 4), (4, 1), (3, 1), (0, 3))
  def test_no_rung_leaves_the_buffer_half_empty(self, before, after):
    """Ranks follow the rung, however far it jumps."""
    plan = make_plan(SQUARES, (0, 4, 8, 16, 24), 1.0)
    ranks, uniform, budget = self.advance(
      plan.uniform_ranks[before].tolist(), (before, after)
    )
    # Less than one column of a matrix is left in either buffer.
    self.assertTrue(
      np.all(budget - ranks @ SQUARE_SIDES < 48), (ranks, uniform)
    )

  def test_bounded_by_half_and_twice_in_proportion_to_the_rung(self):
    ranks, _, _ = self.advance([8, 8, 8, 8, 8, 8], (2, 2), loud=1000.0)
    self.assertEqual(ranks[1], 16)
    self.assertTrue(np.all(ranks[[0, 2, 3, 4, 5]] >= 4), ranks)
    ranks, _, _ = self.advance([4, 4, 4, 4, 4, 4], (1, 2), loud=1000.0)
    self.assertEqual(ranks[1], 16)

  def test_without_measurements_all_have_one_rank(self):
    plan = make_plan(SQUARES, (0, 4, 8), 1.0)
    plan = dataclasses.replace(plan, spread=3)
    allocator = Allocator(plan, Allocation(curves="energy"))
    state = allocator.init(2)._replace(num_steps=jnp.float32(3.0))
    rungs = (jnp.int32(2), jnp.int32(2))
    state = jax.jit(allocator.share_out)(state, rungs, jnp.zeros(6))
    np.testing.assert_array_equal(state.ranks, 8)


if __name__ == "__main__":
  absltest.main()
