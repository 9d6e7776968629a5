"""Measures computation and communication on the devices of the training.

  measure_compression   computation of a compressed exchange, beyond a dense one
  measure_backward      backward pass of one microbatch through a stage
  measure_link          all-reduces of several sizes over one mesh axis

All of them take medians of repeated calls. The times are compiled into the
training program (as ranks, for example), and processes with different programs
would hang. So with several processes all call these functions at the same
point, and continue with the mean of their times (`agree`).
"""

import functools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from edgc_jax import validation
from edgc_jax.budget.allocation import BY_ERROR, ErrorAllocation
from edgc_jax.leaves.leaf import arrays_of, require_arrays
from edgc_jax.leaves.views import ViewFn
from edgc_jax.mesh.sharding import num_replicas, require_axes, require_is_mesh
from edgc_jax.methods import allreduce, powersgd
from edgc_jax.wire import collectives, cpu_backend
from edgc_jax.wire.link_model import CompressionModel, LinkModel, fit_line
from edgc_jax.wire.order import AxisName

_AXIS = "data"
# All-reduces per call, to make the overhead of a call small; one is enough if
# it takes longer than these seconds.
_CHAINED, _LONG = 8, 0.1
_LEAST_REPEATS = 2
# Calls of each size in addition to its repeats: two in `_affordable`, and two
# to warm up in `medians`.
_EXTRA_RUNS = 4
_RUNS = _LEAST_REPEATS + _EXTRA_RUNS


def measure_compression(
  params: Any,
  ranks: Sequence[int] = (8, 32),
  *,
  repeats: int = 10,
  min_ratio: float = 2.0,
  matrix_view: ViewFn | None = None,
  allocation: str | ErrorAllocation = BY_ERROR,
  mesh: Mesh | None = None,
) -> CompressionModel:
  """Times the computation of compressed exchanges, and fits a line.

    powersgd(rank, wire_dtype="float32").update - allreduce().update
      = base + per_rank * rank

  Each device is alone on its axis, so updates compute everything and send
  nothing. All devices of this process run at once, since they may share cores
  and memory. The line is fitted by least squares, both terms at least 0. At
  large ranks the time of orthonormalisation grows faster than a line, so
  measure ranks that span the ranks to be used. The time to encode values for
  the wire is not included.

  Args:
    params: Parameters or their `jax.ShapeDtypeStruct`s. Only shapes and dtypes
      are read; gradients are Gaussian, drawn from a fixed seed.
    ranks: At least two different ranks.
    repeats: Number of timed calls per rank.
    min_ratio: As for `edgc`.
    matrix_view: As for `edgc`.
    allocation: As for `powersgd`; ranks by matrix compute more columns.
    mesh: With several processes, the mesh of the training. All of them must
      call this at the same point, and get the same model (`agree`).

  Returns:
    The model.

  Raises:
    TypeError: if a rank or `repeats` is not an integer, or `mesh` no mesh.
    ValueError: if fewer than two ranks differ, or `repeats` is below 1.
  """
  validation.require_several("ranks", ranks, 1)
  require_arrays(params)
  validation.require_int("repeats", repeats, 1)
  require_is_mesh(mesh, optional=True, kinds=Mesh)
  reducers = [
    powersgd(
      rank, _AXIS, min_ratio=min_ratio, matrix_view=matrix_view,
      allocation=allocation, wire_dtype="float32",
    )
    for rank in ranks
  ]  # fmt: skip
  dense = allreduce(_AXIS)
  extra = extra_seconds(dense, reducers, arrays_of(params), repeats, mesh)
  base, per_rank = fit_line(np.array(ranks, float), extra)
  if per_rank < 0:
    base, per_rank = max(float(np.mean(extra)), 0.0), 0.0
  return CompressionModel(base, per_rank)


def measure_backward(
  stage_fn: Callable[[Any, Any], Any],
  params: Any,
  inputs: Any,
  *,
  repeats: int = 10,
  mesh: Mesh | None = None,
) -> float:
  """Times one microbatch's backward pass through a stage.

  Rematerialisation is included: the forward pass is computed again, then the
  gradients of parameters and inputs, from a cotangent of ones.

  Args:
    stage_fn: Maps parameters and inputs to outputs, without collectives.
    params: The stage's parameters.
    inputs: One microbatch, as the stage receives it.
    repeats: Number of timed calls.
    mesh: As for `measure_compression`.

  Returns:
    Median seconds.

  Raises:
    TypeError: if `repeats` is not an integer, or `mesh` no mesh.
    ValueError: if `repeats` is below 1.
  """
  validation.require_int("repeats", repeats, 1)
  require_is_mesh(mesh, optional=True, kinds=Mesh)
  validation.require_function(
    "stage_fn", stage_fn, "parameters and inputs", optional=False
  )

  @jax.jit
  def backward(params: Any, inputs: Any) -> Any:
    outputs, pull_back = jax.vjp(stage_fn, params, inputs)
    return pull_back(jax.tree.map(jnp.ones_like, outputs))

  seconds = medians([lambda: backward(params, inputs)], repeats)
  return float((seconds if mesh is None else agree(mesh, seconds))[0])


def extra_seconds(
  least: optax.GradientTransformation,
  others: Sequence[optax.GradientTransformation],
  params: Any,
  repeats: int,
  mesh: Mesh | None,
) -> np.ndarray:
  """Times updates of transformations on single devices, less the first's.

  Args:
    least: The transformation whose time is subtracted.
    others: The k transformations to time.
    params: As for `measure_compression`.
    repeats: Number of timed calls.
    mesh: As for `measure_compression`.

  Returns:
    Seconds, float64 [k]; may be negative.
  """
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
  """Returns a call of a transformation's second update."""
  # An axis of one device has nothing to vary over, hence check_vma=False.
  on_device = functools.partial(
    jax.shard_map, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False
  )
  state = jax.jit(on_device(tx.init))(gradients)
  run = jax.jit(on_device(tx.update))
  _, state = run(gradients, state)
  return functools.partial(run, gradients, state)


def measure_link(
  mesh: Mesh,
  axis_name: AxisName = "data",
  sizes: Sequence[int] = (2**16, 2**18, 2**20, 2**22, 2**23),
  repeats: int = 10,
  budget: float = 60.0,
) -> LinkModel:
  """Times all-reduces of several sizes over one mesh axis, and fits a line.

    seconds = latency + bytes / bandwidth

  The latency is that of the line with the least squared relative errors, or 0
  if that is negative: in seconds, the noise of the largest size would decide
  it. The bandwidth then has the least squared errors in seconds. Over a long
  link no line fits all sizes, since Gloo hides some latency in those between:
  this one favours the ends. With several processes, all must call this at the
  same point, and get the same model.

  Args:
    mesh: The mesh of the training. All groups along the axis are timed at once,
      as in the training, since they may share links.
    axis_name: The axis that gradients are averaged over, or a tuple of axes.
    sizes: Bytes of float32 payload, at least two sizes.
    repeats: Number of timed calls per size.
    budget: Seconds that the measurement may take, without compilation. If the
      link is too slow for it, the largest sizes are left out, down to two
      sizes, and there are fewer repeats, down to two. Over a link of long
      latency even small sizes take their time, and large ones little more.

  Returns:
    The model; `r_squared` is the share of the weighted variance explained,
    below 0 if one time for all sizes would fit better.

  Raises:
    TypeError: if a size or `repeats` is not an integer, or `budget` no number.
    ValueError: if the mesh has no such axis of several devices, fewer than two
      sizes differ, or `repeats` or `budget` is out of range.
    RuntimeError: if CPU devices share too small a thread pool.

  Warns:
    RuntimeWarning: if the times do not grow with size. The latency is then 0,
      and the bandwidth is measured at the largest size.
  """
  require_is_mesh(mesh, kinds=Mesh)
  require_axes(mesh, "axis_name", axis_name)
  validation.require(
    num_replicas(mesh, axis_name) > 1,
    "axis_name",
    axis_name,
    f"an axis of the mesh {dict(mesh.shape)} with several devices",
    "name the axis of the replicas; a single replica has no link",
  )
  validation.require_several("sizes", sizes, 4)
  validation.require_int("repeats", repeats, 1)
  validation.require_finite("budget", budget, "60 is a minute")
  cpu_backend.require_threads()

  counts = sorted({size // 4 for size in sizes})
  alone = _seconds(mesh, _all_reduces(mesh, axis_name, counts[0], 1))
  chained = _CHAINED if alone < _LONG else 1
  calls, repeats = _affordable(
    mesh,
    (_all_reduces(mesh, axis_name, count, chained) for count in counts),
    counts,
    repeats,
    budget,
  )
  counts = counts[: len(calls)]
  seconds = agree(mesh, medians(calls, repeats) / chained)
  num_bytes = 4.0 * np.array(counts)
  latency, _ = fit_line(num_bytes, seconds, scale=seconds)
  slope = num_bytes @ (seconds - latency) / (num_bytes @ num_bytes)
  largest = np.argmax(num_bytes)
  # Growth below the rounding errors of the times does not count.
  if slope * num_bytes[largest] <= 1e-6 * seconds[largest]:
    bandwidth = float(num_bytes[largest] / seconds[largest])
    validation.warn(
      f"All-reduces of {num_bytes.tolist()} bytes took {seconds.tolist()}"
      " seconds, which does not grow with size. Falling back to latency 0 and"
      f" the bandwidth of the largest, {bandwidth:.4g} bytes a second. Measure"
      " on an idle machine, with more `repeats` or larger `sizes`."
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
  """Chooses the calls, and the repeats, that fit into a budget.

  Args:
    mesh: The mesh whose processes must decide the same.
    calls: The calls, smallest first; larger ones are built only if affordable.
    counts: Number of values in each call.
    repeats: Most repeats.
    budget: Seconds for all calls together.

  Returns:
    The first two calls or more, and the number of repeats.
  """
  affordable, seconds = [], []
  for call, larger in zip(calls, [*counts[1:], None], strict=True):
    seconds.append(_seconds(mesh, call))
    affordable.append(call)
    if larger and len(affordable) > 1:
      # On the line through the last two: a latency is paid once a size.
      before, last = counts[len(affordable) - 2 : len(affordable)]
      growth = max(0.0, seconds[-1] - seconds[-2]) / max(1, last - before)
      next_one = seconds[-1] + growth * (larger - last)
      if _RUNS * (sum(seconds) + next_one) > budget:
        break
  rounds = int(budget / sum(seconds)) - _EXTRA_RUNS
  return affordable, min(repeats, max(_LEAST_REPEATS, rounds))


def _seconds(mesh: Mesh, call: Callable[[], Any]) -> float:
  """Times the second run of a call; all processes agree on it."""
  jax.block_until_ready(call())  # compiles
  start = time.perf_counter()
  jax.block_until_ready(call())
  elapsed = np.array([time.perf_counter() - start])
  return float(agree(mesh, elapsed)[0])


def _all_reduces(
  mesh: Mesh, axis_name: AxisName, count: int, chained: int
) -> Callable[[], Any]:
  """Returns a call of `chained` all-reduces of `count` values, in sequence."""
  spec = P(axis_name)
  shape = (num_replicas(mesh, axis_name) * count,)
  # A program creates the values, since no process can place another's part.
  placed = NamedSharding(mesh, spec)
  values = jax.jit(lambda: jnp.ones(shape, jnp.float32), out_shardings=placed)()

  def chain(local: jax.Array) -> jax.Array:
    # x <- mean(x) + local. Without `local`, replicas would be equal, and their
    # sum a product without an all-reduce.
    step = lambda _, x: collectives.mean(x, axis_name) + local  # noqa: E731
    return jax.lax.fori_loop(0, chained, step, local)

  run = jax.jit(jax.shard_map(chain, mesh=mesh, in_specs=spec, out_specs=spec))
  return functools.partial(run, values)


def medians(calls: Sequence[Callable[[], Any]], repeats: int) -> np.ndarray:
  """Returns median seconds of calls that take turns, float64 [len(calls)]."""
  for call in 2 * list(calls):  # compile, and warm up
    jax.block_until_ready(call())
  seconds = np.empty((repeats, len(calls)))
  for row in seconds:
    for i, call in enumerate(calls):
      start = time.perf_counter()
      jax.block_until_ready(call())
      row[i] = time.perf_counter() - start
  return np.median(seconds, axis=0)


def agree(mesh: Mesh, measured: np.ndarray) -> np.ndarray:
  """Averages measurements over the devices of all processes.

  Args:
    mesh: A mesh with the devices of all processes, which must call this at the
      same point.
    measured: This process's measurements, [k].

  Returns:
    float64 [k], of float32 precision, equal on all processes.
  """
  rows = np.tile(np.asarray(measured, np.float32), (mesh.devices.size, 1))
  spec = P(tuple(mesh.axis_names))
  own = jax.make_array_from_callback(
    rows.shape, NamedSharding(mesh, spec), lambda index: rows[index]
  )
  return np.asarray(_mean_over(mesh)(own), np.float64)


@functools.cache  # or each call would compile
def _mean_over(mesh: Mesh) -> Callable[[jax.Array], jax.Array]:
  """Returns a function of rows, one of each device, to their mean."""
  axes = tuple(mesh.axis_names)
  mean = lambda rows: collectives.mean(rows[0], axes)  # noqa: E731
  return jax.jit(
    jax.shard_map(mean, mesh=mesh, in_specs=P(axes), out_specs=P())
  )
