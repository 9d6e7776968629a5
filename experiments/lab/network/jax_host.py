"""A host of the network benchmark that runs this project's training step.

The benchmark starts one process per host and calls it. It times the trainer's
own step on its own batches.
"""

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from ml_collections import ConfigDict

import edgc_jax
from edgc_jax.measure.advice import Candidate
from edgc_jax.wire import order
from experiments.lab.network import calls
from experiments.lab.network.results import NO_EXCHANGE
from experiments.lab.network.update_alone import (
  gradients_like,
  update_alone,
)
from experiments.trainer import tasks
from experiments.trainer.parallel import backends, meshes
from experiments.trainer.parallel.meshes import DATA
from experiments.trainer.tasks.base import Task
from experiments.trainer.training import advised, optimizer

# Their names in JAX's traces; JAX tracks in some which devices agree.
_COLLECTIVES = (
  "psum", "psum_invariant", "pmax", "pmin", "all_gather",
  "all_gather_invariant", "all_to_all", "ppermute", "reduce_scatter",
)  # fmt: skip


class JaxHost:
  """The functions that the benchmark calls."""

  def __init__(self, index: int, count: int, address: str):
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    # The cache would mix up collectives of pipeline stages: see cpu_backend.
    jax.config.update("jax_enable_compilation_cache", False)
    jax.distributed.initialize(address, count, index)
    # By method and part: "step"; "compress", the reducer for a single replica;
    # "communicate", the reducer's collectives alone.
    self._calls: dict[tuple[str, str], Callable[[], Any]] = {}
    self._steps: dict[str, int] = {}  # of a round, by method

  def build(self, name: str, config: dict[str, Any]) -> dict[str, Any]:
    """Compiles a method without sending gradients.

    Args:
      name: A name of the method for later calls.
      config: The whole configuration; the reducer "none" exchanges nothing.

    Returns:
      The number of parameters.
    """
    config, mesh, task = _read(config)
    self._mesh = mesh  # that of all methods
    self._steps[name] = max(1, config.local.every)
    exchanges = config.reducer != "none"
    if exchanges:
      reducer = optimizer.make_reducer(config, task, {}, mesh)
      tx = optimizer.make_optimizer(config, task, {}, reducer, mesh)
    else:
      config.reducer = "allreduce"
      tx = optimizer.without_exchange(config, task, mesh)
    backend = backends.make(config, task, tx, mesh)
    state = backend.init(jax.random.key(0))
    own = backend.rows(config.batch_size)
    rows = next(task.train_batches(config.batch_size, 0, own))
    backend.compile_step(*state, config.batch_size)

    def step() -> dict[str, jax.Array]:
      nonlocal state
      for _ in range(self._steps[name]):  # the last one exchanges
        *state, numbers = backend.step(*state, rows, 1)
      return numbers

    self._calls[name, "step"] = step
    has_parts = config.mesh.stage == config.mesh.fsdp == 1
    if exchanges and has_parts and not config.local.every:
      gradients = gradients_like(task.layout(mesh.shape).shapes)
      self._calls[name, "compress"] = update_alone(reducer, gradients)
      self._calls[name, "communicate"] = _communicate(reducer, gradients, mesh)
    return {"params": backend.num_params}

  def settle(self, num_bytes: int) -> float:
    """Returns the seconds of an all-reduce over the replicas' connections.

    Args:
      num_bytes: Bytes of float32 values.
    """

    def send() -> jax.Array:
      # Equal values would be multiplied, not sent.
      own = lax.axis_index(DATA).astype(jnp.float32)
      return lax.psum(jnp.full(num_bytes // 4, own), DATA)[:1]

    name = f"{num_bytes} bytes", "settle"
    if name not in self._calls:
      run = jax.shard_map(send, mesh=self._mesh, in_specs=(), out_specs=P())
      self._calls[name] = jax.jit(run).lower().compile()
    call = self._calls[name]
    return calls.seconds_of(lambda: jax.block_until_ready(call()), 1)[0][0]

  def run(self, name: str, part: str, count: int) -> dict[str, Any]:
    """Times a part of a method.

    Args:
      name: As in `build`.
      part: "step", "compress" or "communicate".
      count: Number of runs.

    Returns:
      The seconds of each run, and for "step" the wire bytes of the last one,
      both of a step; with local steps a run is a whole round.
    """
    call = self._calls[name, part]
    seconds, result = calls.seconds_of(
      lambda: jax.block_until_ready(call()), count
    )
    if part != "step":
      return {"seconds": seconds}
    steps = self._steps[name]
    wire_bytes = float(np.asarray(result["wire_bytes"]).max())
    return {
      "seconds": [each / steps for each in seconds],
      "wire_bytes": wire_bytes / steps,
    }

  def candidates(
    self, config: dict[str, Any], most_steps: int
  ) -> dict[str, dict[str, Any]]:
    """Returns settings of the methods that `advise` chooses from, by name.

    Args:
      config: The whole configuration, with any reducer.
      most_steps: As for `edgc_jax.advise`.
    """
    config, mesh, task = _read(config)
    self._most_steps = most_steps
    any_link = edgc_jax.LinkModel(0.0, 1.0)
    free = advised.Costs(0.0, None)
    found = advised.advise(config, task, mesh, any_link, free, most_steps)
    return {one.name: _settings_of(one) for one in found.methods}

  def measure_costs(self, config: dict[str, Any]) -> None:
    """Measures what `advise` needs in addition to the link."""
    config, mesh, task = _read(config)
    plain = self._calls[NO_EXCHANGE, "step"]
    self._costs = advised.measure_costs(
      config, task, mesh, self._most_steps, plain
    )

  def advise(self, config: dict[str, Any]) -> dict[str, Any]:
    """Computes the advice of `advise.py` on the current links.

    Args:
      config: The whole configuration, with any reducer.

    Returns:
      Predicted seconds of a step by method, the choice, and the link.
    """
    config, mesh, task = _read(config)
    link = edgc_jax.measure_link(mesh, DATA)
    plain = self._calls[NO_EXCHANGE, "step"]  # at the machine's current speed
    costs = self._costs._replace(step=advised.seconds_of(plain, mesh))
    found = advised.advise(config, task, mesh, link, costs, self._most_steps)
    return {
      "seconds": {method.name: method.seconds for method in found.methods},
      "steps": {method.name: method.steps for method in found.methods},
      "choice": found.choice.name,
      "link": dataclasses.asdict(link),
    }


def _settings_of(one: Candidate) -> dict[str, Any]:
  """Returns the keys of a configuration that make it a candidate's."""
  settings = dict(advised.settings_of(one.reducer, one.options))
  if one.every > 1:
    settings |= {
      "local.every": one.every, "local.lr": one.outer["learning_rate"],
      "local.momentum": one.outer.get("momentum", 0.0),
    }  # fmt: skip
  return settings


def _read(values: dict[str, Any]) -> tuple[ConfigDict, Mesh, Task]:
  """Returns a configuration, its mesh and its task."""
  config = ConfigDict(values)
  return config, meshes.of_config(config), tasks.make(config)


def _communicate(
  reducer: optax.GradientTransformation, gradients: Any, mesh: Mesh
) -> Callable[[], Any]:
  """Compiles the collectives of an update, without computation."""
  # A trace of pmap would have the devices of this process alone.
  update = jax.shard_map(
    lambda g: reducer.update(g, reducer.init(g)),
    mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False,
  )  # fmt: skip
  shapes = jax.eval_shape(lambda: gradients)  # no process has all of the mesh
  call = jax.pmap(replay_of(jax.make_jaxpr(update)(shapes)), axis_name=DATA)
  zeros = np.zeros(len(mesh.local_devices), np.int32)
  call.lower(zeros).compile()
  return lambda: call(zeros)


def replay_of(traced: ClosedJaxpr) -> Callable[[jax.Array], list[Any]]:
  """Returns a function that only runs the collectives of a program, in order.

  Args:
    traced: The program. Of branches that all send something, which are those of
      a ladder, the last one is taken; the others send in few steps.

  Returns:
    A function of a number, from which it makes the arrays to send, that returns
    the results of all collectives.
  """

  def send(equation: JaxprEqn, value: jax.Array, before: Any) -> Any:
    arrays = [
      # All arrays differ: of two equal ones XLA would send only one.
      (jnp.arange(x.aval.size) + value + i)
      .reshape(x.aval.shape)
      .astype(x.aval.dtype)
      for i, x in enumerate(equation.invars)
    ]
    results = equation.primitive.bind(
      *order.after(arrays, before), **equation.params
    )
    return results if equation.primitive.multiple_results else [results]

  def replay(value: jax.Array) -> list[Any]:
    done: list[Any] = [[]]
    for _, group in itertools.groupby(collectives_of(traced), key=id):
      equation, *others = group
      last = send(equation, value, done[-1])
      # The other iterations, if the program has it in a loop.
      last, _ = lax.scan(
        lambda last, _: (send(equation, value, last), None),  # noqa: B023
        last,
        length=len(others),
      )
      done.append(last)
    return done  # all of them: XLA drops collectives with unused results

  return replay


def collectives_of(traced: Jaxpr | ClosedJaxpr) -> list[JaxprEqn]:
  """Returns the collectives that a program runs, repeated as its loops are."""
  found = []
  for equation in getattr(traced, "jaxpr", traced).eqns:
    name = equation.primitive.name
    parts = [
      collectives_of(part)
      for part in jax.tree.leaves(equation.params)
      if isinstance(part, Jaxpr | ClosedJaxpr)
    ]
    if name in _COLLECTIVES:
      found.append(equation)
    elif name == "cond":
      found += parts[-1] if all(parts) else []
    else:
      times = equation.params["length"] if name == "scan" else 1
      found += times * [each for part in parts for each in part]
  return found


if __name__ == "__main__":
  calls.serve(JaxHost)
