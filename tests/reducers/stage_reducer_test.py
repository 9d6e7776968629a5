"""Reducers on pipeline stages times replicas: each stage on its own rung."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from absl.testing import absltest, parameterized
from helpers.collective_order import unordered
from helpers.flat_options import edgc
from helpers.meshes import AXIS, PARTED_BYTES, find, stage_mesh, window_bytes
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import edgc_jax
from edgc_jax.adaptation import alignment
from edgc_jax.comm import agreement
from edgc_jax.compression import error_feedback, low_rank
from edgc_jax.measure import hlo
from edgc_jax.plan import link_model
from edgc_jax.plan.plan import by_exchange, make_plan

# Scales that jump stand for entropies that do.
pytestmark = pytest.mark.filterwarnings("ignore:In .* windows the gradients")

STAGES, REPLICAS = 4, 2
# Of one stage: what is its own, a part of a split tensor, a shared leaf.
LOCAL = {
  "blocks": {"bias": (1, 24), "kernel": (2, 48, 40)},
  "embedding": (32, 40),
  "norm": (40,),
}
# Every rank differs, and stage 3 has time for a dense exchange.
TIMES = {
  "link": edgc_jax.LinkModel(latency=1e-6, bandwidth=1e6),
  "backward_seconds": 3.5e-3,
}
OPTIONS = {
  "rank_max": 8, "rank_min": 2, "rank_multiple": 2, "window": 2,
  "warmup_steps": 2, "max_warmup_steps": 2, "step_rate": 1.0,
  "min_ratio": 1.2, "max_rank_step": 8,
  "granularity": "stage", "warmup_rank": None,
}  # fmt: skip


def optimize(wanted):
  """Programs that run a few steps only are compiled faster without."""
  jax.config.update("jax_disable_most_optimizations", not wanted)


def placement(path, shape):
  del shape
  names = {"blocks": "own", "embedding": "split", "norm": "shared"}
  return names[re.match(r"\['(\w+)'\]", path).group(1)]


def make_edgc(**options):
  return edgc(
    stage_axis="stage", placement=placement, **(OPTIONS | TIMES | options)
  )


def spec_of(path):
  return P() if placement(path, ()) == "shared" else P("stage")


def global_params():
  return jax.tree_util.tree_map_with_path(
    lambda path, shape: jnp.zeros(
      shape
      if spec_of(jax.tree_util.keystr(path)) == P()
      else (STAGES * shape[0], *shape[1:])
    ),
    LOCAL,
    is_leaf=lambda x: isinstance(x, tuple),
  )


def param_specs():
  return jax.tree_util.tree_map_with_path(
    lambda path, _: spec_of(jax.tree_util.keystr(path)),
    LOCAL,
    is_leaf=lambda x: isinstance(x, tuple),
  )


def gradients(seed, scales=(1.0,) * STAGES):
  """[STAGES, REPLICAS, ...] arrays, of a size for each stage."""
  random = np.random.default_rng(seed)
  sizes = np.array(scales, np.float32)

  def draw(shape):
    values = random.standard_normal((STAGES, REPLICAS, *shape))
    values *= sizes.reshape(-1, *[1] * (values.ndim - 1))
    return jnp.asarray(values, jnp.float32)

  return jax.tree.map(draw, LOCAL, is_leaf=lambda x: isinstance(x, tuple))


class Run:
  """Steps of a transformation on the mesh, with scripted gradients."""

  def __init__(self, tx, late=False):
    self.mesh = stage_mesh(STAGES, REPLICAS)
    params, specs = global_params(), param_specs()
    self.specs = edgc_jax.state_specs(
      tx, params, mesh=self.mesh, param_specs=specs
    )
    placed = jax.tree.map(lambda s: NamedSharding(self.mesh, s), specs)
    self.params = jax.device_put(params, placed)
    init = jax.shard_map(
      tx.init, mesh=self.mesh, in_specs=(specs,), out_specs=self.specs
    )
    self.state = jax.jit(init)(self.params)
    self.traces = 0

    def update(grads, state, params):
      self.traces += 1
      local = jax.tree.map(lambda g: g[0, 0], grads)
      options = {}
      if late:
        early = local | {"embedding": jnp.zeros_like(local["embedding"])}

        def late_updates(after):
          # As a pipeline would: what stages need from each other comes last.
          rest = jax.lax.psum(after(local["embedding"]), "stage") * 0
          return local | {"embedding": local["embedding"] + rest}

        options = {"late_updates": late_updates}
      first = early if late else local
      updates, state = tx.update(first, state, params, **options)
      return jax.tree.map(lambda u: u[None], updates), state

    self.step_fn = jax.jit(
      jax.shard_map(
        update,
        mesh=self.mesh,
        in_specs=(P("stage", AXIS), self.specs, specs),
        out_specs=(
          jax.tree.map(lambda s: P("stage") if s != P() else P(None), specs),
          self.specs,
        ),
      )
    )

  def step(self, grads):
    """One update; [STAGES, ...] arrays, shared leaves [1, ...]."""
    updates, self.state = self.step_fn(grads, self.state, self.params)
    return jax.tree.map(np.asarray, updates)

  def metrics(self):
    return edgc_jax.metrics(self.state)


@functools.cache
def shared_run(name):
  """One compilation for all tests of a transformation, and a first state."""
  run = Run(
    {"edgc": make_edgc, "none": lambda: make_edgc(align="none")}[name]()
  )
  return run, run.state


def fresh(name="edgc"):
  run, run.state = shared_run(name)
  return run


def local_params():
  return jax.tree.map(jnp.zeros, LOCAL, is_leaf=lambda x: isinstance(x, tuple))


@functools.cache
def plans():
  """Those of a stage's own leaves and of the rest."""
  ladder = (0, 2, 4, 6, 8)
  plan = make_plan(local_params(), ladder, 1.2, placement=placement)
  return by_exchange(plan)


@functools.cache
def exchange_alone(part):

  plan = plans()[part]

  def reduce(rung, leaves, residual, factors, key):
    matrices = error_feedback.add_residual(plan, leaves, residual)
    result = low_rank.exchange(plan, rung, matrices, factors, key, AXIS)
    return error_feedback.keep_error(plan, leaves, result)

  return jax.jit(
    jax.vmap(reduce, in_axes=(None, 0, 0, None, None), axis_name=AXIS)
  )


class Alone:
  """The exchange of one stage's leaves as if there were no other stage.

  It starts each step where the stage stands: rounding grows from step to step
  with the residual, and would hide small faults.
  """

  def __init__(self, part, stage, path):
    self.part, self.stage, self.path = part, stage, path

  def state(self, run):
    """Residual [REPLICAS, ...] and Q of the one leaf that is compressed."""
    low = find(run.state).exchange
    residual, factor_q = (
      np.asarray(functools.reduce(lambda tree, key: tree[key], self.path, tree))
      for tree in (low.residual, low.factor_q)
    )
    residual = residual.reshape(STAGES, REPLICAS, -1, *residual.shape[1:])[
      self.stage
    ]
    return residual, np.split(factor_q, STAGES)[self.stage]

  def step(self, state, rank, leaves, count):
    """Averaged leaves, and the state afterwards."""
    key = jax.random.fold_in(jax.random.key(714), count)
    key = jax.random.fold_in(key, self.part)
    rung = plans()[self.part].ladder.index(rank)
    residual, factor_q = state
    result = exchange_alone(self.part)(
      rung, leaves, [residual], [factor_q], key
    )
    averaged = [np.asarray(u[0]) for u in result.averaged]
    return averaged, (result.residual[0], result.factors[0][0])


class StagesTest(parameterized.TestCase):
  def test_each_stage_has_exactly_its_own_rungs_result(self):
    """As if every stage were alone, over all rungs, in one trace."""
    run = fresh()
    own = [Alone(0, s, ("blocks", "kernel")) for s in range(STAGES)]
    rest = [Alone(1, s, ("embedding",)) for s in range(STAGES)]
    seen = set()
    # The fall of the entropy is worth the whole ladder, and so is its rise.
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
    self.assertEqual(run.traces, 1)
    self.assertGreater(len({ranks[0] for ranks in seen}), 2)
    self.assertIn((8, 8, 8, 0), seen)
    self.assertIn((2, 6, 8, 8), seen)

  def assert_close(self, update, expected):
    error = np.linalg.norm(update - expected)
    self.assertLessEqual(error, 5e-6 * np.linalg.norm(expected))

  def assert_state(self, state, expected):
    for got, wanted in zip(state, expected, strict=True):
      self.assert_close(got, wanted)

  def test_shared_leaves_are_summed_over_stages_and_dense(self):
    run = fresh()
    for step in range(4):
      grads = gradients(step)
      updates = run.step(grads)
      expected = np.asarray(grads["norm"]).sum(0).mean(0)
      np.testing.assert_allclose(updates["norm"][0], expected, rtol=1e-4)

  def test_ranks_follow_stage_0_and_the_slack(self):
    run = fresh()
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
    run = fresh("none")
    for step in range(6):
      late = step >= 2
      scales = (1.5, 0.1, 1.5, 0.01) if late else (1.0,) * STAGES
      run.step(gradients(step, scales))
    self.assertEqual(run.metrics()["rank"], [8, 2, 8, 2])
    # What is not their own goes at the rank of stage 0.
    state = find(run.state)
    self.assertEqual(int(state.controller.lead_rung), 4)

  def test_entropy_is_that_of_each_stage(self):
    run = fresh()
    scales = (1.0, 0.5, 2.0, 1e-3)
    run.step(gradients(0, scales))
    gaussian = 0.5 * np.log(2 * np.pi * np.e)
    np.testing.assert_allclose(
      run.metrics()["entropy"], gaussian + np.log(scales), atol=0.03
    )

  def test_nonfinite_gradient_of_one_stage_skips_the_step_on_all(self):
    run = fresh()
    for step in range(4):
      run.step(gradients(step))
    before = find(run.state).exchange
    for leaf in (("blocks", "kernel"), ("embedding",), ("norm",)):
      grads = gradients(4)
      part = grads if len(leaf) == 1 else grads[leaf[0]]
      index = (2, 1) + (0,) * (part[leaf[-1]].ndim - 2)
      part[leaf[-1]] = part[leaf[-1]].at[index].set(jnp.nan)
      for update in jax.tree.leaves(run.step(grads)):
        np.testing.assert_array_equal(update, np.zeros_like(update))
      jax.tree.map(
        np.testing.assert_array_equal, find(run.state).exchange, before
      )
    self.assertEqual(run.metrics()["skipped_steps"], 3)

  def test_metrics_count_what_a_stage_sends(self):
    run = fresh()
    local = local_params()
    for step in range(4):
      run.step(gradients(step))
      numbers = run.metrics()
      sample = 4 * 4 * 2  # of the two matrices of one leaf
      more = sample + agreement.STAGE_CHECK_BYTES
      if step == 0:
        more += agreement.CHECK_BYTES + PARTED_BYTES
      elif step == 2:  # over the stages, and over the replicas
        more += 8 + window_bytes(find(run.state), stages=STAGES)
      expected = [
        more
        + edgc_jax.wire_bytes(
          local, rank, min_ratio=1.2, placement=placement,
          lead_rank=numbers["rank"][0],
        )
        for rank in numbers["rank"]
      ]  # fmt: skip
      self.assertEqual(numbers["wire_bytes"], expected)


class WireTest(absltest.TestCase):
  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    # Here the optimised program is the question.
    optimize(True)
    cls.addClassCleanup(optimize, False)

  def test_bytes_of_every_rung_of_both_exchanges(self):
    run = fresh()
    compiled = run.step_fn.lower(gradients(0), run.state, run.params).compile()
    branches = hlo.wire_bytes_of_branches(compiled.as_text())
    own, rest = (b for b in branches if len(b) == 5)
    self.assertCountEqual(
      [own, rest],
      [[plan.wire_bytes(r) for r in plan.ladder] for plan in plans()],
    )
    shared = 4 * 40  # summed over the stages
    outside = hlo.wire_bytes_outside_branches(compiled.as_text())
    self.assertEqual(outside, shared + agreement.STAGE_CHECK_BYTES)

  def test_no_stage_waits_before_its_own_exchange(self):
    """In the program, what ties the stages together comes afterwards."""
    run = Run(edgc_jax.skip_nonfinite(make_edgc(), (AXIS, "stage")), late=True)
    lowered = run.step_fn.lower(gradients(0), run.state, run.params)
    entry = lowered.compile().as_text()
    self.assertEqual(unordered(entry), [])
    entry = entry[entry.index("\nENTRY") :]
    over_stages = [[0, 2, 4, 6], [1, 3, 5, 7]]
    order = []
    for line in entry.splitlines():
      if " conditional(" in line and line.count("%region") == 5:
        order.append("exchange")
      elif " all-reduce(" in line:
        order.append("stages" if hlo.groups_of(line) == over_stages else "all")
    # Own leaves, late gradients, the rest, and agreeing to keep the step.
    self.assertEqual(order[0], "exchange")
    self.assertEqual(order.count("exchange"), 2)
    self.assertIn("stages", order[1 : order.index("exchange", 1)])
    updates = run.step(gradients(0))
    expected = np.asarray(gradients(0)["embedding"]).mean(1)
    np.testing.assert_allclose(
      updates["embedding"].reshape(expected.shape), expected, rtol=1e-5
    )


class StateSpecsTest(absltest.TestCase):
  def test_kinds_of_state_and_shapes(self):
    tx = edgc_jax.skip_nonfinite(
      optax.chain(make_edgc(), optax.adam(1e-3)), (AXIS, "stage")
    )
    run = Run(tx)
    specs = find(run.specs)
    self.assertEqual(specs.exchange.residual["embedding"], P(("stage", AXIS)))
    self.assertEqual(specs.exchange.factor_q["blocks"]["kernel"], P("stage"))
    self.assertEqual(specs.stats.rank, P("stage"))
    self.assertEqual(specs.controller.rung, P("stage"))
    self.assertEqual(specs.controller.lead_rung, P())
    self.assertEqual(specs.checks.skipped_steps, P())
    adam = run.specs.inner_state[1][0]
    self.assertEqual(adam.mu, param_specs())
    self.assertEqual(adam.count, P())
    residual = find(run.state).exchange.residual["blocks"]["kernel"]
    self.assertEqual(residual.shape, (STAGES * REPLICAS * 2, 48, 40))

  def test_round_trip_through_the_host(self):
    """State taken to the host and placed by its specs goes on the same."""
    run = fresh()
    for step in range(3):
      run.step(gradients(step))
    host = jax.device_get(run.state)
    expected = run.step(gradients(3))
    run.state = jax.device_put(
      host, jax.tree.map(lambda s: NamedSharding(run.mesh, s), run.specs)
    )
    jax.tree.map(
      np.testing.assert_array_equal, run.step(gradients(3)), expected
    )
    self.assertEqual(run.traces, 1)

  def test_mesh_is_needed(self):
    with self.assertRaisesRegex(ValueError, "`mesh` must be given"):
      edgc_jax.state_specs(
        make_edgc(), global_params(), param_specs=param_specs()
      )


class OtherReducersTest(parameterized.TestCase):
  def test_dense_fixed_rank_and_entries(self):
    options = {"stages": edgc_jax.Stages("stage", placement)}
    for tx in (
      edgc_jax.allreduce(**options),
      edgc_jax.powersgd(40, min_ratio=0, **options),
      edgc_jax.topk(1.0, min_size=1, **options),
    ):
      run = Run(optax.chain(tx, edgc_jax.clip_by_global_norm(1e9, "stage")))
      grads = gradients(0)
      updates = run.step(grads)
      mean = lambda g: np.asarray(g).mean(1)  # noqa: E731
      expected = jax.tree.map(mean, grads)
      for name in ("bias", "kernel"):
        got = updates["blocks"][name].reshape(expected["blocks"][name].shape)
        np.testing.assert_allclose(
          got, expected["blocks"][name], rtol=1e-4, atol=1e-5
        )
      np.testing.assert_allclose(
        updates["norm"][0], expected["norm"].sum(0), rtol=1e-4
      )
      self.assertLen(run.metrics()["wire_bytes"], STAGES)

  def test_clipping_is_by_the_norm_over_all_stages(self):
    reducer = edgc_jax.allreduce(stages=edgc_jax.Stages("stage", placement))
    tx = optax.chain(reducer, edgc_jax.clip_by_global_norm(2.0, "stage"))
    updates = Run(tx).step(gradients(0))
    total = sum(np.sum(np.square(u)) for u in jax.tree.leaves(updates))
    self.assertAlmostEqual(float(total), 4.0, 4)


class ErrorsTest(parameterized.TestCase):
  def test_slack_needs_its_times(self):
    with self.assertRaisesRegex(ValueError, "`link` must be given.*'none'"):
      edgc(stage_axis="stage")
    with self.assertRaisesRegex(ValueError, "`backward_seconds` must be given"):
      edgc(stage_axis="stage", link=TIMES["link"])
    with self.assertRaisesRegex(ValueError, "`align` must be one of"):
      make_edgc(align="left")
    edgc(stage_axis="stage", align="none")

  def test_unbound_stage_axis(self):
    tx = make_edgc()
    params = local_params()
    update = jax.vmap(tx.update, axis_name=AXIS, in_axes=(0, None))
    grads = jax.tree.map(lambda p: p[None], params)
    with self.assertRaisesRegex(ValueError, "`stage_axis` must be an axis"):
      update(grads, tx.init(params))

  def test_types_must_be_tracked(self):
    tx = make_edgc()
    mesh = stage_mesh(STAGES, REPLICAS)
    specs = edgc_jax.state_specs(
      tx, global_params(), mesh=mesh, param_specs=param_specs()
    )
    update = jax.shard_map(
      lambda g, s: tx.update(g, s)[0], mesh=mesh,
      in_specs=(param_specs(), specs), out_specs=P(), check_vma=False,
    )  # fmt: skip
    state = jax.eval_shape(
      jax.shard_map(
        tx.init, mesh=mesh, in_specs=(param_specs(),), out_specs=specs
      ),
      global_params(),
    )
    with self.assertRaisesRegex(ValueError, "check_vma=True"):
      jax.eval_shape(update, global_params(), state)

  def test_programs_from_a_cache(self):
    run = Run(edgc_jax.allreduce(stages=edgc_jax.Stages("stage", placement)))
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", "/of/this/user")
    try:
      with self.assertRaisesRegex(RuntimeError, "must be off.*/of/this/user"):
        run.step(gradients(0))
    finally:
      jax.config.update("jax_compilation_cache_dir", before)

  def test_replicated_leaf_that_is_not_declared_shared(self):
    tx = edgc_jax.allreduce(stages=edgc_jax.Stages())
    mesh = stage_mesh(STAGES, REPLICAS)
    params = {"norm": jnp.zeros((REPLICAS, 4))}

    def update(g):
      return tx.update({"norm": g["norm"][0]}, tx.init({"norm": g["norm"][0]}))

    run = jax.shard_map(
      lambda g: update(g)[0], mesh=mesh, in_specs=(P(AXIS),), out_specs=P()
    )
    with self.assertRaisesRegex(ValueError, r"`placement`.*'own'.*\['norm'\]"):
      jax.eval_shape(run, params)

  def test_unknown_placement(self):
    stages = edgc_jax.Stages(placement=lambda path, shape: "here")
    tx = edgc_jax.allreduce(stages=stages)
    with self.assertRaisesRegex(ValueError, "`placement` must return one of"):
      tx.init({"w": jnp.zeros((2, 2))})

  def late(self, late_updates, **options):
    """One update on stages with such late updates, traced only."""
    options = {"placement": placement} | options
    tx = edgc_jax.allreduce(stages=edgc_jax.Stages("stage", **options))
    mesh, specs = stage_mesh(STAGES, REPLICAS), param_specs()
    state_specs = edgc_jax.state_specs(
      tx, global_params(), mesh=mesh, param_specs=specs
    )

    def update(params):
      grads = jax.lax.pcast(params, AXIS, to="varying")
      more = functools.partial(late_updates, grads)
      return tx.update(grads, tx.init(params), params, late_updates=more)[1]

    run = jax.shard_map(
      update, mesh=mesh, in_specs=(specs,), out_specs=state_specs
    )
    return jax.eval_shape(run, global_params())

  def test_late_updates(self):
    self.late(lambda grads, after: after(grads) | {"blocks": grads["blocks"]})
    with self.assertRaisesRegex(
      ValueError, "`late_updates` must return a tree"
    ):
      self.late(lambda grads, after: grads["blocks"])
    with self.assertRaisesRegex(ValueError, r"unchanged.*\['blocks'\]\['bias'"):
      self.late(lambda grads, after: after(grads))
    with self.assertRaisesRegex(ValueError, r"local gradients.*\['embedding'"):
      mean = lambda x: jax.lax.pmean(x, AXIS)  # noqa: E731
      self.late(lambda g, after: g | {"embedding": mean(g["embedding"])})

  def test_leaf_that_differs_by_stage_declared_shared(self):
    with self.assertRaisesRegex(ValueError, r"'own' or 'split'.*\['blocks'\]"):
      self.late(
        lambda grads, after: grads, placement=lambda path, shape: "shared"
      )

  def test_kinds_of_models(self):
    with self.assertRaisesRegex(TypeError, "`link` must be an edgc_jax.Link"):
      edgc(link=(1e-3, 1e8))

  def test_agreeing_over_too_few_axes(self):
    tx = edgc_jax.skip_nonfinite(edgc_jax.allreduce(stages=edgc_jax.Stages()))
    mesh = stage_mesh(STAGES, REPLICAS)

    def update(g):
      local = {"w": g[0, 0]}
      return tx.update(local, tx.init(local))[0]

    run = jax.shard_map(
      update, mesh=mesh, in_specs=(P("stage", AXIS),), out_specs=P("stage")
    )
    with self.assertRaisesRegex(ValueError, r"`axis_name`.*\('stage',\)"):
      jax.eval_shape(run, jnp.zeros((STAGES, REPLICAS, 4)))


class AccumulateTest(parameterized.TestCase):
  @parameterized.named_parameters(
    ("allreduce", edgc_jax.allreduce, {}),
    ("powersgd", functools.partial(edgc_jax.powersgd, 2), {"min_ratio": 1.2}),
    ("edgc", make_edgc, {"rank_min": 8}),
  )
  def test_one_call_is_the_plain_chain(self, make, options):
    """Also for shared leaves that JAX has summed over the stages."""
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
        # Equal on all stages, and not declared to differ.
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
    jax.tree.map(
      lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6),
      *results,
    )


if __name__ == "__main__":
  absltest.main()
