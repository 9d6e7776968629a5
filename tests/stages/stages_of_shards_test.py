"""Pipeline stages whose leaves are sharded: ranks by stage, one for its shards.

Each stage must do what its shards do without other stages.
"""

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
from helpers.meshes import DIVERGED_BYTES, factors, residuals
from helpers.shard_runs import mesh_of
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import edgc_jax
from edgc_jax.measure import hlo
from edgc_jax.wire import agreement

pytestmark = [
  pytest.mark.slow,
  # Scales change from window to window, without an announcement.
  pytest.mark.filterwarnings("ignore:The entropy of the gradients"),
]

STAGES = REPLICAS = SHARDS = 2
BLOCKS = {
  "bias": P("stage"),
  "up": P("stage", None, "tensor"),
  "whole": P("stage"),
}
SPECS = {
  "blocks": BLOCKS,
  "embedding": P(("stage", "tensor")),
  "norm": P(),
}
SHAPES = {  # of all stages and shards
  "blocks": {"bias": (2, 24), "up": (4, 64, 80), "whole": (4, 48, 40)},
  "embedding": (128, 40),
  "norm": (40,),
}
STEPS = 10


def placement(path, shape):
  del shape
  names = {"blocks": "own", "embedding": "split", "norm": "shared"}
  return next(kind for name, kind in names.items() if name in path)


OTHERS = {
  "quantize": lambda **options: edgc_jax.quantize(
    4, error_feedback=True, **options
  ),
  "topk": lambda **options: edgc_jax.topk(0.1, min_size=1, **options),
  "accumulate": lambda **options: edgc_jax.accumulate(
    float32.powersgd(4, min_ratio=1.2, **options), 2
  ),
}


def make(name, stages):
  if name in OTHERS:
    return OTHERS[name](stages=stages)
  if name == "powersgd":
    return float32.powersgd(4, min_ratio=1.2, stages=stages)
  return float32.edgc(
    rank_max=8, rank_min=2, rank_multiple=2, window=2, warmup_steps=2,
    max_warmup_steps=2, sampling=edgc_jax.Sampling(1.0), min_ratio=1.2,
    max_rank_step=8, stages=stages,
    link=edgc_jax.LinkModel(latency=1e-6, bandwidth=1e6),
  )  # fmt: skip


def is_shape(x):
  return isinstance(x, tuple)


def zeros(shapes):
  return jax.tree.map(jnp.zeros, shapes, is_leaf=is_shape)


def gradients(step, scales=(1.0, 1.0)):
  """Draws the gradients of all replicas, [replicas, ...] of all stages."""
  random = np.random.default_rng(step)

  def draw(path, shape):
    value = random.standard_normal((REPLICAS, *shape)).astype(np.float32)
    if "blocks" in jax.tree_util.keystr(path):
      own = np.repeat(scales, shape[0] // STAGES)
      value *= own.reshape(1, -1, *[1] * (len(shape) - 1))
    return value

  return jax.tree_util.tree_map_with_path(draw, SHAPES, is_leaf=is_shape)


class Run:
  """Steps of a transformation for scripted gradients."""

  def __init__(self, tx, shapes, specs, adds=True, **mesh):
    self.mesh, self.specs = mesh_of(**mesh), specs
    self.tx, params = tx, zeros(shapes)
    self.state_specs = edgc_jax.state_specs(
      tx, params, mesh=self.mesh, param_specs=specs
    )
    on_mesh = functools.partial(jax.shard_map, mesh=self.mesh)
    self.init = jax.jit(
      on_mesh(tx.init, in_specs=(specs,), out_specs=self.state_specs)
    )
    place = lambda s: NamedSharding(self.mesh, s)  # noqa: E731
    self.params = jax.device_put(params, jax.tree.map(place, specs))
    self.state = self.init(self.params)

    def update(grads, state, params):
      local = jax.tree.map(lambda g: g[0], grads)
      # A stage adds its own part to what all stages share. `accumulate` takes
      # only what the stages have summed.
      if "norm" in local and adds:
        stage = jax.lax.axis_index("stage")
        local["norm"] = jnp.where(stage == 0, local["norm"], 0.0)
      return tx.update(local, state, params)

    replicated = jax.tree.map(lambda spec: P("data", *spec), specs)
    step = on_mesh(
      update,
      in_specs=(replicated, self.state_specs, specs),
      out_specs=(specs, self.state_specs),
    )
    first = (gradients(0) if "stage" in mesh else of_stage(gradients(0), 0),)
    self.compiled = (
      jax.jit(step).lower(*first, self.state, self.params).compile()
    )

  def step(self, grads):
    updates, self.state = self.compiled(grads, self.state, self.params)
    return jax.tree.map(np.asarray, updates)

  def metrics(self):
    return edgc_jax.metrics(self.state)


def of_stage(tree, stage, axis=1):
  """Returns a stage's part of its own leaves."""
  return jax.tree.map(
    lambda x: np.split(np.asarray(x), STAGES, axis)[stage], tree["blocks"]
  )


@functools.cache
def stages_run(name, align="none"):
  stages = edgc_jax.Stages("stage", placement, align, 2e-3)
  mesh = {"stage": STAGES, "data": REPLICAS, "tensor": SHARDS}
  return Run(make(name, stages), SHAPES, SPECS, name != "accumulate", **mesh)


@functools.cache
def alone_run(name):
  """Returns a run of the shards of one stage, without other stages."""
  shapes = jax.tree.map(
    lambda shape: (shape[0] // STAGES, *shape[1:]),
    SHAPES["blocks"],
    is_leaf=is_shape,
  )
  specs = jax.tree.map(lambda spec: P(None, *spec[1:]), BLOCKS)
  return Run(make(name, None), shapes, specs, data=REPLICAS, tensor=SHARDS)


def restarted(run):
  run.state = run.init(run.params)
  return run


class StagesOfShardsTest(parameterized.TestCase):
  @parameterized.named_parameters((name, name) for name in OTHERS)
  def test_other_methods(self, name):
    """Each stage receives what it receives alone."""
    run, alone = stages_run(name), alone_run(name)
    states = [alone.state] * STAGES
    for count in range(3):
      self.step_both(run, alone, states, gradients(count))

  def step_both(self, run, alone, states, grads):
    """Compares the updates of each stage, and returns its metrics alone.

    Args:
      run: Of all stages.
      alone: Of one stage.
      states: Of each stage alone; replaced by the next ones.
      grads: Of all stages.
    """
    updates, found = run.step(grads), []
    for s in range(STAGES):
      alone.state = states[s]
      expected = alone.step(of_stage(grads, s))
      states[s] = alone.state
      chex.assert_trees_all_close(
        of_stage(updates, s, 0), expected, rtol=1e-4, atol=1e-5
      )
      found.append(alone.metrics())
    return found

  @parameterized.named_parameters(("powersgd", "powersgd"), ("edgc", "edgc"))
  def test_each_stage_is_what_it_is_alone(self, name):
    run, alone = restarted(stages_run(name)), alone_run(name)
    states = [alone.init(alone.params)] * STAGES
    seen = set()
    for count in range(STEPS):
      # Each stage's entropy spans the whole ladder, in turn.
      fall = 0.1 if count % 8 >= 4 else 1.0
      found = self.step_both(run, alone, states, gradients(count, (1.0, fall)))
      numbers = run.metrics()
      seen.add(tuple(numbers["rank"]))
      self.assertEqual(numbers["rank"], [own["rank"] for own in found])
      for path in found[0]["matrix_rank"]:
        for kind, rtol in (("matrix_rank", 0), ("matrix_error", 1e-3)):
          both = numbers[kind][f"blocks/{path}"]
          alone_ones = [own[kind][path] for own in found]
          np.testing.assert_allclose(both, alone_ones, rtol=rtol, atol=1e-6)
    self.assertLen(seen, {"powersgd": 1, "edgc": 2}[name])

  def test_the_stages_follow_the_slack(self):
    run = restarted(stages_run("edgc", "slack"))
    for count in range(6):
      fall = 0.1 if count >= 2 else 1.0
      run.step(gradients(count, (fall, fall)))
    low, high = run.metrics()["rank"]
    self.assertEqual(low, 2)
    self.assertGreater(high, low)

  def test_full_rank_is_the_mean(self):
    stages = edgc_jax.Stages("stage", placement)
    tx = float32.powersgd(80, min_ratio=0.0, stages=stages)
    tx = optax.chain(tx, edgc_jax.clip_by_global_norm(1e9, ("stage", "tensor")))
    run = Run(tx, SHAPES, SPECS, stage=STAGES, data=REPLICAS, tensor=SHARDS)
    grads = gradients(0)
    expected = jax.tree.map(lambda g: g.mean(0), grads)
    chex.assert_trees_all_close(run.step(grads), expected, rtol=1e-3, atol=1e-4)

  def test_sends_what_is_predicted(self):
    run = restarted(stages_run("edgc"))
    run.step(gradients(0))
    found = hlo.over_axes(run.compiled.as_text(), run.mesh, "data")
    sent = hlo.wire_bytes_outside_branches(found)
    ladders = hlo.wire_bytes_by_rank(found)
    # Two rounds each: own sharded leaves, own whole ones, the late ones.
    self.assertLen(ladders, 6)
    sent += sum(ladder[-1] for ladder in ladders)
    samples = edgc_jax.budget.entropy.sample_bytes(2, edgc_jax.Sampling(1.0))
    sent += agreement.CHECK_BYTES + DIVERGED_BYTES + samples
    sent += agreement.STAGE_CHECK_BYTES
    self.assertEqual(run.metrics()["wire_bytes"], [SHARDS * sent] * STAGES)
    (part,) = edgc_jax.describe(
      run.tx, zeros(SHAPES), mesh=run.mesh, param_specs=SPECS
    ).parts
    self.assertEqual(part.wire_bytes[-1], sum(x[-1] for x in ladders))

  def test_collectives_are_ordered(self):
    self.assertEmpty(unordered(stages_run("edgc").compiled.as_text()))

  def test_own_leaves_are_sent_before_stages_wait(self):
    """Two rounds of two exchanges precede collectives over the stages."""
    text = stages_run("edgc").compiled.as_text()
    computations = hlo.computations_of(text)
    over_stages = hlo.over_axes(text, stages_run("edgc").mesh, "stage")
    kept, order = set(over_stages.splitlines()), []
    for line in text[text.index("\nENTRY") :].splitlines():
      if " conditional(" in line and hlo.ranks_of(line, computations):
        order.append("exchange")
      elif " all-reduce(" in line and line in kept:
        order.append("stages")
    self.assertEqual(order[:5], ["exchange"] * 4 + ["stages"])

  def test_a_shard_of_a_stage_that_is_not_finite(self):
    run = restarted(stages_run("edgc"))
    for count in range(3):
      run.step(gradients(count))
    before = run.state
    grads = gradients(3)
    grads["blocks"]["up"][1, 3, 5, 70] = np.nan  # of stage 1 and shard 1
    updates = run.step(grads)
    chex.assert_trees_all_equal(updates, optax.tree.zeros_like(updates))
    for part in (factors, residuals):
      chex.assert_trees_all_equal(part(run.state), part(before))
    self.assertEqual(run.metrics()["skipped_steps"], 1)

  def test_metrics_inside(self):
    """Where axes are bound, the shards join their statistics."""
    run = stages_run("edgc")
    outside = run.metrics()

    def inside(state):
      found = edgc_jax.metrics(state)
      own = ("rank", "wire_bytes", "relative_error", "entropy")
      return {name: found[name] for name in own}

    by_stage = jax.jit(
      jax.shard_map(
        inside, mesh=run.mesh, in_specs=(run.state_specs,),
        out_specs=P("stage"),
      )
    )(run.state)  # fmt: skip
    for name, value in by_stage.items():
      np.testing.assert_allclose(value, outside[name], rtol=1e-6)

  def test_specs(self):
    reducer = stages_run("edgc").state_specs
    up, whole = (reducer.leaves["blocks"][name] for name in ("up", "whole"))
    self.assertEqual(up.factor_q, P(("stage", "tensor")))
    self.assertEqual(up.residual, P(("stage", "data"), None, "tensor"))
    self.assertEqual(whole.residual, P(("stage", "data")))
    self.assertEqual(reducer.budget.decision.rank, P("stage"))
    self.assertEqual(reducer.budget.window_entropy, P("stage", ("tensor",)))
    self.assertEqual(reducer.stats.rank, P("stage"))

  def test_another_number_of_replicas(self):
    run = restarted(stages_run("powersgd"))
    for count in range(3):
      run.step(gradients(count))
    one = edgc_jax.resize_replicas(
      jax.device_get(run.state), run.state_specs, REPLICAS, 1, stages=STAGES
    )
    for old, new in zip(
      jax.tree.leaves(residuals(run.state)),
      jax.tree.leaves(residuals(one)),
      strict=True,
    ):
      parts = np.reshape(old, (STAGES, REPLICAS, -1, *old.shape[1:]))
      np.testing.assert_allclose(
        parts.mean(1).reshape(new.shape), new, rtol=1e-6
      )
    chex.assert_trees_all_equal(factors(one), factors(run.state))

  def test_a_state_without_shards_is_refused(self):
    run = stages_run("powersgd")
    whole = jax.tree.map(lambda spec: P(*spec[:0]), SPECS)
    whole["blocks"] = jax.tree.map(lambda _: P("stage"), BLOCKS)
    whole["embedding"] = P("stage")
    specs = edgc_jax.state_specs(
      run.tx, run.params, mesh=run.mesh, param_specs=whole
    )
    on_mesh = functools.partial(jax.shard_map, mesh=run.mesh)
    init = on_mesh(run.tx.init, in_specs=(whole,), out_specs=specs)
    state = jax.eval_shape(init, run.params)

    def update(params, state):
      local = jax.lax.pcast(params, "data", to="varying")
      return run.tx.update(local, state)

    step = on_mesh(update, in_specs=(SPECS, specs), out_specs=(SPECS, specs))
    with self.assertRaisesRegex(ValueError, "stages and shards, .* for stages"):
      jax.eval_shape(step, run.params, state)


if __name__ == "__main__":
  absltest.main()
