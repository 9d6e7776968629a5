"""Measures the time of all-reduces over the links that will be used."""

import functools
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from edgc_jax import validation
from edgc_jax.comm import collectives, cpu_backend
from edgc_jax.plan.link_model import LinkModel, fit_line
from edgc_jax.stopwatch import agree, medians

_CHAINED = 8  # all-reduces in a call, so that the call itself weighs little
_LEAST_REPEATS = 2
_EXTRA_RUNS = 4  # that are not timed, or not for good
_RUNS = _LEAST_REPEATS + _EXTRA_RUNS


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
