"""Methods run in step; equal matrices are computed together."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import float32
from helpers.meshes import (
  AXIS,
  BACKENDS,
  Pmap,
  ShardMap,
  assert_replicas_equal,
  factors,
  gradients_like,
  with_field,
)
from jax.sharding import PartitionSpec as P

import edgc_jax
from edgc_jax import extend
from edgc_jax.budget.fixed_budget import FixedBudget
from edgc_jax.leaves.leaf import LeafState, leaves_in
from edgc_jax.measure import hlo
from edgc_jax.methods.low_rank import with_factors
from edgc_jax.reducer import rounds
from edgc_jax.reducer.reducer import Plan, by_exchange, make_reducer
from edgc_jax.reducer.rounds import (
  DENSE,
  Each,
  Input,
  Method,
  Outcome,
  added,
  count_bytes,
)
from edgc_jax.state import growth
from edgc_jax.wire import averages
from edgc_jax.wire.codes import code_of
from edgc_jax.wire.wire import CountingWire, Send

REPLICAS = 4
PARAMS = {
  "bias": jnp.zeros(30),
  "once": jnp.zeros((24, 40)),
  "twice": jnp.zeros((2, 16, 20)),
}


def plain_mean(leaf, gradient, state, ranks, draws):
  """Sends M in one round."""
  m = added(gradient, state.residual)
  reply = yield Send(m)
  return Outcome(reply.mean, m - reply.sent)


def signs(leaf, gradient, state, ranks, draws):
  """Sends the mean magnitude of each matrix, then signs in units of it."""
  m = added(gradient, state.residual).reshape(leaf.view)
  first = yield Send(exact=jnp.abs(m).mean(axis=(1, 2), keepdims=True))
  second = yield Send(first.exact * jnp.sign(m))
  return Outcome(second.mean, m - second.sent)


def reducer_of(methods, code=None, **options):
  """Returns a reducer with a method of one's own for each leaf, by its path.

  Leaves without one are sent dense.
  """

  def plan_for(leaves):
    found = []
    for leaf in leaves:
      own = methods.get(leaf.path.strip("[']"))
      method = Method(own, **options) if own else DENSE
      found.append(
        dataclasses.replace(leaf, method=method, has_residual=bool(own))
      )
    return Plan(by_exchange(found), FixedBudget())

  return make_reducer(AXIS, plan_for, code=code)


@pytest.mark.parametrize("wire_dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("backend", list(BACKENDS))
@pytest.mark.slow
def test_methods_of_one_and_of_two_rounds(wire_dtype, backend):
  code = code_of(wire_dtype)
  tx = reducer_of({"once": plain_mean, "twice": signs}, code)
  run = BACKENDS[backend](tx, PARAMS)
  for step in range(3):
    gradients = gradients_like(PARAMS, seed=step)
    before = run.residual()
    updates = run.step(gradients)
    after = run.residual()
    assert_replicas_equal(updates)
    for name, gradient in gradients.items():
      owed, kept = np.asarray(gradient).mean(0), updates[name][0]
      if name != "bias":
        owed = owed + before[name].mean(0)
        kept = kept + after[name].mean(0)
      np.testing.assert_allclose(kept, owed, 1e-5, 1e-5)
  # All rounds of all leaves are two, and the bytes are those counted.
  text = run.compiled(gradients)
  values = edgc_jax.metrics(run.state)
  for replicas in (REPLICAS, 1000) if code is None else (REPLICAS,):
    (part,) = edgc_jax.describe(tx, PARAMS, replicas=replicas).parts
    assert part.wire_bytes == (values["wire_bytes"],)
  assert hlo.wire_bytes_outside_branches(text) == values["wire_bytes"]
  if code is None:
    assert len(hlo.collectives_in_order(text)) == 2
    exact = 4 * (30 + 2) + growth.WIRE_BYTES
    assert values["wire_bytes"] == exact + 4 * (960 + 640)


def test_a_round_without_values_sends_no_code():
  """The scale that an encoding adds has no values to scale."""
  params = {"twice": PARAMS["twice"]}
  tx = reducer_of({"twice": signs}, code_of("int4"))
  run = Pmap(tx, params)
  gradients = gradients_like(params, seed=0)
  for _ in range(2):  # replicas are checked in the first step
    run.step(gradients)
  values = edgc_jax.metrics(run.state)
  text = run.compiled(gradients)
  assert hlo.wire_bytes_outside_branches(text) == values["wire_bytes"]
  assert values[
    "wire_bytes"
  ] == 4 * 2 + growth.WIRE_BYTES + averages.average_bytes(
    [(640,)], [code_of("int4")], REPLICAS
  )


@pytest.mark.parametrize(
  ("methods", "bad"),
  [
    ({"once": plain_mean, "twice": signs}, "once"),
    ({"once": plain_mean}, "bias"),
  ],
)
def test_a_step_that_is_not_finite_is_skipped(methods, bad):
  """Also by a method whose reply comes before a vector is not finite."""
  run = Pmap(reducer_of(methods), PARAMS)
  run.step(gradients_like(PARAMS, seed=0))
  before = run.residual()
  gradients = gradients_like(PARAMS, seed=1)
  gradients[bad] = gradients[bad].at[(1, *[0] * PARAMS[bad].ndim)].set(np.nan)
  updates = run.step(gradients)
  chex.assert_trees_all_equal(updates, optax.tree.zeros_like(updates))
  chex.assert_trees_all_equal(run.residual(), before)
  values = edgc_jax.metrics(run.state)
  assert values["skipped_steps"] == 1
  # Errors that no method measures are not reported.
  assert not {"relative_error", "residual_norm", "matrix_error"} & set(values)


def without_residual(leaf, gradient, state, ranks, draws):
  reply = yield Send(0.5 * added(gradient, state.residual))
  return Outcome(reply.mean)


@pytest.mark.parametrize(
  ("kind", "message", "rounds", "measures"),
  [
    (TypeError, "must be a generator", lambda *_: Outcome(None), False),
    (TypeError, "must return an `Outcome`", lambda *_: (yield None), False),
    (ValueError, "`residual` must be returned", without_residual, False),
    (ValueError, "`energies` must be returned", plain_mean, True),
  ],
)
def test_mistakes_in_a_method_are_named(kind, message, rounds, measures):
  params = {"once": PARAMS["once"]}
  tx = reducer_of({"once": rounds}, measures=measures)
  update = jax.vmap(tx.update, axis_name=AXIS, in_axes=(0, None))
  with pytest.raises(kind, match=message):
    jax.eval_shape(update, gradients_like(params, 0), tx.init(params))


def test_bytes_are_counted_once():
  """Equal exchanges are traced once; all that bytes depend on tells apart."""
  traced = []

  def rounds(leaf, gradient, *rest):
    traced.append(leaf.shape)
    # Of four bytes, or of eight.
    reply = yield Send(gradient, gathered=jnp.argmax(gradient, 1))
    return Outcome(reply.mean)

  (leaf,) = leaves_in({"w": jnp.zeros((30, 50))})
  leaf = dataclasses.replace(leaf, method=Method(rounds))
  values, indices = 4 * 1500, 4 * 30 // 2
  for _ in range(2):
    assert count_bytes([leaf], (4,), None)[0] == values + indices
    assert len(traced) == 1
  in_code = averages.average_bytes([(30, 50)], [code_of("int4")], 3)
  for sent, *arguments in (
    (values + 3 * indices, [leaf], (4,), None, 3),
    (in_code + 3 * indices, [leaf], (4,), code_of("int4"), 3),
    (2 * values + 2 * indices, [leaf, leaf], (4,), None),
  ):
    assert count_bytes(*arguments)[0] == sent
  with jax.enable_x64(True):
    assert count_bytes([leaf], (4,), None)[0] == values + 2 * indices


def test_a_function_of_all_leaves_keeps_their_types_and_sizes():
  """It runs once for leaves of close sizes, and may return any tree."""
  sizes = []

  def twice(x, y):
    sizes.append(x.shape)
    return {"sum": jnp.sum(x, axis=0), "y": 2 * y}

  def method(leaf, gradient, state, ranks, draws):
    m = added(gradient).reshape(leaf.view)
    number = jnp.full(leaf.view.count, leaf.view.cols)
    if leaf.view.rows > 7:
      number = number.astype(jnp.float32)
    found = yield Each(twice, (m, number))
    assert found["y"].dtype == number.dtype
    np.testing.assert_array_equal(found["y"], 2 * number)
    reply = yield Send(m - found["sum"][:, None])
    return Outcome(reply.mean)

  shapes = {"a": (5, 9), "b": (7, 12), "c": (2, 8, 16), "d": (8, 9)}
  params = {k: jnp.ones(shape) for k, shape in shapes.items()}
  leaves = leaves_in(params)
  method = Method(method, compresses=False)
  inputs = [
    Input(dataclasses.replace(leaf, method=method), x, LeafState(), None)
    for leaf, x in zip(leaves, params.values(), strict=True)
  ]
  wire = CountingWire(2, (0,), None)
  outcomes, _ = rounds.run(inputs, wire, jax.random.key(0))
  # Integers and float32, each once, and its shapes.
  assert set(sizes) >= {(7, 12), (8, 16)}
  for x, outcome in zip(params.values(), outcomes, strict=True):
    np.testing.assert_array_equal(outcome.update, 1 - x.shape[-2] + 0 * x)


def test_a_stack_needs_no_residual():
  """But lists over its leaves."""

  def method(leaf, terms, state, ranks, draws):
    reply = yield Send(exact=[added(*own) for own in terms])
    return Outcome(reply.exact if leaf.path != "bad" else terms[0][0])

  leaves = leaves_in({"a": jnp.zeros((4, 6)), "b": jnp.zeros((4, 6))})
  method = Method(method, joins=True)
  for path in ("", "bad"):
    inputs = [
      Input(dataclasses.replace(leaf, method=method, path=path), x,
            LeafState(jnp.zeros((1, 1, 6))), jnp.ones(1, jnp.int32))
      for leaf, x in zip(leaves, (jnp.ones((4, 6)), jnp.zeros((4, 6))),
                         strict=True)
    ]  # fmt: skip
    run = lambda: rounds.run(  # noqa: E731
      inputs,  # noqa: B023
      CountingWire(2, (1,), None), jax.random.key(0),
    )  # fmt: skip
    if path:
      with pytest.raises(TypeError, match="must be a list over leaves"):
        run()
    else:
      (first, second), _ = run()
      assert first.update.all() and not second.update.any()


def test_a_method_that_cannot_be_hashed():
  class Rounds:
    __hash__ = None
    __call__ = staticmethod(plain_mean)

  (leaf,) = leaves_in({"w": jnp.zeros((30, 50))})
  leaf = dataclasses.replace(leaf, method=Method(Rounds()))
  assert count_bytes([leaf], (4,), None)[0] == 4 * 1500


def test_bytes_are_counted_anew_where_leaves_are_not_joined():
  """Each value is padded alone where the compiler shards it further."""
  leaves = leaves_in({name: jnp.zeros((30, 50)) for name in "abc"})
  code = code_of("int4")
  leaves = with_factors(leaves, (4,), 1.0, code)
  mesh = jax.make_mesh((2, 2), ("data", "fsdp"))
  found = []

  def count(x):
    found.append(count_bytes(leaves, (4,), code, 2)[0])
    return x

  count(None)
  how = {"in_specs": P(), "out_specs": P(), "axis_names": {"data"}}
  on_mesh = jax.jit(jax.shard_map(count, mesh=mesh, **how))
  jax.eval_shape(on_mesh, jnp.zeros(()))
  padded = lambda size: -(-size // 64) * 64  # noqa: E731
  apart, joined = (
    sum(averages.average_bytes([(size,)], [code], 2) for size in sizes)
    for sizes in (
      [padded(4 * 30) * 3, padded(4 * 50) * 3],
      [padded(3 * 4 * 30), 3 * 4 * 50],
    )
  )
  assert found[1] - found[0] == apart - joined
  assert apart > joined


def test_dense_leaves_have_a_round_of_their_own():
  """Bytes of leaves add up to the bytes of all."""
  tx = float32.powersgd(4, min_ratio=1.2)
  (part,) = edgc_jax.describe(tx, PARAMS).parts
  of_rows = sum(row.wire_bytes[0] for row in part.rows)
  assert part.wire_bytes[0] == of_rows + growth.WIRE_BYTES
  assert count_bytes([], (4,), None).tolist() == [0]


# Four matrices of one shape: by themselves, and in a stack of one leaf.
APART = {
  "a": {"deep": [jnp.zeros((24, 40)), jnp.zeros(7)]},
  "b": jnp.zeros((40, 24)),  # tall: another kind
  "c": jnp.zeros((2, 24, 40)),
  "d": jnp.zeros((30, 36)),
  "z": jnp.zeros((24, 40)),
}
STACKED = {
  "b": APART["b"], "d": APART["d"], "deep": jnp.zeros(7),
  "stack": jnp.zeros((4, 24, 40)),
}  # fmt: skip


def stacked(tree, axis=1):
  """Puts leaves like `APART` in a tree like `STACKED`, [replicas, ...]."""
  (first, vector), last = tree["a"]["deep"], tree["z"]
  if first.ndim < tree["c"].ndim:
    first, last = first[:, None], last[:, None]
  stack = jnp.concatenate([first, tree["c"], last], axis)
  return {"b": tree["b"], "d": tree["d"], "deep": vector, "stack": stack}


@pytest.mark.slow
def test_leaves_are_sent_as_one_stacked_leaf_would_be():
  """Wherever they are in the tree: equal Q give equal updates.

  Packed at two ranks, and dense.
  """
  apart, together = (
    Pmap(float32.powersgd({0: 4, 2: 0, 4: 6}, min_ratio=1.2), params)
    for params in (APART, STACKED)
  )
  own_factors = stacked(factors(apart.state))
  together.state = with_field(together.state, "factor_q", own_factors)
  for step in range(6):
    gradients = gradients_like(APART, seed=step)
    updates = stacked(apart.step(gradients))
    expected = together.step(stacked(gradients))
    for name in STACKED:
      np.testing.assert_allclose(
        updates[name], expected[name], 1e-4, 1e-5, err_msg=name
      )
  left = stacked(apart.residual())["stack"]
  np.testing.assert_allclose(left, together.residual()["stack"], 1e-3, 1e-4)
  sent = [edgc_jax.metrics(x.state)["wire_bytes"] for x in (apart, together)]
  assert sent[0] == sent[1]


@pytest.mark.slow
def test_equal_leaves_of_several_dtypes():
  """They are computed together; each keeps its own rounding errors."""
  params = {
    "narrow": jnp.zeros((24, 40), jnp.bfloat16),
    "wide": jnp.zeros((24, 40)),
  }
  run = Pmap(float32.powersgd(4, min_ratio=1.2), params)
  for step in range(3):
    gradients = gradients_like(params, seed=step)
    before, updates = run.residual(), run.step(gradients)
    after = run.residual()
    for name, gradient in gradients.items():
      assert updates[name].dtype == params[name].dtype
      owed = np.float32(gradient).mean(0) + before[name].mean(0)
      kept = np.float32(updates[name][0]) + after[name].mean(0)
      np.testing.assert_allclose(kept, owed, 2e-5, 2e-6)


@pytest.mark.slow
def test_the_error_of_each_leaf_is_its_own():
  """A leaf whose gradient has rank one loses nothing."""
  run = Pmap(float32.powersgd(4, min_ratio=1.2), APART)
  gradients = gradients_like(APART, seed=0)
  line = jnp.outer(jnp.arange(24.0), jnp.arange(40.0))
  gradients["z"] = jnp.broadcast_to(line, (REPLICAS, 24, 40))
  run.step(gradients)
  errors = edgc_jax.metrics(run.state)["matrix_error"]
  assert errors["z"][0] < 1e-3
  assert len(errors["c"]) == 2
  assert min(*errors["c"], *errors["a/deep/0"]) > 0.3


def test_an_update_of_its_own_is_refused():
  """JAX's types tell under `shard_map`, where zeros like M are a replica's."""

  def scattered(leaf, gradient, state, ranks, draws):
    m = added(gradient, state.residual)
    reply = yield Send(m[:1])
    return Outcome(jnp.zeros_like(m).at[:1].set(reply.mean), m)

  def bare(leaf, gradient, state, ranks, draws):
    yield gradient

  params = {"w": jnp.zeros((40, 60))}
  for method, message in (
    (scattered, "`update` must be equal on all replicas, .*'w'"),
    (bare, "`rounds` of the method .* must yield a `Send`"),
  ):
    tx = extend.reducer(Method(method), AXIS)
    with pytest.raises((TypeError, ValueError), match=message):
      ShardMap(tx, params).step(gradients_like(params, 0))
