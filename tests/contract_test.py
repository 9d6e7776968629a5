"""The contract of every reducer, on pmap and on shard_map."""

import functools
import inspect

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
  assert_replicas_equal,
  factors,
  first_replica,
  gradients_like,
  residuals,
  traced_once,
  with_field,
)
from helpers.reducers import WITHOUT_RESIDUAL, is_plain, moving, reducers

import edgc_jax

F32 = {"rtol": 2e-5, "atol": 2e-6}
BF16 = {"rtol": 1e-2, "atol": 1e-2}

PARAMS = {
  "bfloat16": jnp.zeros((40, 24), jnp.bfloat16),
  "bias": jnp.zeros((24,)),
  "empty": jnp.zeros((0, 5)),
  "scalar": jnp.zeros(()),
  "stack": jnp.zeros((3, 16, 20)),
  "wide": jnp.zeros((12, 64)),
}
# Few leaves compile quickly, if a test is not about leaves.
FEW = {name: PARAMS[name] for name in ("bias", "wide")}
GRADIENTS = gradients_like(FEW, seed=0)
REDUCERS = reducers()
# Step by step, without the compiler; the others compute the same steps.
EAGER = (*filter(is_plain, REDUCERS), "allreduce_bfloat16", "powersgd_int4")


def params_of(name):
  """Variants run the code of their reducer, and have few leaves."""
  return PARAMS if is_plain(name) else FEW


@functools.cache
def run_of(name, backend):
  """Returns a run of a reducer, compiled once for all tests."""
  return BACKENDS[backend](traced_once(REDUCERS[name]()), params_of(name))


def fresh(name, backend):
  run = run_of(name, backend)
  run.state = run.first_state
  return run


# Variants run the code of a reducer: each, and a reducer that has some, is only
# compiled on one backend. `test_both_backends_agree` holds the two together.
VARIED = {name.partition("_")[0] for name in REDUCERS if not is_plain(name)}
CASES = [
  pytest.param(
    name, backend, marks=() if is_plain(name) and not j else pytest.mark.slow
  )
  for i, name in enumerate(REDUCERS)
  for j, backend in enumerate(BACKENDS)
  if (
    j == 0 or name not in VARIED if is_plain(name) else i % len(BACKENDS) == j
  )
]
on_all_cases = pytest.mark.parametrize(("name", "backend"), CASES)


def mean(tree):
  return jax.tree.map(lambda x: np.asarray(x, np.float32).mean(0), tree)


def as_on_mesh(state):
  """Returns a state of pmap as it is under shard_map."""
  joined = jax.tree.map(lambda e: e[:, 0], residuals(state))
  return with_field(first_replica(state), "residual", joined)


@on_all_cases
def test_steps_keep_the_contract(name, backend):
  """Nothing is lost, replicas agree, shapes and dtypes stay, one trace."""
  run = fresh(name, backend)
  for step in range(6):
    gradients = gradients_like(params_of(name), seed=step)
    before = run.residual()
    updates = run.step(gradients)
    after = run.residual()
    assert_replicas_equal(updates)
    for leaf, gradient in mean(gradients).items():
      owed, kept = gradient, np.asarray(updates[leaf][0], np.float32)
      tolerance = F32
      if not isinstance(after[leaf], optax.MaskedNode):
        owed = owed + before[leaf].mean(0)
        kept = kept + after[leaf].mean(0)
      elif name in WITHOUT_RESIDUAL:
        continue
      elif leaf == "bfloat16":  # no residual keeps the rounding errors
        tolerance = BF16
      np.testing.assert_allclose(kept, owed, err_msg=leaf, **tolerance)
    chex.assert_trees_all_equal_shapes_and_dtypes(run.state, run.first_state)
    chex.assert_trees_all_equal_dtypes(updates, params_of(name))
  assert edgc_jax.metrics(run.state)["skipped_steps"] == 0


@on_all_cases
def test_nonfinite_gradient_of_one_replica_skips_the_step(name, backend):
  run = fresh(name, backend)
  for step in range(3):
    run.step(gradients_like(params_of(name), seed=step))
  first, good = run.state, gradients_like(params_of(name), seed=3)
  before = residuals(first), factors(first)
  for bad, leaf in ((np.nan, "wide"), (np.inf, "wide"), (-np.inf, "bias")):
    run.state = first
    entry = (1,) + (0,) * PARAMS[leaf].ndim
    updates = run.step(good | {leaf: good[leaf].at[entry].set(bad)})
    chex.assert_trees_all_equal(updates, optax.tree.zeros_like(updates))
    after = residuals(run.state), factors(run.state)
    chex.assert_trees_all_equal(after, before)
    assert edgc_jax.metrics(run.state)["skipped_steps"] == 1
    updates = run.step(good)
    chex.assert_tree_all_finite(updates)
    assert np.abs(updates["bias"]).max() > 0


@on_all_cases
@pytest.mark.filterwarnings("ignore:The entropy of the gradients")
def test_zero_tiny_and_huge_gradients(name, backend):
  run = fresh(name, backend)
  for step, scale in enumerate((0.0, 1e-18, 1.0, 1e15, 1e-30, 0.0)):
    gradients = gradients_like(params_of(name), seed=step, scale=scale)
    updates = run.step(gradients)
    chex.assert_tree_all_finite(updates)
    chex.assert_tree_all_finite(run.residual())
  values = edgc_jax.metrics(run.state)
  assert values["skipped_steps"] == 0
  chex.assert_tree_all_finite(values)


@pytest.mark.parametrize("name", [*filter(is_plain, REDUCERS)])
@pytest.mark.slow
def test_both_backends_agree(name):
  """In each step from equal states: a code enlarges the last rounding."""
  on_pmap, on_mesh = (fresh(name, backend) for backend in BACKENDS)
  places = jax.tree.map(lambda x: x.sharding, on_mesh.state)
  for step in range(5):
    gradients = gradients_like(PARAMS, seed=step)
    state = jax.tree.map(np.asarray, as_on_mesh(on_pmap.state))
    on_mesh.state = jax.device_put(state, places)
    first, second = (run.step(gradients) for run in (on_pmap, on_mesh))
    chex.assert_trees_all_close(first, second, **F32)
    chex.assert_trees_all_close(as_on_mesh(on_pmap.state), on_mesh.state, **F32)


@pytest.mark.parametrize("name", ["edgc", "quantize"])
def test_users_may_forbid_promotion(name):
  tx = edgc_jax.accumulate(REDUCERS[name](), 2)
  with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
    state = jax.eval_shape(tx.init, FEW)
    over_replicas = jax.vmap(
      lambda g, state: tx.update(g, state, FEW)[0], (0, None), axis_name=AXIS
    )
    updates = jax.eval_shape(over_replicas, GRADIENTS, state)
  assert updates["wide"].shape[1:] == FEW["wide"].shape


ALL = {
  "allreduce": edgc_jax.allreduce,
  "topk": functools.partial(edgc_jax.topk, 1.0, min_size=1),
  "randomk": functools.partial(edgc_jax.randomk, 1.0, min_size=1),
  "powersgd": functools.partial(float32.powersgd, 64, min_ratio=0),
  "edgc": functools.partial(
    float32.edgc, rank_max=64, rank_min=64, rank_multiple=64, window=1,
    warmup_steps=1, min_ratio=0, sampling=edgc_jax.Sampling(step_rate=1.0),
  ),
}  # fmt: skip


@pytest.mark.parametrize("name", ALL)
@pytest.mark.slow
def test_full_rank_gives_the_dense_mean(name):
  run, is_low_rank = Pmap(ALL[name](), PARAMS), name in ("powersgd", "edgc")
  for step in range(3 if is_low_rank else 2):
    gradients = gradients_like(PARAMS, seed=step)
    updates = first_replica(run.step(gradients))
    expected = mean(gradients)
    if name == "topk":  # leaves that are no matrices have 4 bits
      for leaf in ("bias", "scalar"):
        del updates[leaf], expected[leaf]
    narrow = np.asarray(updates.pop("bfloat16"), np.float32)
    np.testing.assert_allclose(narrow, expected.pop("bfloat16"), **BF16)
    chex.assert_trees_all_close(updates, expected, rtol=1e-4, atol=1e-5)
  if not is_low_rank:
    assert edgc_jax.metrics(run.state)["relative_error"] < 1e-6


@pytest.mark.parametrize("name", REDUCERS)
def test_init_needs_shapes_only(name):
  tx, params = REDUCERS[name](), params_of(name)
  abstract = jax.eval_shape(lambda: params)
  chex.assert_trees_all_equal(tx.init(abstract), tx.init(params))


@pytest.mark.parametrize("name", [*EAGER])
@pytest.mark.slow
def test_compiled_equals_eager(name):
  """One replica under a bound axis runs eagerly, op by op."""
  tx = REDUCERS[name]()
  state = tx.init(FEW)
  gradients = jax.tree.map(lambda g: g[:1], GRADIENTS)
  update = jax.vmap(tx.update, axis_name=AXIS, in_axes=(0, None))
  with jax.disable_jit():
    eager = update(gradients, state)
  compiled = jax.jit(update)(gradients, state)
  # Factors are determined up to their basis: compare updates and residuals.
  chex.assert_trees_all_close(eager[0], compiled[0], **F32)
  for part in (residuals, lambda state: state.stats):
    chex.assert_trees_all_close(part(eager[1]), part(compiled[1]), **F32)


INJECTED = optax.inject_hyperparams(
  edgc_jax.edgc, static_args=list(inspect.signature(edgc_jax.edgc).parameters)
)


@pytest.mark.slow
@pytest.mark.parametrize(
  ("backend", "make"),
  [
    ("pmap", lambda: optax.chain(REDUCERS["edgc"](), optax.adamw(1e-3))),
    ("pmap", lambda: optax.MultiSteps(REDUCERS["edgc"](), every_k_schedule=2)),
    ("pmap", lambda: INJECTED(**moving(rank=4))),
    *(
      (backend, lambda: optax.named_chain(
        ("reduce", REDUCERS["powersgd"]()), ("sgd", optax.sgd(1.0))
      ))
      for backend in BACKENDS
    ),
  ],
  ids=range(5),
)  # fmt: skip
def test_inside_of_a_combinator(backend, make):
  run = BACKENDS[backend](make(), FEW)
  assert not np.any(optax.tree.get(run.state, "wire_bytes"))
  assert set(optax.tree.get(run.state, "leaves")) == set(FEW)
  for _ in range(3):
    updates = run.step(GRADIENTS)
  chex.assert_tree_all_finite(updates)
  assert "rank" in edgc_jax.metrics(run.state)


@pytest.mark.slow
def test_defaults_in_a_chain():
  params = {"w": jnp.zeros((40, 80))}
  run = Pmap(optax.chain(edgc_jax.edgc(), optax.adamw(3e-4)), params)
  chex.assert_tree_all_finite(run.step(gradients_like(params, seed=0)))


def test_injected_options_are_static():
  with pytest.raises(TypeError, match=r"`rank`.*static_args"):
    optax.inject_hyperparams(edgc_jax.powersgd)(rank=2).init(FEW)


@pytest.mark.slow
@pytest.mark.parametrize("combinator", ["masked", "partition"])
def test_one_reducer_for_each_part(combinator):
  is_matrix = jax.tree.map(lambda p: p.ndim == 2, FEW)
  others = jax.tree.map(lambda m: not m, is_matrix)
  labels = jax.tree.map(lambda m: "low" if m else "dense", is_matrix)
  low, dense = REDUCERS["powersgd"](), edgc_jax.allreduce()
  if combinator == "masked":
    low, dense = optax.masked(low, is_matrix), optax.masked(dense, others)
    tx = optax.chain(low, dense)
  else:
    tx = optax.partition({"low": low, "dense": dense}, labels)
  run = Pmap(tx, FEW)
  updates = run.step(GRADIENTS)
  np.testing.assert_allclose(updates["bias"][0], mean(GRADIENTS)["bias"], **F32)
  # Metrics cannot tell which reducer is meant.
  with pytest.raises(ValueError, match="exactly one reducer"):
    edgc_jax.metrics(run.state)
