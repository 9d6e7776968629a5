"""Exchanges of pipeline stages: each stage on its own rung."""

import contextlib
import functools
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from absl.testing import absltest, parameterized
from helpers.classes import in_classes
from helpers.collective_order import unordered
from helpers.meshes import AXIS, find, stage_mesh, traced_once
from helpers.stage_runs import (
  REPLICAS,
  STAGES,
  TIMES,
  Run,
  global_params,
  gradients,
  local_params,
  make_edgc,
  param_specs,
  placement,
)
from jax.sharding import PartitionSpec as P

import edgc_jax
from edgc_jax.adaptation import alignment
from edgc_jax.comm import agreement
from edgc_jax.compression import low_rank
from edgc_jax.measure import hlo
from edgc_jax.plan import link_model
from edgc_jax.plan.plan import by_exchange, make_plan

# Jumps of the scale stand for jumps of the entropy.
pytestmark = pytest.mark.filterwarnings("ignore:In .* windows the gradients")


def optimize(wanted):
  """Sets XLA's optimisations, which tests do without to compile quickly."""
  jax.config.update("jax_disable_most_optimizations", not wanted)


@functools.cache
def run_of(align):
  """Returns a run of `edgc`, compiled once for all tests."""
  return Run(traced_once(make_edgc(align=align)))


@functools.cache
def plans():
  """Returns the plans of a stage's own leaves and of the rest."""
  ladder = (0, 2, 4, 6, 8)
  plan = make_plan(local_params(), ladder, 1.2, placement=placement)
  return by_exchange(plan)


@functools.cache
def exchange_alone(part):
  """Returns the exchange of one plan, compiled once."""
  plan = plans()[part]

  def reduce(rung, leaves, residual, factors, key):
    return low_rank.exchange(plan, rung, leaves, residual, factors, key, AXIS)

  return jax.jit(
    jax.vmap(reduce, in_axes=(None, 0, 0, None, None), axis_name=AXIS)
  )


class StageState(NamedTuple):
  """Residual [REPLICAS, ...] and Q of the one leaf that is compressed."""

  residual: jax.Array
  factor_q: jax.Array


class Alone:
  """The exchange of one stage's leaves without other stages.

  Each step starts from the state of the stage: rounding grows with the residual
  from step to step, and would hide small faults.
  """

  def __init__(self, part, stage, path):
    self.part, self.stage, self.path = part, stage, path

  def state(self, run):
    """Returns the state of this stage in `run`."""
    low = find(run.state).exchange
    residual, factor_q = (
      np.asarray(functools.reduce(lambda tree, key: tree[key], self.path, tree))
      for tree in (low.residual, low.factor_q)
    )
    residual = residual.reshape(STAGES, REPLICAS, -1, *residual.shape[1:])[
      self.stage
    ]
    return StageState(residual, np.split(factor_q, STAGES)[self.stage])

  def step(self, state, rank, leaves, count):
    """Returns averaged leaves and the next state."""
    key = jax.random.fold_in(jax.random.key(714), count)
    key = jax.random.fold_in(key, self.part)
    rung = plans()[self.part].ladder.index(rank)
    result = exchange_alone(self.part)(
      rung, leaves, [state.residual], [state.factor_q], key
    )
    averaged = [np.asarray(u[0]) for u in result.averaged]
    return averaged, StageState(result.residual[0], result.factors[0][0])


class StagesExchangeTest(parameterized.TestCase):
  def test_each_stage_has_the_result_of_its_own_rung(self):
    """Each stage computes what it computes alone, over all rungs."""
    run = run_of("slack").restart()
    own = [Alone(0, s, ("blocks", "kernel")) for s in range(STAGES)]
    rest = [Alone(1, s, ("embedding",)) for s in range(STAGES)]
    seen = set()
    # Each fall or rise of the entropy spans the whole ladder.
    for count, scale in enumerate((1, 1, 1, 1, 0.1, 0.1, 0.1, 0.1, 1, 1, 1)):
      grads = gradients(count, scales=(scale, 0.5, 2.0, 1.0))
      before = [alone.state(run) for alone in own + rest]
      updates = run.step(grads)
      ranks = run.metrics()["rank"]
      seen.add(tuple(ranks))
      for s in range(STAGES):
        blocks = [g[s] for g in jax.tree.leaves(grads["blocks"])]
        expected, state = own[s].step(before[s], ranks[s], blocks, count)
        for u, e in zip(
          jax.tree.leaves(updates["blocks"]), expected, strict=True
        ):
          self.assert_close(u[s], e)
        self.assert_state(own[s].state(run), state)
        shared = jnp.broadcast_to(grads["norm"].sum(0), (REPLICAS, 40))
        leaves = [grads["embedding"][s], shared]
        expected, state = rest[s].step(
          before[STAGES + s], ranks[0], leaves, count
        )
        self.assert_close(updates["embedding"][s], expected[0])
        self.assert_state(rest[s].state(run), state)
    self.assertGreater(len({ranks[0] for ranks in seen}), 2)
    self.assertIn((8, 8, 8, 0), seen)
    self.assertIn((2, 6, 8, 8), seen)

  def test_integers_lose_nothing(self):
    """Updates plus mean residuals are the gradients, on every stage."""
    stages = edgc_jax.Stages("stage", placement, align="none")
    tx = edgc_jax.powersgd(4, wire_dtype="int8", min_ratio=1.2, stages=stages)
    run, owed, sent = Run(tx), 0.0, 0.0
    for count in range(3):
      grads = gradients(count)
      updates = run.step(grads)
      owed += np.asarray(grads["embedding"]).mean(1)
      sent += updates["embedding"]
      norm = np.asarray(grads["norm"]).sum(0).mean(0)
      self.assert_close(updates["norm"][0], norm)
    residual = np.asarray(find(run.state).exchange.residual["embedding"])
    residual = residual.reshape(STAGES, REPLICAS, *owed.shape[1:]).mean(1)
    self.assertGreater(np.abs(residual).max(), 0.1)
    self.assert_close(sent + residual, owed)

  def assert_close(self, update, expected):
    error = np.linalg.norm(update - expected)
    self.assertLessEqual(error, 5e-6 * np.linalg.norm(expected))

  def assert_state(self, state, expected):
    self.assert_close(state.residual, expected.residual)
    self.assert_close(state.factor_q, expected.factor_q)

  def test_classes_of_width_change_roundings_only(self):
    plain, classes = run_of("slack").restart(), Run(make_edgc(align="slack"))
    for step in range(6):
      expected = plain.step(gradients(step))
      with in_classes() if step == 0 else contextlib.nullcontext():
        updates = classes.step(gradients(step))
      for u, e in zip(*map(jax.tree.leaves, (updates, expected)), strict=True):
        error = np.linalg.norm(u - e)
        self.assertLessEqual(error, 1e-4 * np.linalg.norm(e))

  def test_shared_leaves_are_summed_over_stages_and_dense(self):
    run = run_of("slack").restart()
    for step in range(4):
      grads = gradients(step)
      updates = run.step(grads)
      expected = np.asarray(grads["norm"]).sum(0).mean(0)
      np.testing.assert_allclose(updates["norm"][0], expected, rtol=1e-4)

  def test_ranks_follow_stage_0_and_the_slack(self):
    run = run_of("slack").restart()
    seconds = link_model.exchange_seconds(plans()[0], TIMES["link"])
    t_b = TIMES["backward_seconds"]
    for step in range(8):
      run.step(gradients(step, scales=(1.0 if step < 2 else 0.1, 1, 1, 1)))
      rungs = run.metrics()["rung"]
      ends = alignment.finish_seconds(seconds, rungs, t_b)
      self.assertEqual(ends.argmax(), 0)
      for s, rung in enumerate(rungs[1:], 1):
        better = [t for t in seconds[rung + 1 :] if rung] + [seconds[0]]
        if rungs[0] and rung:
          self.assertGreater(min(better) - s * t_b, ends[0])
    self.assertEqual(run.metrics()["rank"][0], 2)

  def test_not_aligned_each_stage_follows_its_own_entropy(self):
    run = run_of("none").restart()
    for step in range(6):
      late = step >= 2
      scales = (1.5, 0.1, 1.5, 0.01) if late else (1.0,) * STAGES
      run.step(gradients(step, scales))
    self.assertEqual(run.metrics()["rank"], [8, 2, 8, 2])
    # Leaves that are not a stage's own have the rank of stage 0.
    state = find(run.state)
    self.assertEqual(int(state.controller.lead_rung), 4)


class WireTest(absltest.TestCase):
  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    # These tests are about the optimised program.
    optimize(True)
    cls.addClassCleanup(optimize, False)

  def test_bytes_of_every_rung_of_both_exchanges(self):
    run = run_of("slack").restart()
    compiled = run.step_fn.lower(gradients(0), run.state, run.params).compile()
    self.assertCountEqual(
      hlo.wire_bytes_by_rung(compiled.as_text()),
      [[plan.wire_bytes(r) for r in plan.ladder] for plan in plans()],
    )
    shared = 4 * 40  # summed over the stages
    outside = hlo.wire_bytes_outside_branches(compiled.as_text())
    self.assertEqual(outside, shared + agreement.STAGE_CHECK_BYTES)

  def test_no_stage_waits_before_its_own_exchange(self):
    """In the program, collectives over the stages come afterwards."""
    run = Run(edgc_jax.skip_nonfinite(make_edgc(), (AXIS, "stage")), late=True)
    lowered = run.step_fn.lower(gradients(0), run.state, run.params)
    entry = lowered.compile().as_text()
    self.assertEqual(unordered(entry), [])
    computations = hlo.computations_of(entry)
    entry = entry[entry.index("\nENTRY") :]
    over_stages = [[0, 2, 4, 6], [1, 3, 5, 7]]
    order = []
    for line in entry.splitlines():
      if " conditional(" in line and hlo.rungs_of(line, computations):
        order.append("exchange")
      elif " all-reduce(" in line:
        order.append("stages" if hlo.groups_of(line) == over_stages else "all")
    # Own leaves, late gradients, the rest, agreement on the step.
    self.assertEqual(order[0], "exchange")
    self.assertEqual(order.count("exchange"), 2)
    self.assertIn("stages", order[1 : order.index("exchange", 1)])
    updates = run.step(gradients(0))
    expected = np.asarray(gradients(0)["embedding"]).mean(1)
    np.testing.assert_allclose(
      updates["embedding"].reshape(expected.shape), expected, rtol=1e-5
    )


class OtherReducersTest(parameterized.TestCase):
  @parameterized.named_parameters(
    ("allreduce", edgc_jax.allreduce),
    ("powersgd", functools.partial(edgc_jax.powersgd, 40, min_ratio=0)),
    ("topk", functools.partial(edgc_jax.topk, 1.0, min_size=1)),
  )
  def test_without_loss_updates_are_means(self, make):
    tx = make(stages=edgc_jax.Stages("stage", placement))
    run = Run(optax.chain(tx, edgc_jax.clip_by_global_norm(1e9, "stage")))
    grads = gradients(0)
    updates = run.step(grads)
    expected = jax.tree.map(lambda g: np.asarray(g).mean(1), grads)
    chex.assert_trees_all_equal_shapes(updates["blocks"], expected["blocks"])
    chex.assert_trees_all_close(
      updates["blocks"], expected["blocks"], rtol=1e-4, atol=1e-5
    )
    np.testing.assert_allclose(
      updates["norm"][0], expected["norm"].sum(0), rtol=1e-4
    )
    self.assertLen(run.metrics()["wire_bytes"], STAGES)

  def test_clipping_uses_the_norm_over_all_stages(self):
    reducer = edgc_jax.allreduce(stages=edgc_jax.Stages("stage", placement))
    tx = optax.chain(reducer, edgc_jax.clip_by_global_norm(2.0, "stage"))
    updates = Run(tx).step(gradients(0))
    squared_norm = optax.tree.norm(updates, squared=True)
    self.assertAlmostEqual(float(squared_norm), 4.0, 4)


class AccumulateTest(parameterized.TestCase):
  @parameterized.named_parameters(
    ("allreduce", edgc_jax.allreduce, {}),
    ("powersgd", functools.partial(edgc_jax.powersgd, 2), {"min_ratio": 1.2}),
    ("edgc", make_edgc, {"rank_min": 8}),
  )
  def test_every_1_is_the_plain_chain(self, make, options):
    """This includes shared leaves that JAX has summed over the stages."""
    if make is not make_edgc:
      options = options | {"stages": edgc_jax.Stages("stage", placement)}
    params, specs = global_params(), param_specs()
    mesh = stage_mesh(STAGES, REPLICAS)
    results = []
    for every in (None, 1):
      tx = make(**options)
      tx = tx if every is None else edgc_jax.accumulate(tx, every)
      state_specs = edgc_jax.state_specs(
        tx, params, mesh=mesh, param_specs=specs
      )

      def step(grads, norm, state, tx=tx):
        local = jax.tree.map(lambda g: g[0, 0], grads)
        # Equal on all stages, and not typed as varying over them.
        return tx.update(local | {"norm": norm[0]}, state)

      run = jax.jit(
        jax.shard_map(
          step, mesh=mesh, in_specs=(P("stage", AXIS), P(AXIS), state_specs),
          out_specs=(specs, state_specs),
        )
      )  # fmt: skip
      state = jax.jit(
        jax.shard_map(
          tx.init, mesh=mesh, in_specs=(specs,), out_specs=state_specs
        )
      )(params)
      for count in range(3):
        updates, state = run(
          gradients(count), gradients(count)["norm"][0], state
        )
      results.append(updates)
    chex.assert_trees_all_close(*results, rtol=1e-5, atol=1e-6)


if __name__ == "__main__":
  absltest.main()
