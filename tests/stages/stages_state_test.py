"""States of pipeline stages: metrics, skipped steps, shardings."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from absl.testing import absltest
from helpers import float32
from helpers.meshes import (
  AXIS,
  DIVERGED_BYTES,
  factors,
  find,
  residuals,
  traced_once,
  window_bytes,
)
from helpers.stage_runs import (
  REPLICAS,
  STAGES,
  Run,
  global_params,
  gradients,
  local_params,
  make_edgc,
  param_specs,
  placement,
)
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import edgc_jax
from edgc_jax.wire import agreement

pytestmark = pytest.mark.slow


@functools.cache
def edgc_run():
  """Returns a run of `edgc`, compiled once for all tests."""
  return Run(traced_once(make_edgc()))


class StagesStateTest(absltest.TestCase):
  def test_each_stage_has_its_own_entropy(self):
    run = edgc_run().restart()
    scales = (1.0, 0.5, 2.0, 1e-3)
    run.step(gradients(0, scales))
    gaussian = 0.5 * np.log(2 * np.pi * np.e)
    np.testing.assert_allclose(
      run.metrics()["entropy"], gaussian + np.log(scales), atol=0.03
    )

  def test_a_nonfinite_gradient_of_one_stage_skips_the_step_on_all(self):
    run = edgc_run().restart()
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
    self.assertEqual(run.metrics()["skipped_steps"], 3)

  def test_metrics_count_the_bytes_of_a_stage(self):
    run = edgc_run().restart()
    local = local_params()
    for step in range(4):
      run.step(gradients(step))
      numbers = run.metrics()
      sample = 4 * 4 * 2  # two matrices of one leaf
      more = sample + agreement.STAGE_CHECK_BYTES
      if step == 0:
        more += agreement.CHECK_BYTES + DIVERGED_BYTES
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
      self.assertEqual(numbers["wire_bytes"], expected)


class StateSpecsTest(absltest.TestCase):
  def test_specs_and_shapes(self):
    tx = edgc_jax.skip_nonfinite(
      optax.chain(make_edgc(), optax.adam(1e-3)), (AXIS, "stage")
    )
    run = Run(tx)
    specs = find(run.specs)
    embedding, kernel = (
      specs.leaves["embedding"], specs.leaves["blocks"]["kernel"]
    )  # fmt: skip
    self.assertEqual(embedding.residual, P(("stage", AXIS)))
    self.assertEqual(kernel.factor_q, P("stage"))
    self.assertEqual(kernel.stats.rank, P("stage"))
    self.assertEqual(specs.stats.rank, P("stage"))
    self.assertEqual(specs.budget.decision.rank, P("stage"))
    self.assertEqual(specs.budget.first_rank, P())
    self.assertEqual(specs.checks.skipped_steps, P())
    adam = run.specs.inner_state[1][0]
    self.assertEqual(adam.mu, param_specs())
    self.assertEqual(adam.count, P())
    residual = residuals(run.state)["blocks"]["kernel"]
    self.assertEqual(residual.shape, (STAGES * REPLICAS * 2, 48, 40))

  def test_specs_of_sums_over_two_axes(self):
    """Sums of `accumulate` differ by stage and by both axes of replicas."""
    tx = float32.powersgd(
      4, ("pod", AXIS), stages=edgc_jax.Stages("stage", lambda *_: "own")
    )
    mesh = AbstractMesh(
      (STAGES, 2, 2), ("stage", "pod", AXIS), axis_types=(AxisType.Auto,) * 3
    )
    specs = edgc_jax.state_specs(
      edgc_jax.accumulate(tx, 2),
      {"kernel": jax.ShapeDtypeStruct((STAGES * 2, 48, 40), jnp.float32)},
      ("pod", AXIS),
      mesh=mesh,
      param_specs={"kernel": P("stage")},
    )
    own = P(("stage", "pod", AXIS))
    self.assertEqual(specs.accumulated.values["kernel"], own)
    self.assertEqual(specs.inner_state.leaves["kernel"].residual, own)
    self.assertEqual(specs.mini_step, P())

  def test_round_trip_through_the_host(self):
    """A state on the host, placed by its specs again, continues the run."""
    run = edgc_run().restart()
    for step in range(3):
      run.step(gradients(step))
    host = jax.device_get(run.state)
    expected = run.step(gradients(3))
    run.state = jax.device_put(
      host, jax.tree.map(lambda s: NamedSharding(run.mesh, s), run.specs)
    )
    chex.assert_trees_all_equal(run.step(gradients(3)), expected)

  def test_mesh_is_needed(self):
    with self.assertRaisesRegex(ValueError, "`mesh` must be given"):
      edgc_jax.state_specs(
        make_edgc(), global_params(), param_specs=param_specs()
      )


if __name__ == "__main__":
  absltest.main()
