"""Pipeline stages: each has a rank of its own; their states and metrics."""

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
  AXIS,
  CHECK_BYTES,
  DIVERGED_BYTES,
  Pmap,
  Run,
  factors,
  find,
  residuals,
  stage_mesh,
  traced_once,
  window_bytes,
  with_field,
)
from helpers.stage_runs import (
  LADDER,
  REPLICAS,
  STAGES,
  TIMES,
  global_params,
  gradients,
  local_params,
  make_edgc,
  param_specs,
  placement,
  stage_run,
)
from jax.sharding import AbstractMesh, AxisType, NamedSharding
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
  pytest.mark.usefixtures("without_cache"),
  # Scales change from window to window, without an announcement.
  pytest.mark.filterwarnings("ignore:The entropy of the gradients"),
]


@functools.cache
def run_of(align):
  """Returns a run of `edgc`, compiled once for all tests."""
  return stage_run(traced_once(make_edgc(align=align)))


@functools.cache
def bytes_at(exchange):
  """Returns the bytes of one of the two exchanges at each rank."""
  leaves = leaves_in(local_params(), placement_fn=placement)
  leaves = with_factors(leaves, LADDER[1:], 1.2, None)
  own = [leaf for leaf in leaves if leaf.exchange == exchange]
  return rounds.exchange_bytes(own, LADDER, None).tolist()


def alone_step(run, rank, grads, state):
  """Exchanges some leaves of one stage, without other stages.

  Each step starts from the state of the stage: rounding grows with the residual
  from step to step, and would hide small faults. Step i of `run` has the i-th
  rank; returns averaged leaves, and the next residuals and Q.
  """
  own = run.first_state
  count = jnp.full(REPLICAS, LADDER.index(rank), jnp.int32)
  for name, tree in zip(("residual", "factor_q"), state, strict=True):
    # Leaves that are not compressed have nothing.
    tree = {x: tree.get(x, optax.MaskedNode()) for x in find(own).leaves}
    if name == "residual":  # under pmap each replica has an axis of itself
      tree = jax.tree.map(lambda e: e[:, None], tree)
    own = with_field(own, name, tree)
  run.state = own._replace(count=count)
  updates = jax.tree.map(lambda u: u[0], run.step(grads))
  found = run.residual(), factors(run.state)
  return updates, tuple(without_empty(tree) for tree in found)


def without_empty(tree):
  """Drops the leaves of a dictionary that have nothing."""
  is_array = lambda x: not isinstance(x, optax.MaskedNode)  # noqa: E731
  return {name: np.asarray(x) for name, x in tree.items() if is_array(x)}


def part_of(tree, exchange):
  """Returns the leaves of a tree that one exchange sends."""
  if exchange == 0:
    return tree["blocks"]
  return {name: tree[name] for name in ("embedding", "norm")}


def state_of(run, stage, exchange):
  """Returns residuals and Q of one stage, with an axis of replicas."""

  def residual(x):  # [replicas, stages * rows, ...]
    return np.split(x, STAGES, axis=1)[stage]

  def factor_q(x):
    own = np.split(x, STAGES)[stage]
    return np.broadcast_to(own, (REPLICAS, *own.shape))

  return tuple(
    jax.tree.map(fn, without_empty(part_of(tree, exchange)))
    for fn, tree in (
      (residual, residuals(run.state)), (factor_q, factors(run.state))
    )
  )  # fmt: skip


def test_each_stage_has_the_result_of_its_own_rank():
  """Each stage computes what it computes alone, over all ranks."""
  run = run_of("slack").restart()
  tx = float32.powersgd(dict(enumerate(LADDER)), min_ratio=1.2)
  alone = [Pmap(tx, part_of(local_params(), e), REPLICAS) for e in range(2)]
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
      expected, state = alone_step(alone[e], rank, leaves, before[s, e])
      for name, update in part_of(updates, e).items():
        own = update[0 if name == "norm" else s]
        assert_close(own, expected[name])
      for found, own in zip(state_of(run, s, e), state, strict=True):
        assert found.keys() == own.keys()
        for name in own:
          assert_close(found[name], own[name])
  assert len({ranks[0] for ranks in seen}) > 2
  assert (8, 8, 8, 0) in seen
  assert (2, 6, 8, 8) in seen


def test_integers_lose_nothing():
  """Updates plus mean residuals are the gradients, on every stage."""
  stages = edgc_jax.Stages("stage", placement, align="none")
  tx = edgc_jax.powersgd(4, wire_dtype="int8", min_ratio=1.2, stages=stages)
  run, owed, sent = stage_run(tx), 0.0, 0.0
  for count in range(3):
    grads = gradients(count)
    updates = run.step(grads)
    owed += np.asarray(grads["embedding"]).mean(1)
    sent += updates["embedding"]
    norm = np.asarray(grads["norm"]).sum(0).mean(0)
    assert_close(updates["norm"][0], norm)
  residual = np.asarray(residuals(run.state)["embedding"])
  residual = residual.mean(0).reshape(owed.shape)
  assert np.abs(residual).max() > 0.1
  assert_close(sent + residual, owed)


def assert_close(update, expected):
  error = np.linalg.norm(update - expected)
  assert error <= 5e-6 * np.linalg.norm(expected)


def test_ranks_follow_stage_0_and_the_slack():
  run = run_of("slack").restart()
  seconds = ladder.exchange_seconds(
    LADDER, bytes_at(0), TIMES["link"], edgc_jax.CompressionModel(0, 0), 2
  )
  t_b = TIMES["backward_seconds"]
  for step in range(8):
    run.step(gradients(step, scales=(1.0 if step < 2 else 0.1, 1, 1, 1)))
    levels = [LADDER.index(rank) for rank in run.metrics()["rank"]]
    ends = alignment.finish_seconds(seconds, levels, t_b)
    assert ends.argmax() == 0
    for s, level in enumerate(levels[1:], 1):
      better = [*seconds[level + 1 :], seconds[0]]
      if levels[0] and level:
        assert min(better) - s * t_b > ends[0]
  assert run.metrics()["rank"][0] == 2


def test_not_aligned_each_stage_follows_its_own_entropy():
  run = run_of("none").restart()
  for step in range(6):
    late = step >= 2
    scales = (1.5, 0.1, 1.5, 0.01) if late else (1.0,) * STAGES
    run.step(gradients(step, scales))
  assert run.metrics()["rank"] == [8, 2, 8, 2]
  # Leaves that are not a stage's own have the rank of stage 0.
  assert int(find(run.state).budget.first_rank) == 8


def test_late_gradients():
  """In an optimised program own leaves are sent first, and the bytes fit."""
  jax.config.update("jax_disable_most_optimizations", False)
  try:
    tx = edgc_jax.skip_nonfinite(make_edgc(), (AXIS, "stage"))
    run = stage_run(tx, late=True)
    text = run.compiled(gradients(0))
  finally:
    jax.config.update("jax_disable_most_optimizations", True)
  ladders = hlo.wire_bytes_by_rank(text)
  assert sorted(ladders) == sorted([bytes_at(0), bytes_at(1)])
  shared, last = 4 * 40, 4 * 32 * 40  # summed over the stages
  skips = 4  # of `skip_nonfinite`
  assert (
    hlo.wire_bytes_outside_branches(text)
    == shared + last + skips + agreement.STAGE_CHECK_BYTES
  )
  assert unordered(text) == []
  computations = hlo.computations_of(text)
  over_stages = [[0, 2, 4, 6], [1, 3, 5, 7]]
  order = []
  for line in text[text.index("\nENTRY") :].splitlines():
    if " conditional(" in line and hlo.ranks_of(line, computations):
      order.append("exchange")
    elif " all-reduce(" in line:
      order.append("stages" if hlo.groups_of(line) == over_stages else "all")
  # Own leaves, late gradients, the rest, agreement on the step.
  assert order[0] == "exchange"
  assert order.count("exchange") == 2
  assert "stages" in order[1 : order.index("exchange", 1)]
  updates = run.step(gradients(0))
  expected = np.asarray(gradients(0)["embedding"]).mean(1)
  np.testing.assert_allclose(
    updates["embedding"].reshape(expected.shape), expected, rtol=1e-5
  )


@pytest.mark.parametrize(
  ("make", "norm", "has_codes"),
  [
    (edgc_jax.allreduce, 2.0, False),
    (edgc_jax.allreduce, 1e9, False),
    (functools.partial(float32.powersgd, 40, min_ratio=0), 1e9, False),
    (functools.partial(edgc_jax.topk, 1.0, min_size=1), 1e9, True),
  ],
)
def test_without_loss_updates_are_means(make, norm, has_codes):
  """Clipped to a norm over all stages."""
  tx = make(stages=edgc_jax.Stages("stage", placement))
  run = stage_run(optax.chain(tx, edgc_jax.clip_by_global_norm(norm, "stage")))
  grads = gradients(0)
  updates = run.step(grads)
  expected = jax.tree.map(lambda g: np.asarray(g).mean(1), grads)
  expected["norm"] = expected["norm"].sum(0)[None]
  shrunk = min(1.0, norm / float(optax.tree.norm(expected)))
  expected = jax.tree.map(lambda x: shrunk * x, expected)
  chex.assert_trees_all_equal_shapes(updates, expected)
  close = functools.partial(chex.assert_trees_all_close, rtol=1e-4)
  if has_codes:  # leaves that are no matrices have 4 bits
    for tree in (updates, expected):
      del tree["norm"], tree["blocks"]["bias"]
  else:
    close(updates["norm"], expected["norm"], atol=0)
  close(updates, expected, atol=1e-5 * shrunk)
  if norm < 1e9:
    squared_norm = optax.tree.norm(updates, squared=True)
    assert abs(float(squared_norm) - 4.0) <= 0.5e-4
  assert len(run.metrics()["wire_bytes"]) == STAGES


@pytest.mark.parametrize(
  "make", [edgc_jax.allreduce, functools.partial(float32.powersgd, 4)]
)
def test_every_1_is_the_plain_chain(make):
  """This includes shared leaves that JAX has summed over the stages."""
  mesh, specs = stage_mesh(STAGES, REPLICAS), param_specs()
  results = []
  for every in (None, 1):
    tx = make(stages=edgc_jax.Stages("stage", placement, align="none"))
    tx = tx if every is None else edgc_jax.accumulate(tx, every)

    def update(grads, state, params, tx=tx):
      del params
      grads, norm = grads
      local = jax.tree.map(lambda g: g[0, 0], grads)
      # Equal on all stages, and not typed as varying over them.
      return tx.update(local | {"norm": norm[0]}, state)

    run = Run(
      tx, global_params(), mesh, specs, update=update,
      gradient_specs=(P("stage", AXIS), P(AXIS)),
    )  # fmt: skip
    for count in range(3):
      updates = run.step((gradients(count), gradients(count)["norm"][0]))
    results.append(updates)
  chex.assert_trees_all_close(*results, rtol=1e-5, atol=1e-6)


def test_a_nonfinite_gradient_of_one_stage_skips_the_step_on_all():
  run = run_of("slack").restart()
  for step in range(4):
    run.step(gradients(step))
  before = factors(run.state), residuals(run.state)
  for leaf in (("blocks", "kernel"), ("embedding",), ("norm",)):
    grads = gradients(4)
    part = grads if len(leaf) == 1 else grads[leaf[0]]
    index = (2, 1) + (0,) * (part[leaf[-1]].ndim - 2)
    part[leaf[-1]] = part[leaf[-1]].at[index].set(jnp.nan)
    updates = run.step(grads)
    chex.assert_trees_all_equal(updates, optax.tree.zeros_like(updates))
    after = factors(run.state), residuals(run.state)
    chex.assert_trees_all_equal(after, before)
  assert run.metrics()["skipped_steps"] == 3


def test_metrics_are_of_each_stage():
  """Entropies, and bytes of the samples, the checks and its rank."""
  run = run_of("slack").restart()
  local, scales = local_params(), (1.0, 0.5, 2.0, 1e-3)
  gaussian = 0.5 * np.log(2 * np.pi * np.e)
  for step in range(4):
    run.step(gradients(step, scales))
    numbers = run.metrics()
    if step == 0:
      found = numbers["entropy"]
      np.testing.assert_allclose(found, gaussian + np.log(scales), atol=0.03)
    sample = 4 * 4 * 2  # two matrices of one leaf
    more = sample + agreement.STAGE_CHECK_BYTES
    if step == 0:
      more += CHECK_BYTES + DIVERGED_BYTES
    elif step == 2:  # over the stages, and over the replicas
      more += 8 + window_bytes(find(run.state), stages=STAGES)
    expected = [
      more
      + float32.wire_bytes(
        local, rank, min_ratio=1.2, placement=placement,
        first_rank=numbers["rank"][0], rank_min=2,
      )
      for rank in numbers["rank"]
    ]  # fmt: skip
    assert numbers["wire_bytes"] == expected


def test_specs():
  """Sums of `accumulate` differ by stage and by both axes of replicas."""
  stages = edgc_jax.Stages("stage", placement, align="none")
  tx = optax.chain(
    float32.edgc(axis_name=("pod", AXIS), min_ratio=1.2, stages=stages),
    optax.adam(1e-3),
  )
  mesh = AbstractMesh(
    (STAGES, 2, 2), ("stage", "pod", AXIS), axis_types=(AxisType.Auto,) * 3
  )
  how = {"axis_name": ("pod", AXIS), "param_specs": param_specs()}
  tx = edgc_jax.accumulate(tx, 2)
  specs = edgc_jax.state_specs(tx, global_params(), **how, mesh=mesh)
  own = P(("pod", AXIS), "stage")
  assert specs.accumulated.values["blocks"]["kernel"] == own
  assert specs.mini_step == P()
  reducer, (adam, _) = specs.inner_state
  kernel = reducer.leaves["blocks"]["kernel"]
  assert reducer.leaves["embedding"].residual.values == own
  assert kernel.residual.values == own
  for spec in (kernel.factor_q, kernel.stats.rank, reducer.stats.rank):
    assert spec == P("stage")
  assert reducer.budget.decision.rank == P("stage")
  assert reducer.budget.first_rank == reducer.checks.skipped_steps == P()
  assert adam.mu == param_specs()
  assert adam.count == P()
  with pytest.raises(ValueError, match="`mesh` must be given"):
    edgc_jax.state_specs(tx, global_params(), **how)


def test_round_trip_through_the_host():
  """A state on the host, placed by its specs again, continues the run."""
  run = run_of("slack").restart()
  for step in range(3):
    run.step(gradients(step))
  host = jax.device_get(run.state)
  expected = run.step(gradients(3))
  run.state = jax.device_put(
    host, jax.tree.map(lambda s: NamedSharding(run.mesh, s), run.specs)
  )
  chex.assert_trees_all_equal(run.step(gradients(3)), expected)
