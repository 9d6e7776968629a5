"""What every reducer owes its user, on pmap and on shard_map alike."""

import functools
import inspect

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl.testing import absltest, parameterized
from helpers.flat_options import edgc
from helpers.meshes import AXIS, BACKENDS, Pmap, find, gradients_like

import edgc_jax

F32 = {"rtol": 2e-5, "atol": 2e-6}
BF16 = {"rtol": 1e-2, "atol": 1e-2}

PARAMS = {
  "bfloat16": jnp.zeros((24, 40), jnp.bfloat16),
  "bias": jnp.zeros((24,)),
  "empty": jnp.zeros((0, 5)),
  "scalar": jnp.zeros(()),
  "stack": jnp.zeros((3, 16, 20)),
  "tall": jnp.zeros((64, 12)),
  "wide": jnp.zeros((12, 64)),
}
# Short windows, so that a few steps see warm-up and every rank.
QUICK = {
  "rank_min": 2, "rank_max": 4, "rank_multiple": 2, "window": 2,
  "warmup_steps": 2, "step_rate": 1.0, "min_ratio": 1.2,
}  # fmt: skip
# Enough where not the leaves are the question: quick to compile.
FEW = {name: PARAMS[name] for name in ("bias", "wide")}

REDUCERS = {
  "allreduce": lambda: edgc_jax.allreduce(),
  "powersgd": lambda: edgc_jax.powersgd(3, min_ratio=1.2),
  "powersgd_warm": lambda: edgc_jax.powersgd(3, warmup_steps=2, min_ratio=1.2),
  "edgc_published": lambda: edgc(
    granularity="stage", warmup_rank=None, **QUICK
  ),
  "edgc_matrix": lambda: edgc(rule="linear", estimator="histogram", **QUICK),
  "edgc_bfloat16": lambda: edgc(wire_dtype="bfloat16", **QUICK),
  "powersgd_bfloat16": lambda: edgc_jax.powersgd(
    3, wire_dtype=jnp.bfloat16, warmup_steps=2, min_ratio=1.2
  ),
  "topk": lambda: edgc_jax.topk(0.1, min_size=1),
  "randomk": lambda: edgc_jax.randomk(0.1, min_size=1),
  "quantize": lambda: edgc_jax.quantize(
    4, block=16, error_feedback=True, min_size=1
  ),
  "signsgd": lambda: edgc_jax.signsgd(block=16, min_size=1),
}
# Compiled on one backend only; what they share is on both with others.
ONCE = {
  "edgc_published": "pmap", "edgc_bfloat16": "pmap",
  "randomk": "shard_map",
  "signsgd": "pmap",
}  # fmt: skip


# What a step computes is what it is with others of them.
SAME_STEPS = ("edgc_bfloat16", "edgc_published", "powersgd_warm")


@functools.cache
def run_of(name, backend):
  """One compilation for all tests of a reducer, and its first state."""
  return BACKENDS[backend](REDUCERS[name](), PARAMS)


def fresh(name, backend):
  run = run_of(name, backend)
  run.state = run.first_state
  return run


CASES = [
  (f"{name}_{backend}", name, backend)
  for name in REDUCERS
  for backend in BACKENDS
  if ONCE.get(name, backend) == backend
]


def mean(tree):
  return jax.tree.map(lambda x: np.asarray(x, np.float32).mean(0), tree)


class ContractTest(parameterized.TestCase):
  @parameterized.named_parameters(*CASES)
  def test_steps_keep_the_contract(self, name, backend):
    """Nothing is lost, all replicas agree, the state keeps its form."""
    run = fresh(name, backend)
    form = jax.tree.map(lambda x: (x.shape, x.dtype), run.state)
    for step in range(6):
      gradients = gradients_like(PARAMS, seed=step)
      before = run.residual()
      updates = run.step(gradients)
      after = run.residual()
      for update in jax.tree.leaves(updates):
        for replica in update[1:]:
          np.testing.assert_array_equal(replica, update[0])
      for leaf, gradient in mean(gradients).items():
        owed, kept = gradient, np.asarray(updates[leaf][0], np.float32)
        tolerance = F32
        if not isinstance(after[leaf], optax.MaskedNode):
          owed = owed + before[leaf].mean(0)
          kept = kept + after[leaf].mean(0)
        elif leaf == "bfloat16":  # rounded, and no residual to keep the rest
          tolerance = BF16
        np.testing.assert_allclose(kept, owed, err_msg=leaf, **tolerance)
      self.assertEqual(
        jax.tree.map(lambda x: (x.shape, x.dtype), run.state), form
      )
      chex.assert_trees_all_equal_dtypes(updates, PARAMS)
    self.assertEqual(run.traces, 1)
    self.assertEqual(edgc_jax.metrics(run.state)["skipped_steps"], 0)

  @parameterized.named_parameters(*CASES)
  def test_nonfinite_gradient_of_one_replica_skips_the_step(
    self, name, backend
  ):
    for bad, leaf in ((np.nan, "wide"), (np.inf, "wide"), (-np.inf, "bias")):
      run = fresh(name, backend)
      for step in range(3):
        run.step(gradients_like(PARAMS, seed=step))
      before = find(run.state).exchange
      gradients = gradients_like(PARAMS, seed=3)
      gradients[leaf] = (
        gradients[leaf].at[(1,) + (0,) * PARAMS[leaf].ndim].set(bad)
      )
      updates = run.step(gradients)
      for update in jax.tree.leaves(updates):
        np.testing.assert_array_equal(update, np.zeros_like(update))
      chex.assert_trees_all_equal(find(run.state).exchange, before)
      self.assertEqual(edgc_jax.metrics(run.state)["skipped_steps"], 1)
      updates = run.step(gradients_like(PARAMS, seed=4))
      chex.assert_tree_all_finite(updates)
      self.assertGreater(np.abs(updates["bias"]).max(), 0)

  @parameterized.named_parameters(*CASES)
  def test_zero_tiny_and_huge_gradients(self, name, backend):
    run = fresh(name, backend)
    for step, scale in enumerate((0.0, 1e-18, 1.0, 1e15, 1e-30, 0.0)):
      gradients = gradients_like(PARAMS, seed=step, scale=scale)
      updates = run.step(gradients)
      chex.assert_tree_all_finite(updates)
      chex.assert_tree_all_finite(run.residual())
    values = edgc_jax.metrics(run.state)
    self.assertEqual(values["skipped_steps"], 0)
    chex.assert_tree_all_finite(values)

  @parameterized.named_parameters(
    ("allreduce", lambda: edgc_jax.allreduce()),
    ("powersgd", lambda: edgc_jax.powersgd(64, min_ratio=0)),
    (
      "edgc",
      lambda: edgc(
        rank_max=64, rank_min=64, rank_multiple=64, max_rank_step=64,
        min_ratio=0, window=1, warmup_steps=1, step_rate=1.0,
      ),
    ),
  )  # fmt: skip
  def test_full_rank_gives_the_dense_mean(self, make):
    run = Pmap(make(), PARAMS)
    for step in range(3):
      gradients = gradients_like(PARAMS, seed=step)
      updates = run.step(gradients)
      for name, expected in mean(gradients).items():
        np.testing.assert_allclose(
          np.asarray(updates[name][0], np.float32),
          expected,
          err_msg=name,
          **(BF16 if name == "bfloat16" else {"rtol": 1e-4, "atol": 1e-5}),
        )

  @parameterized.named_parameters(*REDUCERS.items())
  def test_init_needs_shapes_only(self, make):
    tx = make()
    abstract = jax.eval_shape(lambda: PARAMS)
    chex.assert_trees_all_equal(tx.init(abstract), tx.init(PARAMS))

  @parameterized.named_parameters(
    *((n, make) for n, make in REDUCERS.items() if n not in SAME_STEPS)
  )
  def test_compiled_equals_eager(self, make):
    """Eagerly, op by op, on one replica under a bound axis."""
    tx = make()
    state = tx.init(FEW)
    gradients = gradients_like(FEW, seed=0)
    gradients = jax.tree.map(lambda g: g[:1], gradients)
    update = jax.vmap(tx.update, axis_name=AXIS, in_axes=(0, None))
    with jax.disable_jit():
      eager = update(gradients, state)
    compiled = jax.jit(update)(gradients, state)
    # Of the factors only the span is determined, not the basis: compare what
    # they make, and what they leave.
    chex.assert_trees_all_close(eager[0], compiled[0], **F32)
    eager, compiled = eager[1], compiled[1]
    chex.assert_trees_all_close(
      eager.exchange.residual, compiled.exchange.residual, **F32
    )
    chex.assert_trees_all_close(eager.stats, compiled.stats, **F32)

  @parameterized.parameters(*(name for name in REDUCERS if name not in ONCE))
  def test_both_backends_agree(self, name):
    runs = [fresh(name, backend) for backend in BACKENDS]
    for step in range(5):
      gradients = gradients_like(PARAMS, seed=step)
      first, second = (run.step(gradients) for run in runs)
      chex.assert_trees_all_close(first, second, **F32)


class InsideOptaxTest(parameterized.TestCase):
  """The reducer works wherever optax lets a transformation stand."""

  def setUp(self):
    super().setUp()
    self.gradients = gradients_like(FEW, seed=0)

  def check(self, tx, expected=None, backends=BACKENDS):
    for backend in backends.values():
      run = backend(tx, FEW)
      for _ in range(3):
        updates = run.step(self.gradients)
      chex.assert_tree_all_finite(updates)
      if expected is not None:
        chex.assert_trees_all_close(
          jax.tree.map(lambda u: u[0], updates), expected, **F32
        )
      self.assertIn("rank", edgc_jax.metrics(run.state))

  def test_chain(self):
    self.check(optax.chain(REDUCERS["edgc_matrix"](), optax.adamw(1e-3)))

  def test_named_chain(self):
    self.check(
      optax.named_chain(
        ("reduce", REDUCERS["powersgd"]()), ("sgd", optax.sgd(1.0))
      )
    )

  def test_defaults_in_a_chain(self):
    params = {"w": jnp.zeros((40, 80))}
    run = Pmap(optax.chain(edgc(), optax.adamw(3e-4)), params)
    chex.assert_tree_all_finite(run.step(gradients_like(params, seed=0)))

  def test_masked_and_partition(self):
    is_matrix = jax.tree.map(lambda p: p.ndim == 2, FEW)
    others = jax.tree.map(lambda m: not m, is_matrix)
    # One reducer per part: metrics wants to know which of them is meant.
    tx = optax.chain(
      optax.masked(REDUCERS["powersgd"](), is_matrix),
      optax.masked(edgc_jax.allreduce(), others),
    )
    labels = jax.tree.map(lambda m: "low" if m else "dense", is_matrix)
    partitioned = optax.partition(
      {"low": REDUCERS["powersgd"](), "dense": edgc_jax.allreduce()}, labels
    )
    for candidate in (tx, partitioned):
      run = Pmap(candidate, FEW)
      updates = run.step(self.gradients)
      np.testing.assert_allclose(
        updates["bias"][0], mean(self.gradients)["bias"], **F32
      )
      with self.assertRaisesRegex(ValueError, "exactly one reducer"):
        edgc_jax.metrics(run.state)

  def test_inject_hyperparams(self):
    arguments = inspect.signature(edgc_jax.edgc).parameters
    tx = optax.inject_hyperparams(edgc_jax.edgc, static_args=list(arguments))(
      rank_min=2,
      rank_max=4,
      window=2,
      warmup_steps=2,
      min_ratio=1.2,
      sampling=edgc_jax.Sampling(step_rate=1.0),
      rule=edgc_jax.RankRule(rank_multiple=2),
    )
    self.check(tx, backends={"pmap": Pmap})
    with self.assertRaisesRegex(TypeError, "`rank`.*static_args"):
      optax.inject_hyperparams(edgc_jax.powersgd)(rank=2).init(FEW)

  def test_multi_steps(self):
    tx = optax.MultiSteps(REDUCERS["edgc_matrix"](), every_k_schedule=2)
    self.check(tx, backends={"pmap": Pmap})

  def test_state_is_found_by_optax_tree_get(self):
    tx = optax.chain(REDUCERS["edgc_matrix"](), optax.adam(1e-3))
    state = tx.init(FEW)
    self.assertEqual(optax.tree.get(state, "wire_bytes"), 0)
    self.assertIn("wide", optax.tree.get(state, "residual"))


if __name__ == "__main__":
  absltest.main()
