"""The pipeline computes the same as stages in a row, and no more."""

import functools
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.meshes import AXIS, stage_mesh
from jax.sharding import PartitionSpec as P

from experiments.trainer.models.pipeline import apply_stages

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("without_cache")]

WIDTH = 6


def stage_fn(params, x):
  return jnp.tanh(x @ params["w"][0]) + x


def example(num_stages, num_microbatches, rows=3):
  random = np.random.default_rng(num_stages)
  w = random.standard_normal((num_stages, WIDTH, WIDTH)) / WIDTH
  x = random.standard_normal((num_microbatches, rows, WIDTH))
  return {"w": jnp.asarray(w, jnp.float32)}, jnp.asarray(x, jnp.float32)


def in_a_row(params, x):
  for w in params["w"]:
    x = stage_fn({"w": w[None]}, x)
  return jnp.sum(jnp.sin(x)), x


def on_mesh(fn, out_specs, num_stages=2, replicas=1, in_specs=None):
  """Binds the stages of a function of parameters and microbatches."""
  return jax.shard_map(
    fn,
    mesh=stage_mesh(num_stages, replicas),
    in_specs=in_specs or (P("stage"), P()),
    out_specs=out_specs,
  )


def pipelined(num_stages, fn=stage_fn):
  """Returns a function of global arrays for value and gradients."""

  def loss(params, x):
    y = jax.lax.psum(apply_stages(fn, params, x), "stage")
    return jnp.sum(jnp.sin(y)), y

  run = jax.value_and_grad(loss, (0, 1), has_aux=True)
  out_specs = ((P(), P()), (P("stage"), P()))
  return jax.jit(on_mesh(run, out_specs, num_stages))


@pytest.mark.parametrize(
  ("num_stages", "num_microbatches"), [(1, 3), (2, 1), (4, 7), (8, 3)]
)
def test_values_and_gradients_are_of_stages_in_a_row(
  num_stages, num_microbatches
):
  params, x = example(num_stages, num_microbatches)
  (loss, y), gradients = pipelined(num_stages)(params, x)
  (expected, row), row_gradients = jax.value_and_grad(
    in_a_row, (0, 1), has_aux=True
  )(params, x)
  np.testing.assert_allclose(loss, expected, rtol=1e-5)
  np.testing.assert_allclose(y, row, rtol=1e-5, atol=1e-6)
  chex.assert_trees_all_close(gradients, row_gradients, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("num_stages", "num_microbatches"), [(4, 6), (4, 2)])
def test_permutes_name_live_pairs_only(num_stages, num_microbatches):
  """Pairs grow on the ramp and shrink on the drain, in both directions."""
  params, x = example(num_stages, num_microbatches)
  text = pipelined(num_stages).lower(params, x).compile().as_text()
  found = []
  for pairs in re.findall(
    r"collective-permute(?:-start)?\(.*?source_target_pairs=\{(.*?)\}\}", text
  ):
    numbers = [int(n) for n in re.findall(r"\d+", pairs)]
    found.append(tuple(zip(numbers[::2], numbers[1::2], strict=True)))
  # Stage s works on microbatch t - s; stage s + 1 reads the result.
  expected = []
  in_scan = False
  for t in range(num_stages + num_microbatches - 1):
    live = [s for s in range(num_stages) if 0 <= t - s < num_microbatches]
    pairs = tuple((s, s + 1) for s in live if s + 1 < num_stages)
    is_full = len(live) == num_stages
    if pairs and not (is_full and in_scan):
      expected += [pairs, tuple((b, a) for a, b in pairs)]
    in_scan |= is_full
  assert sorted(map(sorted, found)) == sorted(map(sorted, expected))


def test_idle_ticks_are_not_computed():
  num_stages, num_microbatches = 4, 3
  calls = []

  def counted(params, x):
    jax.debug.callback(lambda v: calls.append(float(v)), x[0, 0])
    return stage_fn(params, x)

  params, x = example(num_stages, num_microbatches)
  jax.block_until_ready(pipelined(num_stages, counted)(params, x))
  jax.effects_barrier()
  # Each forward pass is repeated for the backward pass.
  assert len(calls) == 2 * num_stages * num_microbatches


def test_memory_grows_with_the_boundaries_only():
  """Intermediates of a stage are not kept for each microbatch."""
  wide = 64

  def thick(params, x):
    h = jnp.tile(x, (1, wide))
    for _ in range(3):
      h = jnp.tanh(h) * 1.1
    return (x + h[:, :WIDTH]) @ params["w"][0]

  temporary = []
  rows = 100
  for num_microbatches in (8, 16):
    params, x = example(4, num_microbatches, rows=rows)
    compiled = pipelined(4, thick).lower(params, x).compile()
    temporary.append(compiled.memory_analysis().temp_size_in_bytes)
  boundary = 4 * rows * WIDTH
  growth = (temporary[1] - temporary[0]) / 8
  assert growth < 10 * boundary
  assert 10 * boundary < wide * boundary  # of one intermediate


def test_trees_and_dtypes():
  def run(factor, x, shift):
    def loss(factor, shift):
      def stage(params, tree):
        moved = tree["a"] * params["factor"][0] + params["shift"]
        return {"a": moved, "b": tree["b"] + 1}

      params = {"factor": factor, "shift": shift}
      tree = {"a": x, "b": x.astype(jnp.bfloat16)}
      y = apply_stages(stage, params, tree)
      y = jax.lax.psum(y, "stage")
      return jnp.sum(y["a"]), y["b"]

    return jax.value_and_grad(loss, (0, 1), has_aux=True)(factor, shift)

  out_specs = ((P(), P()), (P("stage"), P()))
  run = jax.jit(on_mesh(run, out_specs, in_specs=(P("stage"), P(), P())))
  x = jnp.array([1.0, 2.0, 3.0])
  (value, b), gradient = run(jnp.array([2.0, 3.0]), x, jnp.array(10.0))
  np.testing.assert_allclose(value, np.sum((2 * x + 10) * 3 + 10))
  np.testing.assert_allclose(gradient[0], [np.sum(3 * x), np.sum(2 * x + 10)])
  # Equal on all stages, so its gradient is summed over them.
  np.testing.assert_allclose(gradient[1], 3 * (3 + 1))
  np.testing.assert_array_equal(b.astype(jnp.float32), x + 2)
  assert b.dtype == jnp.bfloat16


def test_microbatches_need_not_vary_as_the_parameters_do():
  params, x = example(2, 3)

  def run(params, x):
    local = jax.lax.pcast(params, AXIS, to="varying")
    y = apply_stages(stage_fn, local, x)
    return jax.lax.pmean(jax.lax.psum(y, "stage"), AXIS)

  run = on_mesh(run, P(), replicas=2)
  np.testing.assert_allclose(
    jax.jit(run)(params, x), in_a_row(params, x)[1], rtol=1e-5, atol=1e-6
  )


def test_errors():
  params, x = example(2, 2)
  with pytest.raises(ValueError, match="`microbatches` must be"):
    pipelined(2)(params, x[:0])
  with pytest.raises(ValueError, match=r"`stage_fn` must return"):
    pipelined(2, lambda params, x: x[:, :1])(params, x)

  forward = functools.partial(apply_stages, stage_fn)
  forward = on_mesh(forward, P("stage"))
  with pytest.raises(TypeError, match=r"`params` must.*int32 at \['m"):
    jax.eval_shape(forward, params | {"mask": jnp.zeros(2, jnp.int32)}, x)
  with pytest.raises(TypeError, match="`microbatches` must have float"):
    jax.eval_shape(forward, params, jnp.zeros((2, 3, WIDTH), jnp.int32))

  def closes_over(params, x):
    inner = lambda p, y: stage_fn(p, y) + params["w"][0, 0]  # noqa: E731
    return apply_stages(inner, params, x)

  run = on_mesh(closes_over, P("stage"))
  with pytest.raises(ValueError, match="closes over traced values"):
    jax.jit(run)(params, x)
