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
from helpers import float32
from helpers.collective_order import unordered
from helpers.meshes import (
  CHECK_BYTES,
  DIVERGED_BYTES,
  Run,
  factors,
  residuals,
  sample_bytes,
)
from helpers.shard_runs import mesh_of
from jax.sharding import PartitionSpec as P

import edgc_jax
from edgc_jax.measure import hlo
from edgc_jax.state.state import PerReplica
from edgc_jax.wire import agreement

pytestmark = [
  pytest.mark.slow,
  pytest.mark.usefixtures("without_cache"),
  # Scales change from window to window, without an announcement.
  pytest.mark.filterwarnings("ignore:The entropy of the gradients"),
]

STAGES = REPLICAS = SHARDS = 2
BLOCKS = {"bias": P("stage"), "up": P("stage", None, "tensor")}
BLOCKS |= {"whole": P("stage")}
SPECS = {"blocks": BLOCKS, "embedding": P(("stage", "tensor")), "norm": P()}
SHAPES = {  # of all stages and shards
  "blocks": {"bias": (2, 24), "up": (4, 64, 80), "whole": (4, 48, 40)},
  "embedding": (128, 40),
  "norm": (40,),
}
MESH = {"stage": STAGES, "data": REPLICAS, "tensor": SHARDS}


def placement(path, shape):
  del shape
  names = {"blocks": "own", "embedding": "split", "norm": "shared"}
  return next(kind for name, kind in names.items() if name in path)


METHODS = {
  "quantize": functools.partial(edgc_jax.quantize, 4, error_feedback=True),
  "topk": functools.partial(edgc_jax.topk, 0.1, min_size=1),
  "accumulate": lambda **options: edgc_jax.accumulate(
    float32.powersgd(4, min_ratio=1.2, **options), 2
  ),
  "powersgd": functools.partial(float32.powersgd, 4, min_ratio=1.2),
  "edgc": functools.partial(
    float32.edgc, rank_max=8, rank_min=2, rank_multiple=2, window=2,
    warmup_steps=2, max_warmup_steps=2, sampling=edgc_jax.Sampling(1.0),
    min_ratio=1.2, max_rank_step=8,
    link=edgc_jax.LinkModel(latency=1e-6, bandwidth=1e6),
  ),
}  # fmt: skip


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


def run_on(tx, shapes, specs, adds=True, **mesh):
  """Returns a run for scripted gradients."""

  def update(grads, state, params):
    local = jax.tree.map(lambda g: g[0], grads)
    # A stage adds its own part to what all stages share. `accumulate` takes
    # only what the stages have summed.
    if "norm" in local and adds:
      stage = jax.lax.axis_index("stage")
      local["norm"] = jnp.where(stage == 0, local["norm"], 0.0)
    return tx.update(local, state, params)

  return Run(tx, zeros(shapes), mesh_of(**mesh), specs, update=update)


def of_stage(tree, stage, axis=1):
  """Returns a stage's part of its own leaves."""
  return jax.tree.map(
    lambda x: np.split(np.asarray(x), STAGES, axis)[stage], tree["blocks"]
  )


@functools.cache
def stages_run(name, align="none"):
  stages = edgc_jax.Stages("stage", placement, align, 2e-3)
  tx = METHODS[name](stages=stages)
  run = run_on(tx, SHAPES, SPECS, name != "accumulate", **MESH)
  run.compiled(gradients(0))
  return run


@pytest.mark.parametrize("name", METHODS)
def test_each_stage_is_what_it_is_alone(name):
  """Each receives what its shards receive without other stages."""
  run = stages_run(name).restart()
  shapes = jax.tree.map(
    lambda shape: (shape[0] // STAGES, *shape[1:]),
    SHAPES["blocks"],
    is_leaf=is_shape,
  )
  specs = jax.tree.map(lambda spec: P(None, *spec[1:]), BLOCKS)
  alone = run_on(METHODS[name](), shapes, specs, data=REPLICAS, tensor=SHARDS)
  states = [alone.first_state] * STAGES
  has_ranks = name in ("powersgd", "edgc")
  seen = set()
  for count in range(10 if has_ranks else 3):
    # Each stage's entropy spans the whole ladder, in turn.
    fall = 0.1 if count % 8 >= 4 else 1.0
    grads = gradients(count, (1.0, fall))
    updates, found = run.step(grads), []
    for s in range(STAGES):
      alone.state = states[s]
      expected = alone.step(of_stage(grads, s))
      states[s] = alone.state
      chex.assert_trees_all_close(
        of_stage(updates, s, 0), expected, rtol=1e-4, atol=1e-5
      )
      found.append(alone.metrics())
    if not has_ranks:
      continue
    numbers = run.metrics()
    seen.add(tuple(numbers["rank"]))
    assert numbers["rank"] == [own["rank"] for own in found]
    for path in found[0]["matrix_rank"]:
      for kind, rtol in (("matrix_rank", 0), ("matrix_error", 1e-3)):
        both = numbers[kind][f"blocks/{path}"]
        alone_ones = [own[kind][path] for own in found]
        np.testing.assert_allclose(both, alone_ones, rtol=rtol, atol=1e-6)
  assert len(seen) == {"powersgd": 1, "edgc": 2}.get(name, 0)


def test_the_stages_follow_the_slack():
  run = stages_run("edgc", "slack").restart()
  for count in range(6):
    fall = 0.1 if count >= 2 else 1.0
    run.step(gradients(count, (fall, fall)))
  low, high = run.metrics()["rank"]
  assert low == 2
  assert high > low


def test_full_rank_is_the_mean():
  stages = edgc_jax.Stages("stage", placement)
  tx = float32.powersgd(80, min_ratio=0.0, stages=stages)
  tx = optax.chain(tx, edgc_jax.clip_by_global_norm(1e9, ("stage", "tensor")))
  run = run_on(tx, SHAPES, SPECS, **MESH)
  grads = gradients(0)
  expected = jax.tree.map(lambda g: g.mean(0), grads)
  chex.assert_trees_all_close(run.step(grads), expected, rtol=1e-3, atol=1e-4)


def test_sends_what_is_predicted():
  """Own leaves before stages wait."""
  run = stages_run("edgc").restart()
  run.step(gradients(0))
  text = run.compiled(gradients(0))
  found = hlo.over_axes(text, run.mesh, "data")
  sent = hlo.wire_bytes_outside_branches(found)
  ladders = hlo.wire_bytes_by_rank(found)
  # Two rounds each: own sharded leaves, own whole ones, the late ones.
  assert len(ladders) == 6
  sent += sum(ladder[-1] for ladder in ladders)
  samples = sample_bytes(2, edgc_jax.Sampling(1.0))
  sent += CHECK_BYTES + DIVERGED_BYTES + samples
  sent += agreement.STAGE_CHECK_BYTES
  assert run.metrics()["wire_bytes"] == [SHARDS * sent] * STAGES
  (part,) = edgc_jax.describe(
    run.tx, zeros(SHAPES), mesh=run.mesh, param_specs=SPECS
  ).parts
  assert part.wire_bytes[-1] == sum(x[-1] for x in ladders)
  # Two rounds of two exchanges precede collectives over the stages.
  assert not unordered(text)
  computations = hlo.computations_of(text)
  kept = set(hlo.over_axes(text, run.mesh, "stage").splitlines())
  order = []
  for line in text[text.index("\nENTRY") :].splitlines():
    if " conditional(" in line and hlo.ranks_of(line, computations):
      order.append("exchange")
    elif " all-reduce(" in line and line in kept:
      order.append("stages")
  assert order[:5] == ["exchange"] * 4 + ["stages"]


def test_a_shard_of_a_stage_that_is_not_finite():
  run = stages_run("edgc").restart()
  for count in range(3):
    run.step(gradients(count))
  before = run.state
  grads = gradients(3)
  grads["blocks"]["up"][1, 3, 5, 70] = np.nan  # of stage 1 and shard 1
  updates = run.step(grads)
  chex.assert_trees_all_equal(updates, optax.tree.zeros_like(updates))
  for part in (factors, residuals):
    chex.assert_trees_all_equal(part(run.state), part(before))
  assert run.metrics()["skipped_steps"] == 1


def test_metrics_inside():
  """Where axes are bound, the shards join their statistics."""
  run = stages_run("edgc")
  outside = run.metrics()

  def inside(state):
    found = edgc_jax.metrics(state)
    own = ("rank", "wire_bytes", "relative_error", "entropy")
    return {name: found[name] for name in own}

  on_mesh = functools.partial(jax.shard_map, mesh=run.mesh)
  join = on_mesh(inside, in_specs=(run.specs,), out_specs=P("stage"))
  by_stage = jax.jit(join)(run.state)
  for name, value in by_stage.items():
    np.testing.assert_allclose(value, outside[name], rtol=1e-6)


def test_specs():
  reducer = stages_run("edgc").specs
  up, whole = (reducer.leaves["blocks"][name] for name in ("up", "whole"))
  assert up.factor_q == P(("stage", "tensor"))
  assert up.residual.values == P("data", "stage", None, "tensor")
  assert whole.residual.values == P("data", "stage")
  assert reducer.budget.decision.rank == P("stage")
  assert reducer.budget.window_entropy == P("stage", ("tensor",))
  assert reducer.stats.rank == P("stage")


def test_another_number_of_replicas():
  run = stages_run("powersgd").restart()
  for count in range(3):
    run.step(gradients(count))
  state = jax.device_get(run.state)
  like = jax.tree.map(
    lambda x: PerReplica(x.values[:1]) if isinstance(x, PerReplica) else x,
    state,
    is_leaf=lambda x: isinstance(x, PerReplica),
  )
  one = edgc_jax.resize(state, like)
  for old, new in zip(
    *map(jax.tree.leaves, (residuals(run.state), residuals(one))), strict=True
  ):
    assert len(old) == REPLICAS
    np.testing.assert_allclose(np.mean(old, 0)[None], new, rtol=1e-6)
  chex.assert_trees_all_equal(factors(one), factors(run.state))


def test_a_state_without_shards_is_refused():
  run = stages_run("powersgd")
  whole = {"blocks": P("stage"), "embedding": P("stage"), "norm": P()}
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
  with pytest.raises(ValueError, match=r"stages and shards, .* for stages"):
    jax.eval_shape(step, run.params, state)
