"""Times that the ranks depend on: from the configuration, or measured."""

import dataclasses
from typing import Any

from jax.sharding import Mesh
from ml_collections import ConfigDict

import edgc_jax
from experiments.trainer.parallel.meshes import DATA
from experiments.trainer.runtime import hosts
from experiments.trainer.tasks.base import Task
from experiments.trainer.training import optimizer


def needed(config: ConfigDict) -> bool:
  """Returns whether the ranks of this configuration depend on times."""
  is_aligned = config.mesh.stage > 1 and config.pipeline.align == "slack"
  return config.reducer == "edgc" and (
    is_aligned or config.edgc.rank_max is None
  )


def options_of(config: ConfigDict, task: Task, mesh: Mesh) -> dict[str, Any]:
  """Returns the arguments of `edgc_jax.edgc` that are times.

  Args:
    config: The whole configuration; times that are zero there are measured.
    task: Its task.
    mesh: The devices; all their processes call this at the same point.

  Returns:
    `link`, `compression` and, with stages, `backward_seconds`; empty if no
    rank depends on them.
  """
  if not needed(config):
    return {}
  given = config.link
  times = {"link": link_of(config, mesh)}
  if given.bandwidth:
    times["compression"] = edgc_jax.CompressionModel(
      given.compression_base, given.compression_per_rank
    )
  else:
    times["compression"] = edgc_jax.measure_compression(
      task.layout(mesh.shape).of_one_device(mesh.shape),
      min_ratio=config.edgc.min_ratio,
      allocation=optimizer.allocation_of(config.edgc),
      mesh=mesh,
    )
  if config.mesh.stage > 1:
    seconds = config.pipeline.backward_seconds
    times["backward_seconds"] = seconds or _backward(config, task, mesh)
  return times


def link_of(config: ConfigDict, mesh: Mesh) -> edgc_jax.LinkModel:
  """Returns the link between replicas: the given one, or else measured."""
  given = config.link
  if given.bandwidth:
    return edgc_jax.LinkModel(given.latency, given.bandwidth)
  hosts.say("measuring the link ...")
  return edgc_jax.measure_link(mesh, DATA)


def of_numbers(numbers: dict[str, Any]) -> dict[str, Any]:
  """Restores times from the result of `as_numbers`."""
  kinds = {
    "link": edgc_jax.LinkModel,
    "compression": edgc_jax.CompressionModel,
  }
  return {
    name: kinds[name](**value) if name in kinds else value
    for name, value in numbers.items()
  }


def as_numbers(times: dict[str, Any]) -> dict[str, Any]:
  """Converts times to plain numbers, for JSON."""
  return {
    name: dataclasses.asdict(value)
    if dataclasses.is_dataclass(value)
    else value
    for name, value in times.items()
  }


def describe(times: dict[str, Any]) -> str:
  """Formats times as one line for a terminal."""
  link, compression = times["link"], times["compression"]
  quality = f", R^2 {link.r_squared:.3f}" if link.r_squared is not None else ""
  parts = [
    f"link {link.bandwidth / 1e6:.4g} MB/s, {link.latency * 1e3:.3g} ms per"
    f" all-reduce{quality}",
    f"compression {compression.base * 1e3:.3g} ms +"
    f" {compression.per_rank * 1e3:.3g} ms per rank",
  ]
  if "backward_seconds" in times:
    parts.append(f"backward {times['backward_seconds'] * 1e3:.3g} ms")
  return "; ".join(parts)


def _backward(config: ConfigDict, task: Task, mesh: Mesh) -> float:
  """Measures the seconds of one microbatch's backward pass on one device."""
  parts = config.mesh.data * config.pipeline.microbatches
  stage_fn, params, inputs = task.stage_of(
    mesh.shape, config.batch_size // parts
  )
  return edgc_jax.measure_backward(stage_fn, params, inputs, mesh=mesh)
