"""Chooses the reducer to train with, from measurements on the mesh."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh
from ml_collections import ConfigDict

import edgc_jax
from edgc_jax.measure import timing
from edgc_jax.measure.advice import RANKS, Advice
from edgc_jax.wire.link_model import ring_bytes
from experiments.parallel import backends
from experiments.parallel.meshes import DATA, SHARD
from experiments.runtime import heap, hosts
from experiments.tasks.base import Task
from experiments.training import optimizer, times
from experiments.training.optimizer import AUTO

_STEPS = 5  # timed steps, of which the median is taken


def resolve(
  config: ConfigDict,
  task: Task,
  mesh: Mesh,
  choice: Mapping[str, Any] | None,
) -> tuple[ConfigDict, Mapping[str, Any]]:
  """Replaces the reducer "auto" of a configuration by a measured choice.

  Args:
    config: Any configuration; returned unchanged unless its reducer is "auto".
    task: Its task.
    mesh: All its processes call this at the same point.
    choice: The choice of a resumed run; empty or None for a new run.

  Returns:
    The configuration, and the choice to keep for resuming.
  """
  if config.reducer != AUTO:
    return config, {}
  if not choice:
    require_choice(config)
    advice = measure(config, task, mesh)
    hosts.say(table(advice, mesh))
    chosen = advice.choice
    choice = {"reducer": chosen.reducer, "options": dict(chosen.options)}
  config = config.copy_and_resolve_references()
  config.reducer = choice["reducer"]
  config[config.reducer].update(choice["options"])
  if config.reducer == "edgc":
    config.edgc.rank_min = 0  # derived from rank_max
  return config, choice


def require_choice(config: ConfigDict) -> None:
  """Raises if there is nothing to choose, or no method to measure it."""
  mesh = config.mesh
  if mesh.data == 1 or mesh.stage > 1:
    raise ValueError(
      "`mesh` must be several replicas without stages to choose a reducer, got"
      f" data={mesh.data} and stage={mesh.stage}; change it, or name a reducer"
      " with --config=FILE:REDUCER. On stages edgc.rank_max=0 finds the largest"
      " rank."
    )


class Costs(NamedTuple):
  """Times of computation, which do not depend on the link; in seconds."""

  step: float  # a step without any exchange
  dense: float  # computation of a dense exchange
  compression: edgc_jax.CompressionModel  # in addition to dense
  coding: float  # rounding to bfloat16 and back, in addition to dense


def measure(config: ConfigDict, task: Task, mesh: Mesh) -> Advice:
  """Measures the link, a step and the cost of exchanges, and advises.

  Args:
    config: The whole configuration, with any reducer. The link is measured
      unless it is given here.
    task: Its task.
    mesh: A mesh without stages; all its processes call this at the same point.

  Returns:
    The advice.
  """
  link = times.link_of(config, mesh)
  uplink = _uplink(link.bandwidth, mesh)
  latency = 1e3 * link.latency
  hosts.say(f"link: {uplink:.4g} Mbit/s uplinks, latency {latency:.3g} ms")
  hosts.say("compiling and timing exchanges and a step ...")
  return advise(config, task, mesh, link, measure_costs(config, task, mesh))


def measure_costs(
  config: ConfigDict,
  task: Task,
  mesh: Mesh,
  step: Callable[[], Any] | None = None,
) -> Costs:
  """Measures all costs except the link.

  Args:
    config: As for `measure`.
    task: As for `measure`.
    mesh: As for `measure`.
    step: Runs a compiled step without an exchange; compiled here if None.

  Returns:
    The costs.
  """
  shapes = task.layout(mesh.shape).of_one_device(mesh.shape)
  compression = times.compression_of(config, task, mesh)
  dense, coding = (
    edgc_jax.measure_coding(shapes, wire_dtype, mesh=mesh)
    for wire_dtype in ("float32", "bfloat16")
  )
  step = step or _plain_step(config, task, mesh)
  with heap.freed_memory_kept():  # as when training
    return Costs(seconds_of(step, mesh), dense, compression, coding)


def advise(
  config: ConfigDict,
  task: Task,
  mesh: Mesh,
  link: edgc_jax.LinkModel,
  costs: Costs,
  ranks: Sequence[int] = RANKS,
) -> Advice:
  """Returns the advice for a link, among dense and these ranks of edgc."""
  return edgc_jax.advise(
    task.layout(mesh.shape).of_one_device(mesh.shape),
    link,
    costs.step + costs.dense,
    mesh.shape[DATA],
    compression=costs.compression,
    coding_seconds=costs.coding,
    # The ladder of edgc has only such multiples.
    ranks=[r for r in ranks if r % config.edgc.rank_multiple == 0],
    wire_dtype=config.edgc.wire_dtype,
    min_ratio=config.edgc.min_ratio,
  )


def table(advice: Advice, mesh: Mesh) -> str:
  """Formats the predicted steps of all methods, and the choice.

  Bytes and speeds are those of a replica: of all its shards together.
  """
  lines = [f"{'':14}{'payload, MB':>13}{'s a step':>10}   dense faster above"]
  shards = mesh.shape.get(SHARD, 1)
  for method in advice.methods:
    uplink = _uplink(method.break_even, mesh)
    bound = f"{uplink:.4g} Mbit/s" if np.isfinite(uplink) else "no speed"
    if method.name == "dense":
      bound = ""
    elif not method.break_even:
      bound = "any speed"
    lines.append(
      f"{method.name:14}{shards * method.wire_bytes / 1e6:13.2f}"
      f"{method.seconds:10.3f}   {bound}"
    )
  return "\n".join([*lines, f"choice: {advice.choice.name}"])


def _uplink(bandwidth: float, mesh: Mesh) -> float:
  """Converts a device's payload bytes per second to Mbit/s of its replica."""
  shards = mesh.shape.get(SHARD, 1)
  return 8e-6 * shards * ring_bytes(bandwidth, mesh.shape[DATA])


def _plain_step(
  config: ConfigDict, task: Task, mesh: Mesh
) -> Callable[[], Any]:
  """Compiles a training step that averages nothing."""
  plain = config.copy_and_resolve_references()
  plain.reducer = "allreduce"
  tx = optimizer.make_optimizer(
    plain, task, {}, optimizer.without_exchange(plain, task, mesh), mesh
  )
  backend = backends.make(plain, task, tx, mesh)
  state = backend.init(jax.random.key(0))
  backend.compile_step(*state, config.batch_size)
  hosts.wait_for_all("compiled without exchange")
  rows = backend.blank(config.batch_size)

  def step() -> Any:
    nonlocal state
    *state, numbers = backend.step(*state, rows, 1)
    return numbers

  return step


def seconds_of(step: Callable[[], Any], mesh: Mesh) -> float:
  """Returns the median seconds of a step, averaged over all processes."""
  seconds = timing.medians([step], _STEPS)
  return float(timing.agree(mesh, seconds)[0])
