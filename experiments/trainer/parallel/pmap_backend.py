"""Data-parallel training through `jax.pmap`."""

import functools
from typing import Any

import jax
import numpy as np
import optax
from jax import lax
from jax.sharding import Mesh, NamedSharding

import edgc_jax
from experiments.trainer.parallel.backend import OWN, Backend, Numbers
from experiments.trainer.parallel.meshes import DATA
from experiments.trainer.runtime import hosts
from experiments.trainer.tasks.base import Task


class Pmap(Backend):
  """A backend for the replicas of one process, or of several.

  In the training state every array has a first axis of local replicas.
  """

  def __init__(
    self, task: Task, tx: optax.GradientTransformation, mesh: Mesh, seed: int
  ):
    """Arguments as for `Backend`; the mesh has replicas alone."""
    super().__init__(task, tx, mesh, seed)
    devices = None  # all devices: required with several processes
    if jax.process_count() == 1:
      devices = list(mesh.devices.flat)
    pmap = functools.partial(jax.pmap, axis_name=DATA, devices=devices)
    self._local = len(mesh.local_devices)
    replicas = mesh.shape[DATA]

    def step(
      params: Any, opt_state: Any, batch: Any, step: jax.Array
    ) -> tuple[Any, Any, Numbers, Numbers]:
      key = jax.random.split(self._key(step), replicas)[lax.axis_index(DATA)]
      own = self._own(params, opt_state)
      found = self._differentiate(own, batch, key)
      return self._update(params, opt_state, *found, **self._extra(own))

    start = pmap(lambda p, _: (p, tx.init(p)), in_axes=(None, 0))
    draw = jax.jit(task.init)
    self.init = lambda key: start(draw(key), np.zeros(self._local))
    self._place = pmap(lambda x: x)  # places arrays as the step returns them
    self._step = pmap(
      self._counted(step), in_axes=(0, 0, 0, None), donate_argnums=(0, 1)
    )
    self.follow_first_replica = pmap(
      lambda *state: edgc_jax.follow_first_replica(state, DATA),
      donate_argnums=(0, 1),
    )
    self._evaluate = pmap(lambda *x: lax.pmean(task.evaluate(*x), DATA))

  def of_stored(self, tree: Any) -> Any:
    def stack(x: jax.Array) -> np.ndarray:
      return np.stack([np.asarray(s.data) for s in x.addressable_shards])

    return self._place(jax.tree.map(stack, tree))

  def to_stored(self, state: tuple[Any, Any]) -> tuple[Any, Any]:
    def join(x: jax.Array, stored: Any, spec: Any) -> jax.Array:
      parts = [shard.data[0] for shard in x.addressable_shards]
      sharding = NamedSharding(self.mesh, spec)
      return jax.make_array_from_single_device_arrays(
        stored.shape, sharding, parts
      )

    return jax.tree.map(join, state, self.stored.shapes, self.stored.specs)

  def step(self, *args: Any) -> tuple[Any, Any, Numbers]:
    *state, numbers = super().step(*args)
    own = numbers.pop(OWN)
    return *state, {**_once(numbers), OWN: own}

  def evaluate(self, params: Any, batch: Any) -> Numbers:
    numbers = super().evaluate(params, batch)
    hosts.wait_for_devices(numbers)
    return _once(numbers)

  def _placed(self, batch: Any) -> Any:
    """Reshapes [rows, ...] to [replicas, rows / replicas, ...], local."""
    return jax.tree.map(
      lambda x: x.reshape(self._local, -1, *x.shape[1:]), batch
    )


def _once(numbers: Numbers) -> Numbers:
  """Returns what the first of this process's devices has."""
  return jax.tree.map(lambda x: x.addressable_shards[0].data, numbers)
