"""Exchanges of pipeline stages: each stage has a rank of its own."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from absl.testing import absltest, parameterized
from helpers import float32
from helpers.collective_order import unordered
from helpers.meshes import (
  AXIS,
  Pmap,
  factors,
  find,
  residuals,
  stage_mesh,
  traced_once,
  with_field,
)
from helpers.stage_runs import (
  LADDER,
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
from edgc_jax.budget import alignment, ladder
from edgc_jax.leaves.leaf import leaves_in
from edgc_jax.measure import hlo
from edgc_jax.methods.low_rank import with_factors
from edgc_jax.reducer import rounds
from edgc_jax.wire import agreement

pytestmark = [
  pytest.mark.slow,
  # Scales change from window to window, without an announcement.
  pytest.mark.filterwarnings("ignore:The entropy of the gradients"),
]


def optimize(wanted):
  """Sets XLA's optimisations, which tests do without to compile quickly."""
  jax.config.update("jax_disable_most_optimizations", not wanted)


@functools.cache
def run_of(align):
  """Returns a run of `edgc`, compiled once for all tests."""
  return Run(traced_once(make_edgc(align=align)))


@functools.cache
def bytes_at(exchange):
  """Returns the bytes of one of the two exchanges at each rank."""
  leaves = leaves_in(local_params(), placement_fn=placement)
  leaves = with_factors(leaves, LADDER[1:], 1.2, None)
  own = [leaf for leaf in leaves if leaf.exchange == exchange]
  return rounds.count_bytes(own, LADDER, None).tolist()


class Alone:
  """The exchange of some leaves of one stage, without other stages.

  Each step starts from the state of the stage: rounding grows with the residual
  from step to step, and would hide small faults.
  """

  def __init__(self, params):
    # Step i has the i-th rank.
    tx = float32.powersgd(dict(enumerate(LADDER)), min_ratio=1.2)
    self.run = Pmap(tx, params, REPLICAS)

  def step(self, rank, grads, state):
    """Returns averaged leaves, and the next residuals and Q.

    Args:
      rank: Of this step.
      grads: Leaves [REPLICAS, ...].
      state: Residuals and Q of the leaves that are compressed.
    """
    own = self.run.first_state
    count = jnp.full(REPLICAS, LADDER.index(rank), jnp.int32)
    for name, tree in zip(("residual", "factor_q"), state, strict=True):
      own = with_field(own, name, filled(tree, find(own).leaves))
    self.run.state = own._replace(count=count)
    updates = self.run.step(grads)
    found = self.run.residual(), factors(self.run.state)
    return (
      jax.tree.map(lambda u: u[0], updates),
      tuple(without_empty(tree) for tree in found),
    )


def without_empty(tree):
  """Drops the leaves of a dictionary that have nothing."""
  is_array = lambda x: not isinstance(x, optax.MaskedNode)  # noqa: E731
  return {name: np.asarray(x) for name, x in tree.items() if is_array(x)}


def filled(tree, like):
  """Reverses `without_empty`, given a dictionary with all leaves."""
  return {name: tree.get(name, optax.MaskedNode()) for name in like}


def part_of(tree, exchange):
  """Returns the leaves of a tree that one exchange sends."""
  if exchange == 0:
    return tree["blocks"]
  return {name: tree[name] for name in ("embedding", "norm")}


def state_of(run, stage, exchange):
  """Returns residuals and Q of one stage, with an axis of replicas."""

  def residual(x):
    return x.reshape(STAGES, REPLICAS, -1, *x.shape[1:])[stage]

  def factor_q(x):
    own = np.split(x, STAGES)[stage]
    return np.broadcast_to(own, (REPLICAS, *own.shape))

  return tuple(
    jax.tree.map(fn, without_empty(part_of(tree, exchange)))
    for fn, tree in (
      (residual, residuals(run.state)), (factor_q, factors(run.state))
    )
  )  # fmt: skip


class StagesExchangeTest(parameterized.TestCase):
  def test_each_stage_has_the_result_of_its_own_rank(self):
    """Each stage computes what it computes alone, over all ranks."""
    run = run_of("slack").restart()
    alone = [Alone(part_of(local_params(), e)) for e in range(2)]
    places = [(s, e) for s in range(STAGES) for e in range(2)]
    seen = set()
    # Each fall or rise of the entropy spans the whole ladder.
    for count, scale in enumerate((1, 1, 1, 1, 0.1, 0.1, 0.1, 0.1, 1, 1, 1)):
      grads = gradients(count, scales=(scale, 0.5, 2.0, 1.0))
      before = {place: state_of(run, *place) for place in places}
      updates = run.step(grads)
      ranks = run.metrics()["rank"]
      seen.add(tuple(ranks))
      total = jnp.broadcast_to(grads["norm"].sum(0), (STAGES, REPLICAS, 40))
      for s, e in places:
        leaves = jax.tree.map(
          lambda g, s=s: g[s], part_of(grads | {"norm": total}, e)
        )
        rank = ranks[0] if e else ranks[s]
        expected, state = alone[e].step(rank, leaves, before[s, e])
        for name, update in part_of(updates, e).items():
          own = update[0 if name == "norm" else s]
          self.assert_close(own, expected[name])
        for found, own in zip(state_of(run, s, e), state, strict=True):
          self.assertEqual(found.keys(), own.keys())
          for name in own:
            self.assert_close(found[name], own[name])
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
    residual = np.asarray(residuals(run.state)["embedding"])
    residual = residual.reshape(STAGES, REPLICAS, *owed.shape[1:]).mean(1)
    self.assertGreater(np.abs(residual).max(), 0.1)
    self.assert_close(sent + residual, owed)

  def assert_close(self, update, expected):
    error = np.linalg.norm(update - expected)
    self.assertLessEqual(error, 5e-6 * np.linalg.norm(expected))

  def test_shared_leaves_are_summed_over_stages_and_dense(self):
    run = run_of("slack").restart()
    for step in range(4):
      grads = gradients(step)
      updates = run.step(grads)
      expected = np.asarray(grads["norm"]).sum(0).mean(0)
      np.testing.assert_allclose(updates["norm"][0], expected, rtol=1e-4)

  def test_ranks_follow_stage_0_and_the_slack(self):
    run = run_of("slack").restart()
    seconds = ladder.exchange_seconds(
      LADDER, bytes_at(0), TIMES["link"], edgc_jax.CompressionModel(0, 0), 2
    )
    t_b = TIMES["backward_seconds"]
    for step in range(8):
      run.step(gradients(step, scales=(1.0 if step < 2 else 0.1, 1, 1, 1)))
      levels = [LADDER.index(rank) for rank in run.metrics()["rank"]]
      ends = alignment.finish_seconds(seconds, levels, t_b)
      self.assertEqual(ends.argmax(), 0)
      for s, level in enumerate(levels[1:], 1):
        better = [*seconds[level + 1 :], seconds[0]]
        if levels[0] and level:
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
    self.assertEqual(int(find(run.state).budget.first_rank), 8)


class WireTest(absltest.TestCase):
  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    # These tests are about the optimised program.
    optimize(True)
    cls.addClassCleanup(optimize, False)
    tx = edgc_jax.skip_nonfinite(make_edgc(), (AXIS, "stage"))
    run = Run(tx, late=True)
    cls.arguments = gradients(0), run.state, run.params
    cls.compiled = run.step_fn.lower(*cls.arguments).compile()
    cls.text = cls.compiled.as_text()

  def test_bytes_of_every_rank_of_both_exchanges(self):
    self.assertCountEqual(
      hlo.wire_bytes_by_rank(self.text), [bytes_at(0), bytes_at(1)]
    )
    shared, late = 4 * 40, 4 * 32 * 40  # summed over the stages
    skips = 4  # of `skip_nonfinite`
    self.assertEqual(
      hlo.wire_bytes_outside_branches(self.text),
      shared + late + skips + agreement.STAGE_CHECK_BYTES,
    )

  def test_no_stage_waits_before_its_own_exchange(self):
    """In the program, collectives over the stages come afterwards."""
    entry = self.text
    self.assertEqual(unordered(entry), [])
    computations = hlo.computations_of(entry)
    entry = entry[entry.index("\nENTRY") :]
    over_stages = [[0, 2, 4, 6], [1, 3, 5, 7]]
    order = []
    for line in entry.splitlines():
      if " conditional(" in line and hlo.ranks_of(line, computations):
        order.append("exchange")
      elif " all-reduce(" in line:
        order.append("stages" if hlo.groups_of(line) == over_stages else "all")
    # Own leaves, late gradients, the rest, agreement on the step.
    self.assertEqual(order[0], "exchange")
    self.assertEqual(order.count("exchange"), 2)
    self.assertIn("stages", order[1 : order.index("exchange", 1)])

  def test_late_gradients_are_averaged(self):
    updates, _ = self.compiled(*self.arguments)
    expected = np.asarray(gradients(0)["embedding"]).mean(1)
    np.testing.assert_allclose(
      np.asarray(updates["embedding"]).reshape(expected.shape),
      expected,
      rtol=1e-5,
    )


class OtherReducersTest(parameterized.TestCase):
  @parameterized.named_parameters(
    ("allreduce", edgc_jax.allreduce),
    ("powersgd", functools.partial(float32.powersgd, 40, min_ratio=0)),
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
