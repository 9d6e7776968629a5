"""Mistakes with pipeline stages raise errors."""

import functools

import jax
import jax.numpy as jnp
import pytest
from helpers.meshes import AXIS, stage_mesh
from helpers.stage_runs import (
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
from jax.sharding import PartitionSpec as P

import edgc_jax

pytestmark = pytest.mark.usefixtures("without_cache")


def test_slack_needs_its_times():
  stages = edgc_jax.Stages("stage")
  with pytest.raises(ValueError, match=r"`link` must be given.*'none'"):
    edgc_jax.edgc(stages=stages)
  with pytest.raises(ValueError, match="`backward_seconds` must be given"):
    edgc_jax.edgc(link=TIMES["link"], stages=stages)
  edgc_jax.edgc(stages=edgc_jax.Stages("stage", align="none"))


def test_unbound_stage_axis():
  tx, params = make_edgc(), local_params()
  update = jax.vmap(tx.update, axis_name=AXIS, in_axes=(0, None))
  grads = jax.tree.map(lambda p: p[None], params)
  with pytest.raises(ValueError, match="`stage_axis` must be an axis"):
    update(grads, tx.init(params))


def traced(fn, in_specs, out_specs, *args, **options):
  """Traces a function on all stages and replicas."""
  how = {"in_specs": in_specs, "out_specs": out_specs, **options}
  run = jax.shard_map(fn, mesh=stage_mesh(STAGES, REPLICAS), **how)
  return jax.eval_shape(run, *args)


def specs_of(tx):
  """Returns specs of the parameters and of the state."""
  mesh, specs = stage_mesh(STAGES, REPLICAS), param_specs()
  return specs, edgc_jax.state_specs(
    tx, global_params(), mesh=mesh, param_specs=specs
  )


def test_types_must_be_tracked():
  tx = make_edgc()
  own = specs_of(tx)
  state = traced(tx.init, own[:1], own[1], global_params())
  with pytest.raises(ValueError, match="check_vma=True"):
    traced(
      lambda g, s: tx.update(g, s)[0], own, P(), global_params(), state,
      check_vma=False,
    )  # fmt: skip


def test_programs_from_a_cache():
  run = stage_run(
    edgc_jax.allreduce(stages=edgc_jax.Stages("stage", placement))
  )
  wanted = {
    "jax_compilation_cache_dir": "/of/this/user",
    "jax_enable_compilation_cache": True,
  }
  before = {name: getattr(jax.config, name) for name in wanted}
  for name, value in wanted.items():
    jax.config.update(name, value)
  try:
    with pytest.raises(RuntimeError, match=r"must be off.*/of/this/user"):
      run.step(gradients(0))
  finally:
    for name, value in before.items():
      jax.config.update(name, value)


def test_replicated_leaf_that_is_not_declared_shared():
  tx = edgc_jax.allreduce(stages=edgc_jax.Stages())
  params = {"norm": jnp.zeros((REPLICAS, 4))}

  def update(g):
    local = {"norm": g["norm"][0]}
    return tx.update(local, tx.init(local))[0]

  with pytest.raises(ValueError, match=r"`placement`.*'own'.*\['norm'\]"):
    traced(update, (P(AXIS),), P(), params)


def test_unknown_placement():
  stages = edgc_jax.Stages(placement=lambda path, shape: "here")
  tx = edgc_jax.allreduce(stages=stages)
  with pytest.raises(ValueError, match="`placement` must return one of"):
    tx.init({"w": jnp.zeros((2, 2))})


def late(late_updates, **options):
  """Traces one update on stages with `late_updates`."""
  options = {"placement": placement} | options
  tx = edgc_jax.allreduce(stages=edgc_jax.Stages("stage", **options))
  specs, state_specs = specs_of(tx)

  def update(params):
    grads = jax.lax.pcast(params, AXIS, to="varying")
    more = functools.partial(late_updates, grads)
    return tx.update(grads, tx.init(params), params, late_updates=more)[1]

  return traced(update, (specs,), state_specs, global_params())


def test_late_updates():
  late(lambda grads, after: after(grads) | {"blocks": grads["blocks"]})
  with pytest.raises(ValueError, match="`late_updates` must return a tree"):
    late(lambda grads, after: grads["blocks"])
  with pytest.raises(ValueError, match=r"unchanged.*\['blocks'\]\['bias'"):
    late(lambda grads, after: after(grads))
  with pytest.raises(ValueError, match=r"local gradients.*\['embedding'"):
    mean = lambda x: jax.lax.pmean(x, AXIS)  # noqa: E731
    late(lambda g, after: g | {"embedding": mean(g["embedding"])})


def test_leaf_that_differs_by_stage_declared_shared():
  with pytest.raises(ValueError, match=r"'own' or 'split'.*\['blocks'\]"):
    late(lambda grads, after: grads, placement=lambda path, shape: "shared")


def test_agreeing_over_too_few_axes():
  tx = edgc_jax.skip_nonfinite(edgc_jax.allreduce(stages=edgc_jax.Stages()))

  def update(g):
    local = {"w": g[0, 0]}
    return tx.update(local, tx.init(local))[0]

  grads = jnp.zeros((STAGES, REPLICAS, 4))
  with pytest.raises(ValueError, match=r"`axis_name`.*\('stage',\)"):
    traced(update, (P("stage", AXIS),), P("stage"), grads)
