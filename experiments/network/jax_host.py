"""A host of the network benchmark that runs this project's training step.

The benchmark starts one process per host and calls it through standard input.
It times the trainer's own step on random tokens.
"""

import dataclasses
import functools
import itertools
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import Mesh
from ml_collections import ConfigDict

import edgc_jax
from edgc_jax.wire import order
from experiments import tasks
from experiments.network import calls, hlo
from experiments.network.results import RANKS
from experiments.parallel import backends, meshes
from experiments.parallel.meshes import DATA
from experiments.runtime import heap
from experiments.tasks.base import Task
from experiments.training import advised, optimizer

NO_EXCHANGE = "none"  # a reducer that leaves gradients unchanged
_BUDGET = 15.0  # seconds to measure the link
_DTYPES = {
  "f32": jnp.float32, "bf16": jnp.bfloat16, "u32": jnp.uint32,
  "s32": jnp.int32, "u16": jnp.uint16, "u8": jnp.uint8, "s8": jnp.int8,
}  # fmt: skip


@dataclasses.dataclass
class _Method:
  """Compiled functions to time; None if not measured."""

  step: Callable[[], Any]
  compress: Callable[[], Any] | None  # the reducer, for a single replica
  communicate: Callable[[], Any] | None  # its collectives alone


class JaxHost:
  """The functions that the benchmark calls."""

  def __init__(self, index: int, count: int, address: str):
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    # The cache would mix up collectives of pipeline stages: see cpu_backend.
    jax.config.update("jax_enable_compilation_cache", False)
    jax.distributed.initialize(address, count, index)
    self._methods: dict[str, _Method] = {}
    self._costs: advised.Costs | None = None

  def build(self, name: str, config: dict[str, Any]) -> dict[str, Any]:
    """Compiles a method without sending gradients.

    Args:
      name: A name of the method for later calls.
      config: The whole configuration; the reducer "none" exchanges nothing.

    Returns:
      The number of parameters.
    """
    config, mesh, task = _read(config)
    exchanges = config.reducer != NO_EXCHANGE
    if exchanges:
      reducer = optimizer.make_reducer(config, task, {}, mesh)
    else:
      config.reducer = "allreduce"
      reducer = optimizer.without_exchange(config, task, mesh)
    tx = optimizer.make_optimizer(config, task, {}, reducer, mesh)
    backend = backends.make(config, task, tx, mesh)
    state = backend.init(jax.random.key(0))
    own = backend.rows(config.batch_size)
    rows = next(task.train_batches(config.batch_size, 0, own))
    compiled = backend.compile_step(*state, config.batch_size)
    # At the largest rank of the ladder, which is its last entry.
    sent = hlo.collectives_in_order(compiled.as_text(), -1)

    def step() -> dict[str, jax.Array]:
      nonlocal state
      *state, numbers = backend.step(*state, rows, 1)
      return numbers

    has_parts = exchanges and config.mesh.stage == config.mesh.fsdp == 1
    self._methods[name] = _Method(
      step,
      _compress(reducer, task) if has_parts else None,
      _communicate(sent, mesh) if has_parts else None,
    )
    return {"params": backend.num_params}

  def measure_costs(self, config: dict[str, Any]) -> None:
    """Measures what `advise` needs in addition to the link."""
    config, mesh, task = _read(config)
    plain = self._methods.get(NO_EXCHANGE)
    self._costs = advised.measure_costs(
      config, task, mesh, plain.step if plain else None
    )

  def run(self, name: str, part: str, count: int) -> dict[str, Any]:
    """Times a part of a method.

    Args:
      name: As in `build`.
      part: "step", "compress" or "communicate".
      count: Number of runs.

    Returns:
      The seconds of each run, and for "step" the wire bytes of the last one.
    """
    call = getattr(self._methods[name], part)
    seconds, result = calls.seconds_of(
      lambda: jax.block_until_ready(call()), count
    )
    if part != "step":
      return {"seconds": seconds}
    wire_bytes = np.asarray(result["wire_bytes"]).max()
    return {"seconds": seconds, "wire_bytes": float(wire_bytes)}

  def advise(self, config: dict[str, Any]) -> dict[str, Any]:
    """Computes the advice of `advise.py` on the current links.

    Args:
      config: The whole configuration, with any reducer.

    Returns:
      Predicted seconds of a step by method, the choice, and the link.
    """
    config, mesh, task = _read(config)
    link = edgc_jax.measure_link(mesh, DATA, repeats=3, budget=_BUDGET)
    costs = self._costs
    if NO_EXCHANGE in self._methods:  # at the machine's current speed
      step = self._methods[NO_EXCHANGE].step
      costs = costs._replace(step=advised.seconds_of(step, mesh))
    found = advised.advise(config, task, mesh, link, costs, RANKS)
    return {
      "seconds": {method.name: method.seconds for method in found.methods},
      "choice": found.choice.name,
      "link": dataclasses.asdict(link),
    }


def _read(values: dict[str, Any]) -> tuple[ConfigDict, Mesh, Task]:
  """Returns a configuration, its mesh and its task."""
  config = ConfigDict(values)
  return config, meshes.of_config(config), tasks.make(config)


def _compress(
  reducer: optax.GradientTransformation, task: Task
) -> Callable[[], Any]:
  """Compiles updates with one replica, which compute all and send nothing."""
  pmap = functools.partial(
    jax.pmap, axis_name=DATA, devices=jax.local_devices()[:1]
  )
  gradients = _gradients(task)
  state = pmap(reducer.init)(gradients)
  update = pmap(reducer.update, donate_argnums=1)

  def run() -> Any:
    nonlocal state
    updates, state = update(gradients, state)
    return updates

  run()
  return run


def _gradients(task: Task) -> Any:
  """Draws random gradients on the first device, in the layout of pmap."""
  random = np.random.default_rng(0)  # drawing with JAX takes long to compile
  values = jax.tree.map(
    lambda s: 1e-3 * random.standard_normal((1, *s.shape), np.float32),
    task.layout({DATA: 1}).shapes,
  )
  return jax.pmap(lambda x: x, devices=jax.local_devices()[:1])(values)


def _communicate(sent: list[hlo.Collective], mesh: Mesh) -> Callable[[], Any]:
  """Compiles the collectives of a program, without computation."""
  call = jax.pmap(replay_of(sent, mesh.shape[DATA]), axis_name=DATA)
  zeros = np.zeros(len(mesh.local_devices), np.int32)
  call.lower(zeros).compile()
  return lambda: call(zeros)


def replay_of(
  sent: list[hlo.Collective], replicas: int
) -> Callable[[jax.Array], list[list[jax.Array]]]:
  """Returns a function that runs the same collectives, one after the other.

  Args:
    sent: The collectives of a program.
    replicas: Number of replicas.

  Returns:
    A function of a number, from which it makes the arrays to send, that returns
    the results of all collectives.
  """

  def operands(collective: hlo.Collective, value: jax.Array) -> list[jax.Array]:
    parts = replicas if collective.kind == "all-gather" else 1
    arrays = [
      # All arrays differ: of two equal ones XLA would send only one.
      (jnp.arange(int(np.prod(shape)) // parts) + value + i).astype(
        _DTYPES[dtype]
      )
      for i, (dtype, shape) in enumerate(collective.results)
    ]
    if collective.kind == "all-to-all" and len(arrays) == replicas:
      return [jnp.concatenate(arrays)]  # a result for each replica's part
    return arrays

  def send(
    collective: hlo.Collective,
    value: jax.Array,
    before: list[jax.Array],
  ) -> list[jax.Array]:
    values = order.after(operands(collective, value), before)
    if collective.kind == "all-reduce":
      return list(lax.psum(tuple(values), DATA))
    if collective.kind == "collective-permute":
      return [lax.ppermute(x, DATA, collective.pairs) for x in values]
    if collective.kind == "all-gather":
      return [lax.all_gather(x, DATA) for x in values]
    parts = [x.reshape(replicas, -1) for x in values]
    return [lax.all_to_all(x, DATA, 0, 0, tiled=True) for x in parts]

  def replay(value: jax.Array) -> list[list[jax.Array]]:
    done: list[list[jax.Array]] = [[]]
    for collective, group in itertools.groupby(sent):
      last = send(collective, value, done[-1])
      # The other iterations, if the program has it in a loop.
      last, _ = lax.scan(
        lambda last, _: (send(collective, value, last), None),  # noqa: B023
        last,
        length=len(list(group)) - 1,
      )
      done.append(last)
    return done  # all of them: XLA drops collectives with unused results

  return replay


def main() -> None:
  """Serves calls; arguments: host index, number of hosts, first address."""
  heap.share_one_heap()
  index, count, address = sys.argv[1:]
  host = JaxHost(int(index), int(count), address)
  calls.serve(
    {
      "build": host.build,
      "run": host.run,
      "built": heap.keep_freed_memory,
      "measure_costs": host.measure_costs,
      "advise": host.advise,
    }
  )


if __name__ == "__main__":
  main()
