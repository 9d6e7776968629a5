"""Mistakes with pipeline stages raise errors."""

import functools

import jax
import jax.numpy as jnp
from absl.testing import absltest
from helpers.meshes import AXIS, stage_mesh
from helpers.stage_runs import (
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


class StagesErrorsTest(absltest.TestCase):
  def test_slack_needs_its_times(self):
    with self.assertRaisesRegex(ValueError, "`link` must be given.*'none'"):
      edgc_jax.edgc(stages=edgc_jax.Stages("stage"))
    with self.assertRaisesRegex(ValueError, "`backward_seconds` must be given"):
      edgc_jax.edgc(link=TIMES["link"], stages=edgc_jax.Stages("stage"))
    with self.assertRaisesRegex(ValueError, "`align` must be one of"):
      make_edgc(align="left")
    edgc_jax.edgc(stages=edgc_jax.Stages("stage", align="none"))

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
    """Traces one update on stages with `late_updates`."""
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
      edgc_jax.edgc(link=(1e-3, 1e8))

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


if __name__ == "__main__":
  absltest.main()
