"""Measures what computing takes, on the devices that will be used."""

import functools
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from edgc_jax import validation
from edgc_jax.adaptation.allocation import Allocation
from edgc_jax.adaptation.rank_rule import RankRule
from edgc_jax.comm import collectives, cpu_backend
from edgc_jax.comm.codes import code_of
from edgc_jax.plan.leaves import ViewFn
from edgc_jax.plan.link_model import CompressionModel, LinkModel, fit_line
from edgc_jax.reducers import edgc, powersgd

_AXIS = "data"
_CHAINED = 8  # all-reduces in a call, so that the call itself weighs little
_LEAST_REPEATS = 2
_EXTRA_RUNS = 4  # that are not timed, or not for good
_RUNS = _LEAST_REPEATS + _EXTRA_RUNS


def measure_compression(
  params: Any,
  ranks: Sequence[int] = (8, 32),
  *,
  repeats: int = 10,
  min_ratio: float = 2.0,
  matrix_view: ViewFn | None = None,
  allocation: Allocation = Allocation(),
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
    allocation: As for `edgc`; ranks by matrix are computed at more columns.
    mesh: With several processes the mesh of the training: all call this at
      the same point, and get the same model (see `agree`).

  Returns:
    The model.
  """
  validation.require_several("ranks", ranks, 1)
  validation.require_int("repeats", repeats, 1)
  reducers = [
    edgc.edgc(
      _AXIS, rank_max=rank, rank_min=rank, rule=RankRule(rank_multiple=rank),
      min_ratio=min_ratio, matrix_view=matrix_view, allocation=allocation,
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


def measure_link(
  mesh: Mesh,
  axis_name: str = "data",
  sizes: Sequence[int] = (2**16, 2**18, 2**20, 2**22, 2**23),
  repeats: int = 10,
  budget: float = 60.0,
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
    budget: Seconds that this should take, without compiling. On a link too
      slow for it the largest sizes are left out, but for two, and there are
      fewer repeats, but for two.

  Returns:
    The model; `r_squared` is the share of the weighted variance explained.

  Raises:
    ValueError: if there is no such axis, or nothing to measure.

  Warns:
    RuntimeWarning: if times do not grow with size. Latency is then 0 and
      bandwidth that of the largest size.
  """
  validation.require(
    mesh.shape.get(axis_name, 1) > 1,
    "axis_name",
    axis_name,
    f"an axis of the mesh {dict(mesh.shape)} with several devices",
    "name the one gradients are averaged over; a single replica has no link",
  )
  validation.require_several("sizes", sizes, 4)
  validation.require_int("repeats", repeats, 1)
  validation.require_finite("budget", budget, "60 is a minute")
  cpu_backend.require_threads()

  counts = sorted(size // 4 for size in sizes)
  calls, repeats = _affordable(
    mesh,
    (_all_reduces(mesh, axis_name, count) for count in counts),
    counts,
    repeats,
    budget,
  )
  counts = counts[: len(calls)]
  seconds = agree(mesh, medians(calls, repeats) / _CHAINED)
  num_bytes = 4.0 * np.array(counts)
  latency, slope = fit_line(num_bytes, seconds, scale=seconds)
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


def _affordable(
  mesh: Mesh,
  calls: Iterator[Callable[[], Any]],
  counts: Sequence[int],
  repeats: int,
  budget: float,
) -> tuple[list[Callable[[], Any]], int]:
  """The calls that can be timed in so many seconds, and how often.

  Args:
    mesh: Whose processes decide the same.
    calls: From the smallest on; made only where they are affordable.
    counts: Of values in each.
    repeats: At most so many.
    budget: Seconds for all of them.
  """
  affordable, seconds = [], []
  for call, larger in zip(calls, [*counts[1:], None], strict=True):
    jax.block_until_ready(call())  # compiles
    start = time.perf_counter()
    jax.block_until_ready(call())
    elapsed = np.array([time.perf_counter() - start])
    seconds.append(float(agree(mesh, elapsed)[0]))
    affordable.append(call)
    if larger and len(affordable) > 1:
      next_one = seconds[-1] * larger / counts[len(affordable) - 1]
      if _RUNS * (sum(seconds) + next_one) > budget:
        break
  rounds = int(budget / sum(seconds)) - _EXTRA_RUNS
  return affordable, min(repeats, max(_LEAST_REPEATS, rounds))


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


def medians(calls: Sequence[Callable[[], Any]], repeats: int) -> np.ndarray:
  """Median seconds of each call, float64 [len(calls)], made in turn."""
  for call in 2 * list(calls):  # compiles, and warms up
    jax.block_until_ready(call())
  seconds = np.empty((repeats, len(calls)))
  for row in seconds:
    for i, call in enumerate(calls):
      start = time.perf_counter()
      jax.block_until_ready(call())
      row[i] = time.perf_counter() - start
  return np.median(seconds, axis=0)


def agree(mesh: Mesh, measured: np.ndarray) -> np.ndarray:
  """The mean over all devices of what their processes measured.

  Times are compiled in; processes that compile different ones would hang.

  Args:
    mesh: Devices of all the processes, which call this at the same point.
    measured: [k], this process's numbers.

  Returns:
    float64 [k] of float32 precision, equal on all processes.
  """
  axes = tuple(mesh.axis_names)
  rows = np.tile(np.asarray(measured, np.float32), (mesh.devices.size, 1))
  spec = P(axes)
  own = jax.make_array_from_callback(
    rows.shape, NamedSharding(mesh, spec), lambda index: rows[index]
  )
  mean = lambda rows: collectives.mean(rows[0], axes)  # noqa: E731
  run = jax.jit(jax.shard_map(mean, mesh=mesh, in_specs=spec, out_specs=P()))
  return np.asarray(run(own), np.float64)
