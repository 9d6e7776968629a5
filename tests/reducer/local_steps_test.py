"""`local_steps`: replicas train alone, and average what they have moved."""

import functools
import itertools
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from helpers.collective_order import unordered
from helpers.local_model import (
  NESTEROV,
  PARAMS,
  REPLICAS,
  batch,
  loss_fn,
  mesh_of,
)
from helpers.meshes import AXIS, replicated
from jax.sharding import PartitionSpec as P

import edgc_jax
from edgc_jax.measure import hlo

# Some of its replicas have shards.
pytestmark = pytest.mark.usefixtures("without_cache")


def tx_of(
  reducer=None, every=4, inner=None, rule=NESTEROV, mesh=None, **options
):
  """Makes the transformation; `reducer` is one, `allreduce` if not given."""
  reducer = reducer or edgc_jax.allreduce()
  inner = optax.adam(1e-2) if inner is None else inner
  outer = optax.chain(edgc_jax.on_mesh(reducer, mesh), rule)
  return edgc_jax.local_steps(inner, outer, every, mesh=mesh, **options)


def step_of(tx, mesh=None, axis=AXIS):
  """One step where the axis is bound, or in plain `jax.jit` with a mesh."""

  def step(params, opt_state, x):
    local = edgc_jax.local_params(params, opt_state, mesh)
    if mesh is None:
      grads = jax.grad(loss_fn)(local, x)
    else:
      _, grads = edgc_jax.value_and_grad(loss_fn, mesh, axis, is_local=True)(
        local, x
      )
    updates, opt_state = tx.update(grads, opt_state, params, local_params=local)
    return optax.apply_updates(params, updates), opt_state

  return step


# Each way to bind the axis yields parameters and state after 0, 1, ... steps.


def pmapped(tx):
  stack = lambda tree: jax.tree.map(lambda x: jnp.stack([x] * REPLICAS), tree)  # noqa: E731
  devices = jax.devices()[:REPLICAS]
  step = jax.pmap(step_of(tx), axis_name=AXIS, devices=devices)
  params, state = stack(PARAMS), stack(tx.init(PARAMS))
  for i in itertools.count():
    for leaf in jax.tree.leaves(params):
      np.testing.assert_array_equal(leaf, np.stack([leaf[0]] * REPLICAS))
    yield jax.tree.map(lambda x: x[0], params), state
    params, state = step(params, state, split_batch(i))


def shard_mapped(tx):
  mesh, specs = mesh_of(), edgc_jax.state_specs(tx, PARAMS)
  on_mesh = functools.partial(jax.shard_map, mesh=mesh)
  params = replicated(PARAMS, mesh)
  state = jax.jit(on_mesh(tx.init, in_specs=P(), out_specs=specs))(params)
  in_specs, out_specs = (P(), specs, P(AXIS)), (P(), specs)
  step = jax.jit(on_mesh(step_of(tx), in_specs=in_specs, out_specs=out_specs))
  for i in itertools.count():
    yield params, state
    params, state = step(params, state, batch(i))


def vmapped(tx, params=PARAMS, update=None):
  """Returns a step of simulated replicas, and their first state."""
  axes = edgc_jax.state_axes(tx, params)
  how = {"out_axes": (None, axes), "axis_name": AXIS}
  in_axes = (0, axes) if update else (None, axes, 0)
  step = jax.vmap(update or step_of(tx), in_axes=in_axes, **how)
  how = {"out_axes": axes, "axis_size": REPLICAS, "axis_name": AXIS}
  return step, jax.vmap(tx.init, in_axes=None, **how)(params)


def split_batch(i):
  return batch(i).reshape(REPLICAS, -1, 48)


def simulated(tx):
  step, state = vmapped(tx)
  step, params = jax.jit(step), PARAMS
  for i in itertools.count():
    yield params, state
    params, state = step(params, state, split_batch(i))


def plain(make):
  """In plain `jax.jit`; `make` makes the transformation for a mesh."""
  mesh = mesh_of()
  tx = make(mesh=mesh)
  step, params = jax.jit(step_of(tx, mesh)), replicated(PARAMS, mesh)
  state = jax.jit(tx.init)(params)
  for i in itertools.count():
    yield params, state
    params, state = step(params, state, batch(i))


def state_after(run, steps):
  """Returns parameters and state of a run after some steps."""
  return next(itertools.islice(run, steps, None))


def by_hand(every, steps, overlap):
  """DiLoCo with a loop over the replicas, on the host.

  A result is applied `overlap` steps after its exchange began.
  """
  inner, rule = optax.adam(1e-2), NESTEROV

  @jax.jit
  def step(local, state, x):
    found, state = inner.update(jax.grad(loss_fn)(local, x), state, local)
    return optax.apply_updates(local, found), state

  params, outer_state = PARAMS, rule.init(PARAMS)
  own = [(params, inner.init(params)) for _ in range(REPLICAS)]
  commons, begun = [], None
  for i in range(steps):
    for r, x in enumerate(split_batch(i)):
      own[r] = step(*own[r], x)
    due = i + 1 - overlap
    if due > 0 and due % every == 0:
      then = begun if overlap else [local for local, _ in own]
      mean = jax.tree.map(lambda *p: sum(p) / REPLICAS, *then)
      delta = jax.tree.map(jnp.subtract, params, mean)
      found, outer_state = rule.update(delta, outer_state, params)
      params = optax.apply_updates(params, found)
      # What a replica moved since goes on from the new common parameters.
      own = [
        (jax.tree.map(lambda new, x, old: new + (x - old), params, x, old), s)
        for (x, s), old in zip(own, then, strict=True)
      ]
    if (i + 1) % every == 0:
      begun = [local for local, _ in own]
    commons.append(params)
  return commons


@pytest.mark.parametrize(
  "overlap", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 3))]
)
def test_equals_a_loop_over_the_replicas(overlap):
  """The second exchange begins when the first is applied, for overlap=3."""
  run = simulated(tx_of(every=3, overlap=overlap))
  found = [params for params, _ in itertools.islice(run, 1, 11)]
  expected = by_hand(every=3, steps=10, overlap=overlap)
  chex.assert_trees_all_close(found, expected, atol=2e-5)
  chex.assert_trees_all_equal(expected[1], PARAMS)
  early = by_hand(every=3, steps=10, overlap=overlap - 1 if overlap else 1)
  with pytest.raises(AssertionError):
    chex.assert_trees_all_close(found[-1], early[-1], atol=2e-4)


@pytest.mark.slow
def test_all_ways_to_bind_the_axis_agree():
  """Those that are simulated are a loop over the replicas, as above."""
  make = functools.partial(tx_of, every=2, overlap=1)
  steps = 13  # the last one exchanges
  expected, state = state_after(simulated(make()), steps)
  moved = edgc_jax.metrics(state)
  assert moved["wire_bytes"] > 0 and moved["skipped_inner_steps"] == 0
  for run in (pmapped, shard_mapped, plain):
    own = run(make if run is plain else make())
    params, state = state_after(own, steps)
    chex.assert_trees_all_close(params, expected, atol=2e-5)
    chex.assert_trees_all_close(edgc_jax.metrics(state), moved, rtol=1e-4)
  distance = optax.tree.norm(optax.tree.sub(expected, PARAMS))
  assert distance > 0.1, "the tolerance is not what makes them agree"


def on_shards():
  """Returns a mesh, its options, and placed parameters."""
  mesh = mesh_of((2, 2), ("replica", "shard"))
  specs = {"w": P(None, "shard"), "v": P("shard"), "b": P("shard")}
  places = jax.tree.map(lambda s: jax.NamedSharding(mesh, s), specs)
  where = {"mesh": mesh, "param_specs": specs}
  return mesh, where, jax.device_put(PARAMS, places)


@pytest.mark.parametrize(
  ("inner", "is_sharded"),
  [
    (optax.adamw(1e-2), False),
    pytest.param(optax.adamw(1e-2), True, marks=pytest.mark.slow),
    # Orthogonalises whole matrices, which are in parts.
    pytest.param(optax.contrib.muon(1e-2), True, marks=pytest.mark.slow),
  ],
  ids=["adamw", "adamw-sharded", "muon-sharded"],
)
def test_inner_steps_send_nothing(inner, is_sharded):
  """All collectives over replicas of the compiled step are in the exchange."""
  if is_sharded:
    (mesh, where, params), within = on_shards(), {(0, 1), (2, 3)}
  else:
    mesh, params, within = mesh_of((REPLICAS,), ("replica",)), PARAMS, set()
    where = {"mesh": mesh}
  reducer = edgc_jax.on_mesh(
    edgc_jax.quantize(8, "replica"), **where, axis_name="replica"
  )
  tx = edgc_jax.local_steps(
    optax.chain(optax.clip_by_global_norm(1.0), inner),
    optax.chain(reducer, NESTEROV), 4, "replica", **where,
  )  # fmt: skip

  @jax.jit
  def step(params, state, x):
    local = edgc_jax.local_params(params, state, mesh)
    # Without the mean of the loss, which is a collective over replicas.
    grads = jax.vmap(jax.grad(loss_fn), spmd_axis_name="replica")(
      local, x.reshape(mesh.shape["replica"], -1, 48)
    )
    updates, state = tx.update(grads, state, params, local_params=local)
    return optax.apply_updates(params, updates), state

  state = tx.init(params)
  text = step.lower(params, state, batch(0)).compile().as_text()
  entry = text[text.index("ENTRY") :]
  assert "conditional(" in entry
  for part, is_sent in ((text, True), (entry, False)):
    groups = [
      {tuple(sorted(group)) for group in hlo.groups_of(line)}
      for line in filter(hlo.is_collective, part.splitlines())
    ]
    assert any(not own <= within for own in groups) == is_sent, groups
  for _ in range(5):
    params, state = step(params, state, batch(0))
  assert np.isfinite(loss_fn(params, batch(0)))


@pytest.mark.slow
def test_an_exchange_with_an_overlap_keeps_its_turn():
  """CPUs order collectives by data alone: with an overlap, too."""
  mesh, where, params = on_shards()
  reducer = edgc_jax.allreduce("replica")
  reducer = edgc_jax.on_mesh(reducer, **where, axis_name="replica")
  outer = optax.chain(reducer, NESTEROV)
  tx = edgc_jax.local_steps(
    optax.adam(1e-2), outer, 4, "replica", overlap=2, **where
  )
  step = jax.jit(step_of(tx, mesh, "replica"))
  text = step.lower(params, tx.init(params), batch(0)).compile().as_text()
  exchanges = set(re.findall(r"%?([\w.\-]+) = [^\n]* conditional\(", text))
  assert exchanges
  assert not [pair for pair in unordered(text) if exchanges & {*pair}]


@pytest.mark.slow
def test_shards_of_a_replica_skip_together(tmp_path):
  """By hand as in plain jit."""
  params = {"a": jnp.ones((64, 64)), "b": jnp.ones(2304), "c": jnp.ones(1600)}
  specs = {"a": P("shard"), "b": P(), "c": P()}
  mesh = mesh_of((2, 2), ("replica", "shard"))
  where = {"mesh": mesh, "param_specs": specs}

  def make(**where):
    reducer = edgc_jax.allreduce("replica")
    reducer = edgc_jax.on_mesh(reducer, **where, axis_name="replica")
    outer = optax.chain(reducer, optax.sgd(1.0))
    return edgc_jax.local_steps(optax.sgd(0.1), outer, 2, "replica", **where)

  tx = make(**where)
  places = jax.tree.map(lambda s: jax.NamedSharding(mesh, s), specs)
  params = jax.device_put(params, places)
  state = tx.init(params)
  own = edgc_jax.state_specs(tx, params, "replica", **where)
  assert jax.tree.structure(own) == jax.tree.structure(state)
  with ocp.StandardCheckpointer() as checkpointer:
    checkpointer.save(tmp_path / "saved", (params, state))
  _, again = edgc_jax.restore(
    tmp_path / "saved", tx, params, axis_name="replica", **where
  )
  chex.assert_trees_all_equal(again, state)

  def skipped(params, state, gradients):
    local = edgc_jax.local_params(params, state)
    return tx_by_hand.update(gradients, state, params, local_params=local)[1]

  tx_by_hand = make()
  gradients = params | {"a": params["a"].at[40, 0].set(jnp.nan)}
  by_hand = jax.shard_map(
    skipped, mesh=mesh, in_specs=(specs, own, specs), out_specs=own
  )
  state = jax.jit(by_hand)(params, state, gradients)
  np.testing.assert_array_equal(state.skipped.values, [1, 1])
  np.testing.assert_array_equal(state.offset.values["b"], 0.0)


@pytest.mark.slow
@pytest.mark.parametrize(
  ("inner", "bad"),
  [
    (optax.adam(1e-2), jnp.nan),
    (optax.adafactor(1e-2, min_dim_size_to_factor=8), 1e25),
  ],
  ids=["gradient", "step"],
)
def test_a_replica_skips_a_step_alone(inner, bad):
  """Its neighbours step; nothing of what is broken is left.

  A step of Adafactor is NaN where squares of finite gradients are infinite.
  """
  step, state = vmapped(tx_of(every=3, inner=inner))
  params, state = step(PARAMS, state, split_batch(0).at[2].set(bad))
  moved = np.abs(state.offset.values["w"]).max((1, 2, 3))
  assert moved[2] == 0 and np.all(moved[[0, 1, 3]] > 0)
  inner_state = state.inner_state.values
  for _, count in optax.tree.get_all_with_path(inner_state, "count"):
    assert count.ravel().tolist() == [1, 1, 0, 1]
  chex.assert_tree_all_finite(inner_state)
  for i in range(1, 3):
    params, state = step(params, state, split_batch(i))
  chex.assert_tree_all_finite(params)
  metrics = edgc_jax.metrics(state)
  assert metrics["skipped_inner_steps"] == 1 and metrics["skipped_steps"] == 0


@pytest.mark.slow
def test_a_round_that_is_not_finite_is_dropped():
  """All replicas start again from the common parameters."""
  tx = tx_of(every=2, rule=optax.sgd(1.0), inner=optax.sgd(1.0))
  step, state = vmapped(
    tx, update=lambda g, s: tx.update(g, s, PARAMS, local_params=PARAMS)
  )
  # Finite gradients whose sum over two steps is not.
  grads = jax.tree.map(lambda p: jnp.full((REPLICAS, *p.shape), 3e38), PARAMS)
  for _ in range(2):
    updates, state = step(grads, state)
  chex.assert_trees_all_equal(updates, optax.tree.zeros_like(PARAMS))
  assert edgc_jax.metrics(state)["skipped_steps"] == 1
  assert not any(np.any(d) for d in jax.tree.leaves(state.offset.values))


def test_an_exchange_in_flight_survives_another_overlap():
  """With one gradient at all steps every run of 12 steps moves as far."""
  ones = jax.tree.map(lambda p: jnp.ones((REPLICAS, *p.shape)), PARAMS)
  ends = []
  for first, then in ((3, 3), (3, 1), (1, 3), (4, 2)):
    params, state = PARAMS, None
    for i in range(16):
      overlap = first if i < 6 else then
      tx = tx_of(every=4, inner=optax.sgd(0.1), rule=optax.sgd(1.0),
                 overlap=overlap)  # fmt: skip
      step, start = vmapped(
        tx,
        update=lambda g, s, tx=tx: tx.update(g, s, PARAMS, local_params=PARAMS),
      )
      state = start if state is None else state
      updates, state = step(ones, state)
      params = optax.apply_updates(params, updates)
    ends.append(params["b"])
  np.testing.assert_allclose(ends, np.stack([ends[0]] * 4), rtol=1e-6)
  np.testing.assert_allclose(PARAMS["b"] - ends[0], 1.2, rtol=1e-5)


def test_bytes_of_each_step():
  """A dense round of 4 steps sends a quarter of a dense run."""
  size = sum(p.size for p in jax.tree.leaves(PARAMS))
  sent, changed, before = [], [], PARAMS
  for params, state in itertools.islice(simulated(tx_of(every=4)), 13):
    metrics = edgc_jax.metrics(state)
    assert metrics["dense_bytes"] == 4 * size
    sent.append(metrics["wire_bytes"])
    changed.append({k for k in PARAMS if np.any(params[k] != before[k])})
    before = params
  assert [step for step, n in enumerate(sent) if n] == [4, 8, 12]
  assert changed == [set(), *([set()] * 3 + [{"b", "v", "w"}]) * 3]
  # The first exchanges also compare gradients and replicas.
  np.testing.assert_allclose(sum(sent) / (4 * size), 3, rtol=0.05)
  np.testing.assert_allclose(metrics["compression_ratio"], 4, rtol=0.05)
  np.testing.assert_allclose(max(sent) / (4 * size), 1, rtol=0.05)


def test_metrics_and_description_are_those_of_the_reducer():
  params = {"w": jnp.zeros((64, 64)), "b": jnp.zeros(64)}
  for make in (edgc_jax.quantize, edgc_jax.powersgd):
    tx = tx_of(make(4))
    metrics = edgc_jax.metrics(tx.init(params))
    assert list(metrics["matrix_error"]) == ["w"]
    assert metrics["dense_bytes"] == 4 * (64 * 64 + 64)
    for _ in range(2):  # a second time, although JAX has traced it
      (part,) = edgc_jax.describe(tx, params).parts
      assert [row.path for row in part.rows] == ["['b']", "['w']"]


def test_metrics_count_what_the_reducer_finds():
  state = tx_of().init(PARAMS)
  outer = optax.tree.set(
    state.outer_state, diverged_steps=jnp.int32(1), skipped_steps=jnp.int32(2)
  )
  with pytest.warns(RuntimeWarning, match="1 of the steps"):
    metrics = edgc_jax.metrics(state._replace(outer_state=outer))
  assert (metrics["diverged_steps"], metrics["skipped_steps"]) == (1, 2)


def test_resizing_keeps_the_mean_of_the_own_parameters():
  """Of a state after half a round, of Muon and, for vectors, Adam."""
  make = functools.partial(tx_of, every=4, inner=optax.contrib.muon(1e-2))
  tx = make()
  _, state = state_after(shard_mapped(tx), 6)
  host = jax.device_get(state)
  for replicas in (2, 8):
    tx_there = make(mesh=mesh_of((replicas,)))
    like = jax.eval_shape(tx_there.init, PARAMS)
    resized = edgc_jax.resize(host, like)
    for part in ("offset", "inner_state"):
      old, new = (getattr(s, part).values for s in (host, resized))
      for a, b in zip(jax.tree.leaves(old), jax.tree.leaves(new), strict=True):
        assert b.shape == (replicas, *a.shape[1:])
        np.testing.assert_allclose(a.mean(0), b.mean(0), atol=1e-6)


@pytest.mark.slow
def test_parameters_in_bfloat16():
  params = jax.tree.map(lambda p: p.astype(jnp.bfloat16), PARAMS)
  step, state = vmapped(tx_of(every=2), params)
  for i in range(2):
    params, state = step(params, state, split_batch(i))
  assert {p.dtype for p in jax.tree.leaves(params)} == {jnp.dtype("bfloat16")}
  assert not np.array_equal(params["w"], PARAMS["w"].astype(jnp.bfloat16))


@pytest.mark.parametrize("mesh", [None, (REPLICAS,)])
def test_outer_chains_begin_with_a_reducer(mesh):
  mesh = mesh and mesh_of(mesh)
  reducer = edgc_jax.on_mesh(edgc_jax.quantize(4), mesh)
  for outer, got in (
    (NESTEROV, "a chain without a reducer"),
    (reducer, "a reducer alone, whose mean points back"),
    (optax.chain(optax.sgd(1.0), reducer), "a chain with another link before"),
  ):
    tx = edgc_jax.local_steps(optax.adam(1e-3), outer, 2, mesh=mesh)
    with pytest.raises(ValueError, match=f"`outer` must .* got '{got}"):
      tx.init(PARAMS)


def test_clipping_before_local_steps_is_named():
  mesh = mesh_of()
  tx = optax.chain(optax.clip_by_global_norm(1.0), tx_of(mesh=mesh))
  with pytest.warns(RuntimeWarning, match="into `inner` of local_steps"):
    edgc_jax.metrics(tx.init(PARAMS))


@pytest.mark.parametrize(("empty", "overlap"), [((), 0), ({}, 1)])
def test_an_empty_tree(empty, overlap):
  tx = tx_of(every=1, overlap=overlap)
  state = tx.init(empty)
  step = jax.vmap(
    lambda _: tx.update(empty, state, empty, local_params=empty), axis_name=AXIS
  )
  updates, state = step(jnp.zeros(REPLICAS))
  assert updates == empty and state.step.tolist() == [1] * REPLICAS
  state = tx_of(mesh=mesh_of()).init(empty)
  assert edgc_jax.metrics(state)["compression_ratio"] == 1.0


def test_metrics_send_nothing():
  """Own numbers of replicas that other processes hold are not read."""

  class Elsewhere:
    is_fully_addressable = False

    def __array__(self):
      raise AssertionError("read")

  tx = tx_of(mesh=mesh_of())
  state = tx.init(PARAMS)
  assert edgc_jax.metrics(state)["skipped_inner_steps"] == 0
  # Inside jit a sum over the replicas would be a collective.
  assert "skipped_inner_steps" not in jax.jit(edgc_jax.metrics)(state)
  state = state._replace(skipped=state.skipped._replace(values=Elsewhere()))
  assert "skipped_inner_steps" not in edgc_jax.metrics(state)


def test_own_parameters_where_users_forbid_promotion_and_an_axis_is_bound():
  mesh = mesh_of()
  state = tx_of(mesh=mesh).init(PARAMS)
  specs = edgc_jax.state_specs(tx_of(), PARAMS)
  with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
    stacked = edgc_jax.local_params(PARAMS, state, mesh)
    own = jax.shard_map(
      lambda params, state: edgc_jax.local_params(params, state, mesh),
      mesh=mesh, in_specs=(P(), specs), out_specs=P(AXIS),
    )  # fmt: skip
    shapes = jax.eval_shape(own, PARAMS, state)
  assert stacked["w"].shape == (REPLICAS, *PARAMS["w"].shape)
  assert shapes["b"].shape == (REPLICAS * len(PARAMS["b"]),)


def test_wrong_arguments():
  rule = "`overlap` must be at most every=4, .* got 5; choose fewer"
  with pytest.raises(ValueError, match=rule):
    tx_of(every=4, overlap=5)
  message = "`inner` must be the optimiser of one replica"
  for mesh in (None, mesh_of()):
    inner = optax.chain(
      edgc_jax.on_mesh(edgc_jax.powersgd(2), mesh), optax.adam(1e-3)
    )
    for own in (edgc_jax.on_mesh(edgc_jax.topk(), mesh), inner):
      with pytest.raises(ValueError, match=message):
        tx_of(inner=own, mesh=mesh).init(PARAMS)
  mesh = mesh_of((2, 2), ("pod", "host"))
  outer = optax.chain(
    edgc_jax.on_mesh(edgc_jax.allreduce("host"), mesh, axis_name="host"),
    NESTEROV,
  )
  tx = edgc_jax.local_steps(optax.adam(1e-3), outer, 2, "pod", mesh=mesh)
  with pytest.raises(ValueError, match="`axis_name` must be 'host'"):
    tx.init(PARAMS)
  staged = edgc_jax.powersgd(2, stages=edgc_jax.Stages("stage"))
  with pytest.raises(ValueError, match=r"`stages` must be None .* got 'stage'"):
    tx_of(staged).init(PARAMS)
  with pytest.raises(ValueError, match="local_steps skips steps and rounds"):
    edgc_jax.skip_nonfinite(tx_of()).init(PARAMS)


def test_update_refuses_other_parameters_and_states():
  """What is in flight would be lost in a state of other options."""
  both = {"params": PARAMS, "local_params": PARAMS}
  for made, used, given, message in (
    ({}, {}, {}, "`params` must be the common parameters"),
    ({}, {}, {"params": PARAMS}, "pass local_params=edgc_jax.local_params"),
    (
      {}, {}, both | {"late_updates": PARAMS},
      "pipeline stages exchange at every step",
    ),
    ({}, {"overlap": 1}, both, "`overlap` must be 0, as in the run .* got 1"),
    (
      {"overlap": 2}, {}, both,
      "`overlap` must be above 0, as in the run .* got 0",
    ),
  ):  # fmt: skip
    state = tx_of(**made).init(PARAMS)
    with pytest.raises(ValueError, match=message):
      tx_of(**used).update(PARAMS, state, **given)


def test_own_parameters_of_a_module():
  """Variables of Flax NNX stay variables."""
  params = nnx.state(nnx.Linear(48, 64, rngs=nnx.Rngs(0)), nnx.Param)
  mesh, like = mesh_of(), jax.tree.structure(params)
  tx = tx_of(every=2, mesh=mesh)
  state = tx.init(params)
  for _ in range(2):
    own = edgc_jax.local_params(params, state, mesh)
    assert jax.tree.structure(own) == like
    updates, state = tx.update(own, state, params, local_params=own)
    assert jax.tree.structure(updates) == like
  moved = optax.apply_updates(params, updates)
  own = edgc_jax.local_params(moved, state, mesh)
  for common, each in zip(*map(jax.tree.leaves, (moved, own)), strict=True):
    np.testing.assert_array_equal(each, np.stack([common] * REPLICAS))
  assert not np.array_equal(moved["kernel"][...], params["kernel"][...])


def test_own_parameters_need_their_state_and_mesh():
  masked = optax.masked(tx_of(), {"w": True, "v": True, "b": False})
  for tx, message in (
    (optax.adam(1e-3), "one state of local_steps in it"),
    (masked, r"optax\.partition inside of its `inner`"),
    (tx_of(mesh=mesh_of()), "a state of 4 replicas, got None; in plain"),
  ):
    with pytest.raises(ValueError, match=message):
      edgc_jax.local_params(PARAMS, tx.init(PARAMS))
  differentiated = edgc_jax.value_and_grad(loss_fn, mesh_of(), is_local=True)
  with pytest.raises(ValueError, match="own parameters of 4 replicas"):
    differentiated(PARAMS, batch(0))
