"""Chooses the reducer to train with, from measurements on the mesh."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh
from ml_collections import ConfigDict

import edgc_jax
from edgc_jax.measure import timing
from edgc_jax.measure.advice import Advice
from edgc_jax.measure.evidence import of_protocol
from experiments.trainer.parallel import backends
from experiments.trainer.parallel.meshes import DATA, SHARD
from experiments.trainer.runtime import heap, hosts
from experiments.trainer.tasks.base import Task
from experiments.trainer.training import optimizer, times
from experiments.trainer.training.optimizer import AUTO

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
    advice = measure(config, task, mesh, most_steps=1)
    hosts.say(str(advice))
    chosen = advice.choice
    choice = {"reducer": chosen.reducer, "options": dict(chosen.options)}
  config = config.copy_and_resolve_references()
  config.update_from_flattened_dict(
    settings_of(choice["reducer"], choice["options"])
  )
  return config, choice


def settings_of(reducer: str, options: Mapping[str, Any]) -> Mapping[str, Any]:
  """Returns the keys of a configuration that make it a candidate's."""
  settings = {f"{reducer}.{name}": value for name, value in options.items()}
  if reducer == "powersgd":
    settings["powersgd.warmup_steps"] = 0  # the protocol's runs have none
  return {"reducer": reducer, **settings}


def require_choice(config: ConfigDict) -> None:
  """Raises if there is nothing to choose, or no method to measure it."""
  judged, name = tuple(of_protocol()), config.optimizer.name
  if name not in judged:
    raise ValueError(
      "`optimizer.name` must be one with which methods were judged"
      f" ({', '.join(judged)}) to choose a reducer, got {name!r}; set another"
      " one, or train with --config=FILE:REDUCER."
    )
  mesh = config.mesh
  if mesh.data == 1 or mesh.stage > 1 or mesh.backend == "vmap":
    raise ValueError(
      "`mesh` must be several replicas on devices of their own, without stages,"
      f" to choose a reducer, got data={mesh.data}, stage={mesh.stage} and"
      f" backend={mesh.backend!r}; change it, or train with"
      " --config=FILE:REDUCER. On stages edgc.rank_max = None in that file"
      " finds the largest rank."
    )


class Costs(NamedTuple):
  """Times of computation, which do not depend on the link; in seconds."""

  step: float  # a step without any exchange
  # Of an exchange, by candidate; None for none.
  computing: Mapping[str, float] | None


def measure(
  config: ConfigDict, task: Task, mesh: Mesh, most_steps: int | None = None
) -> Advice:
  """Measures the link, a step and the cost of exchanges, and advises.

  Args:
    config: The whole configuration, with any reducer. The link is measured
      unless it is given here.
    task: Its task.
    mesh: A mesh without stages; all its processes call this at the same point.
    most_steps: As for `edgc_jax.advise`.

  Returns:
    The advice.
  """
  link = times.link_of(config, mesh)
  hosts.say("compiling and timing exchanges and a step ...")
  costs = measure_costs(config, task, mesh, most_steps)
  return advise(config, task, mesh, link, costs, most_steps)


def measure_costs(
  config: ConfigDict,
  task: Task,
  mesh: Mesh,
  most_steps: int | None,
  step: Callable[[], Any] | None = None,
) -> Costs:
  """Measures all costs except the link.

  Args:
    config: As for `measure`.
    task: As for `measure`.
    mesh: As for `measure`.
    most_steps: As for `edgc_jax.advise`.
    step: Runs a compiled step without an exchange; compiled here if None.

  Returns:
    The costs.
  """
  shapes = task.layout(mesh.shape).of_one_device(mesh.shape)
  computing = edgc_jax.measure_computing(
    shapes,
    mesh.shape[DATA],
    most_steps=most_steps,
    optimizer=config.optimizer.name,
    mesh=mesh,
  )
  step = step or _plain_step(config, task, mesh)
  with heap.freed_memory_kept():  # as when training
    return Costs(seconds_of(step, mesh), computing)


def advise(
  config: ConfigDict,
  task: Task,
  mesh: Mesh,
  link: edgc_jax.LinkModel,
  costs: Costs,
  most_steps: int | None = None,
) -> Advice:
  """Returns the advice for a link; `most_steps` as for `edgc_jax.advise`."""
  return edgc_jax.advise(
    task.layout(mesh.shape).of_one_device(mesh.shape),
    link,
    costs.step,
    mesh.shape[DATA],
    computing=costs.computing,
    most_steps=most_steps,
    optimizer=config.optimizer.name,
    shards=mesh.shape.get(SHARD, 1),
  )


def _plain_step(
  config: ConfigDict, task: Task, mesh: Mesh
) -> Callable[[], Any]:
  """Compiles a training step that averages nothing."""
  plain = config.copy_and_resolve_references()
  plain.reducer = "allreduce"
  tx = optimizer.without_exchange(plain, task, mesh)
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
