"""A host of the benchmark of overlapped exchanges (`overlap.py`)."""

import time
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec
from ml_collections import ConfigDict

import edgc_jax
from experiments.lab.network import calls
from experiments.trainer import tasks
from experiments.trainer.parallel import meshes
from experiments.trainer.parallel.meshes import DATA


class OverlapHost:
  """The functions that the benchmark calls."""

  def __init__(self, index: int, count: int, address: str):
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(address, count, index)
    self._runs: dict[str, _Run] = {}

  def build(
    self, name: str, config: dict[str, Any], is_split: bool, **options: Any
  ) -> None:
    """Compiles a way to exchange, without sending.

    Args:
      name: A name of it for later calls.
      config: The whole configuration.
      is_split: Whether the exchange is a program of its own.
      **options: For `local_steps` or `split_local_steps`; with `overlap` None
        nothing is exchanged.
    """
    self._runs[name] = _Run(ConfigDict(config), is_split, options)

  def round(self, name: str) -> float:
    """Times the steps of a round, in which there is one whole exchange.

    Returns:
      Seconds of a step.
    """
    run = self._runs[name]
    run.steps()  # at its end an exchange begins, or is done
    start = time.perf_counter()
    run.steps()
    seconds = time.perf_counter() - start
    run.wait()
    return seconds / run.every


class _Run:
  """A training run with local steps, of one way to exchange."""

  def __init__(self, config: ConfigDict, is_split: bool, options: Any):
    mesh, task = meshes.of_config(config), tasks.make(config)
    self.every = options["every"]
    is_alone = options["overlap"] is None
    options = options | {"overlap": options["overlap"] or int(is_split)}
    make = edgc_jax.split_local_steps if is_split else edgc_jax.local_steps
    outer = optax.chain(
      edgc_jax.on_mesh(edgc_jax.allreduce(DATA), mesh),
      optax.sgd(0.7, momentum=0.9, nesterov=True),
    )
    inner = optax.adamw(config.optimizer.lr)
    made = make(inner, outer, axis_name=DATA, mesh=mesh, **options)
    tx, self._exchange = made if is_split else (made, None)
    if is_alone:
      self._exchange = None

    def step(params: Any, state: Any, batch: Any) -> Any:
      own = edgc_jax.local_params(params, state, mesh)
      differentiated = edgc_jax.value_and_grad(
        task.loss, mesh, DATA, has_aux=True, is_local=True, averages=False
      )
      (losses, _), gradients = differentiated(own, batch, jax.random.key(0))
      updates, state = tx.update(gradients, state, params, local_params=own)
      return optax.apply_updates(params, updates), state, losses

    self._step = jax.jit(step, donate_argnums=(0, 1))
    whole = NamedSharding(mesh, PartitionSpec())
    params = jax.jit(task.init, out_shardings=whole)(jax.random.key(0))
    self._state = params, tx.init(params)
    rows = meshes.rows_of(mesh, config.batch_size)
    batches = task.train_batches(config.batch_size, 0, rows)
    split = NamedSharding(mesh, meshes.batch_spec(mesh))
    self._batch = jax.tree.map(
      lambda x: jax.make_array_from_process_local_data(split, np.asarray(x)),
      next(batches),
    )
    self._step.lower(*self._state, self._batch).compile()
    if self._exchange:
      self._exchange.compile(*self._state)

  def steps(self) -> None:
    """Runs the steps of a round."""
    for _ in range(self.every):
      *state, _ = self._step(*self._state, self._batch)
      self._state = self._exchange(*state) if self._exchange else state
    jax.block_until_ready(self._state)

  def wait(self) -> None:
    """Waits until nothing is sent."""
    if self._exchange:
      self._exchange.wait()


if __name__ == "__main__":
  calls.serve(OverlapHost)
