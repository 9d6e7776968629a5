"""Measures what the models of time need, on the devices that will be used."""

import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from edgc_jax import (
  adaptive_rank,
  collectives,
  cpu_devices,
  fixed_rank,
  guards,
)
from edgc_jax.link import CompressionModel, LinkModel
from edgc_jax.matrices import ViewFn
from edgc_jax.stopwatch import agree, medians

_CHAINED = 8  # all-reduces in a call, so that the call itself weighs little
_AXIS = "data"


def measure_link(
  mesh: Mesh,
  axis_name: str = "data",
  sizes: Sequence[int] = (2**16, 2**18, 2**20, 2**22, 2**23),
  repeats: int = 10,
) -> LinkModel:
  """Times all-reduces of several sizes over one axis of a mesh.

    seconds = latency + bytes / bandwidth

  is fitted by least squares of relative errors; absolute ones would leave the
  latency to the noise of the largest size. A latency below zero is set to zero
  and the bandwidth fitted again. On several processes all call this at the
  same point, and get the same model.

  Args:
    mesh: The mesh of the training. Groups along the axis are timed all at
      once, as they will be when they share the links.
    axis_name: The axis that gradients are averaged over.
    sizes: Bytes of float32 payload, at least two sizes.
    repeats: How often each size is timed.

  Returns:
    The model; `r_squared` is the share of the weighted variance explained.

  Raises:
    ValueError: if there is no such axis, or nothing to measure.

  Warns:
    RuntimeWarning: if times do not grow with size. Latency is then 0 and
      bandwidth that of the largest size.
  """
  guards.require(
    mesh.shape.get(axis_name, 1) > 1,
    "axis_name",
    axis_name,
    f"an axis of the mesh {dict(mesh.shape)} with several devices",
    "name the one gradients are averaged over; a single replica has no link",
  )
  _require_several("sizes", sizes, least=4)
  guards.require_int("repeats", repeats, 1)
  cpu_devices.require_threads()

  counts = [size // 4 for size in sizes]
  calls = [_all_reduces(mesh, axis_name, count) for count in counts]
  seconds = agree(mesh, medians(calls, repeats) / _CHAINED)
  num_bytes = 4.0 * np.array(counts)
  latency, slope = _fit_line(num_bytes, seconds, scale=seconds)
  largest = np.argmax(num_bytes)
  # A growth below the rounding of the times is none.
  if slope * num_bytes[largest] <= 1e-6 * seconds[largest]:
    bandwidth = float(num_bytes[largest] / seconds[largest])
    warnings.warn(
      f"All-reduces of {num_bytes.tolist()} bytes took {seconds.tolist()}"
      " seconds, which does not grow with size. Falling back to latency 0 and"
      f" the bandwidth of the largest, {bandwidth:.4g} bytes a second. Measure"
      " on an idle machine, with more `repeats` or larger `sizes`.",
      RuntimeWarning,
      stacklevel=2,
    )
    return LinkModel(0.0, bandwidth, r_squared=0.0)
  error = lambda fit: np.sum((fit / seconds - 1) ** 2)  # noqa: E731
  constant = np.average(seconds, weights=seconds**-2)
  r_squared = 1 - error(latency + slope * num_bytes) / error(constant)
  return LinkModel(latency, 1 / slope, r_squared=float(r_squared))


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
  """Times the computation of compressed exchanges, on one device.

  `edgc.update` at one rank less `allreduce().update`, on a mesh of one device,
  where both compute all and send nothing; base + per_rank * rank is fitted by
  least squares, both at least 0. At large ranks orthonormalisation grows
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
  _require_several("ranks", ranks, least=1)
  guards.require_int("repeats", repeats, 1)
  reducers = [
    adaptive_rank.edgc(
      _AXIS, rank_max=rank, rank_min=rank, rank_multiple=rank,
      min_ratio=min_ratio, matrix_view=matrix_view, granularity=granularity,
    )
    for rank in ranks
  ]  # fmt: skip
  extra = _beyond_dense(reducers, params, repeats, mesh)
  base, per_rank = _fit_line(np.array(ranks, float), extra)
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
  """Times what a dense exchange costs more where values travel coded.

  `allreduce(wire_dtype=...).update` less `allreduce().update`, on one device.

  Args:
    params: As for `measure_compression`.
    wire_dtype: As for `allreduce`.
    repeats: How often it is timed.
    mesh: As for `measure_compression`.

  Returns:
    Seconds, at least 0.
  """
  guards.require_int("repeats", repeats, 1)
  coded = fixed_rank.allreduce(_AXIS, wire_dtype=wire_dtype)
  return max(0.0, float(_beyond_dense([coded], params, repeats, mesh)[0]))


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
  guards.require_int("repeats", repeats, 1)

  @jax.jit
  def backward(params: Any, inputs: Any) -> Any:
    outputs, pull_back = jax.vjp(stage_fn, params, inputs)
    return pull_back(jax.tree.map(jnp.ones_like, outputs))

  seconds = medians([lambda: backward(params, inputs)], repeats)
  return float((seconds if mesh is None else agree(mesh, seconds))[0])


def _beyond_dense(
  reducers: Sequence[Any], params: Any, repeats: int, mesh: Mesh | None
) -> np.ndarray:
  """Seconds of an update on one device less those of a dense one; [k]."""
  single = Mesh(np.array(jax.local_devices()[:1]), (_AXIS,))
  random = np.random.default_rng(0)

  def draw(leaf: Any) -> jax.Array:
    values = random.standard_normal(jnp.shape(leaf), np.float32)
    return jnp.asarray(values, jnp.result_type(leaf))

  gradients = jax.tree.map(draw, params)
  calls = [
    _update(single, tx, gradients)
    for tx in (fixed_rank.allreduce(_AXIS), *reducers)
  ]
  seconds = medians(calls, repeats)
  dense, *others = seconds if mesh is None else agree(mesh, seconds)
  return np.array(others) - dense


def _all_reduces(mesh: Mesh, axis_name: str, count: int) -> Callable[[], Any]:
  """All-reduces of `count` values that each need the one before."""
  spec = P(axis_name)
  shape = (mesh.shape[axis_name] * count,)
  # Made by a program, since no process can place another one's part.
  placed = NamedSharding(mesh, spec)
  values = jax.jit(lambda: jnp.ones(shape, jnp.float32), out_shardings=placed)()

  def chain(local: jax.Array) -> jax.Array:
    # `local` keeps replicas different: the sum of equal ones is a product.
    step = lambda _, x: collectives.mean(x, axis_name) + local  # noqa: E731
    return jax.lax.fori_loop(0, _CHAINED, step, local)

  run = jax.jit(jax.shard_map(chain, mesh=mesh, in_specs=spec, out_specs=spec))
  return functools.partial(run, values)


def _update(mesh: Mesh, tx: Any, gradients: Any) -> Callable[[], Any]:
  """A call of a transformation's second update, in which nothing is sampled.

  One replica cannot vary.
  """
  on_device = functools.partial(
    jax.shard_map, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False
  )
  state = jax.jit(on_device(tx.init))(gradients)
  run = jax.jit(on_device(tx.update))
  _, state = run(gradients, state)
  return functools.partial(run, gradients, state)


def _fit_line(
  x: np.ndarray, y: np.ndarray, scale: np.ndarray | float = 1.0
) -> tuple[float, float]:
  """Intercept (at least 0) and slope; residuals in units of `scale`."""
  ones, x, y = np.ones_like(x) / scale, x / scale, y / scale
  (intercept, slope), *_ = np.linalg.lstsq(np.stack([ones, x], axis=1), y)
  if intercept < 0:
    intercept, slope = 0.0, (x @ y) / (x @ x)
  return float(intercept), float(slope)


def _require_several(name: str, values: Sequence[int], least: int) -> None:
  for value in values:
    guards.require_int(name, value, least)
  several = len({value // least for value in values}) > 1
  remedy = "add one, since a line through one point can have any slope"
  guards.require(several, name, values, "at least two that differ", remedy)
