"""Measures what computing takes, on the devices that will be used."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from edgc_jax import validation
from edgc_jax.comm.codes import code_of
from edgc_jax.plan.leaves import ViewFn
from edgc_jax.plan.link_model import CompressionModel, fit_line
from edgc_jax.reducers import edgc, powersgd
from edgc_jax.stopwatch import agree, medians

_AXIS = "data"


def measure_compression(
  params: Any,
  ranks: Sequence[int] = (8, 32),
  *,
  repeats: int = 10,
  min_ratio: float = 2.0,
  matrix_view: ViewFn | None = None,
  granularity: str = "matrix",
  mesh: Mesh | None = None,
) -> CompressionModel:
  """Times the computation of compressed exchanges.

  `edgc.update` at one rank less `allreduce().update`, each device for itself:
  both compute all and send nothing. All devices of this process are at it at
  once, since they may share cores and memory; base + per_rank * rank is fitted
  by least squares, both at least 0. At large ranks orthonormalisation grows
  faster than a line: give ranks that span those to be used. Coding values for
  the wire, and factors that alternate, are not in it.

  Args:
    params: Parameters or their `jax.ShapeDtypeStruct`s. Only shapes and types
      are read; gradients are drawn, Gaussian, from a fixed seed.
    ranks: At least two different ranks.
    repeats: How often each is timed.
    min_ratio: As for `edgc`.
    matrix_view: As for `edgc`.
    granularity: As for `edgc`; ranks by matrix are computed at more columns.
    mesh: With several processes the mesh of the training: all call this at
      the same point, and get the same model (see `agree`).

  Returns:
    The model.
  """
  validation.require_several("ranks", ranks, 1)
  validation.require_int("repeats", repeats, 1)
  reducers = [
    edgc.edgc(
      _AXIS, rank_max=rank, rank_min=rank, rank_multiple=rank,
      min_ratio=min_ratio, matrix_view=matrix_view, granularity=granularity,
    )
    for rank in ranks
  ]  # fmt: skip
  dense = powersgd.allreduce(_AXIS)
  extra = _beyond(dense, reducers, params, repeats, mesh)
  base, per_rank = fit_line(np.array(ranks, float), extra)
  if per_rank < 0:
    base, per_rank = max(float(np.mean(extra)), 0.0), 0.0
  return CompressionModel(base, per_rank)


def measure_coding(
  params: Any,
  wire_dtype: Any = "bfloat16",
  *,
  repeats: int = 10,
  mesh: Mesh | None = None,
) -> float:
  """Times what a dense exchange computes.

    "float32"   allreduce().update less a pass that hands gradients on
    others      allreduce(wire_dtype=...).update less allreduce().update

  Nothing is sent, as in `measure_compression`.

  Args:
    params: As for `measure_compression`.
    wire_dtype: As for `allreduce`.
    repeats: How often it is timed.
    mesh: As for `measure_compression`.

  Returns:
    Seconds, at least 0.
  """
  validation.require_int("repeats", repeats, 1)
  least = powersgd.allreduce(_AXIS)
  if code_of(wire_dtype) is None:
    least = optax.scale(0.5)  # the compiler leaves out what changes nothing
  coded = powersgd.allreduce(_AXIS, wire_dtype=wire_dtype)
  return max(0.0, float(_beyond(least, [coded], params, repeats, mesh)[0]))


def measure_backward(
  stage_fn: Callable[[Any, Any], Any],
  params: Any,
  inputs: Any,
  *,
  repeats: int = 10,
  mesh: Mesh | None = None,
) -> float:
  """Times one microbatch's backward pass through a stage.

  With rematerialisation: the forward pass is computed again, then gradients of
  parameters and inputs, from a cotangent of ones.

  Args:
    stage_fn: From parameters and inputs to outputs, without collectives.
    params: The stage's parameters.
    inputs: One microbatch as it comes into the stage.
    repeats: How often it is timed.
    mesh: As for `measure_compression`.

  Returns:
    Median seconds.
  """
  validation.require_int("repeats", repeats, 1)

  @jax.jit
  def backward(params: Any, inputs: Any) -> Any:
    outputs, pull_back = jax.vjp(stage_fn, params, inputs)
    return pull_back(jax.tree.map(jnp.ones_like, outputs))

  seconds = medians([lambda: backward(params, inputs)], repeats)
  return float((seconds if mesh is None else agree(mesh, seconds))[0])


def _beyond(
  least: optax.GradientTransformation,
  others: Sequence[optax.GradientTransformation],
  params: Any,
  repeats: int,
  mesh: Mesh | None,
) -> np.ndarray:
  """Seconds of updates less those of the first, nothing sent; [k]."""
  devices = np.array(jax.local_devices())
  alone = Mesh(devices.reshape(-1, 1), ("copies", _AXIS))
  random = np.random.default_rng(0)

  def draw(leaf: Any) -> jax.Array:
    values = random.standard_normal(jnp.shape(leaf), np.float32)
    return jnp.asarray(values, jnp.result_type(leaf))

  gradients = jax.device_put(
    jax.tree.map(draw, params), NamedSharding(alone, P())
  )
  calls = [_update(alone, tx, gradients) for tx in (least, *others)]
  seconds = medians(calls, repeats)
  if mesh is not None:
    seconds = agree(mesh, seconds)
  return np.asarray(seconds[1:]) - seconds[0]


def _update(mesh: Mesh, tx: Any, gradients: Any) -> Callable[[], Any]:
  """A call of a transformation's second update, in which nothing is sampled.

  What is alone on the axis cannot vary.
  """
  on_device = functools.partial(
    jax.shard_map, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False
  )
  state = jax.jit(on_device(tx.init))(gradients)
  run = jax.jit(on_device(tx.update))
  _, state = run(gradients, state)
  return functools.partial(run, gradients, state)
