"""Data-parallel training through `jax.pmap`."""

import functools
from typing import Any

import jax
import numpy as np
import optax
from jax import lax
from jax.sharding import Mesh

import edgc_jax
from experiments.parallel.backend import Backend, Numbers
from experiments.parallel.meshes import DATA
from experiments.parallel.stored_state import StoredForm
from experiments.tasks.base import Task


class Pmap(Backend):
  """A backend for the replicas of one process, or of several."""

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
    ) -> tuple[Any, Any, Numbers]:
      key = jax.random.split(self._key(step), replicas)[lax.axis_index(DATA)]
      found = self._differentiate(params, batch, key)
      return self._update(params, opt_state, *found)

    self.stored = StoredForm.of_replicas(
      tx, task.layout(mesh.shape).shapes, mesh, DATA, is_stacked=True
    )
    self._init = pmap(lambda p, _: (p, tx.init(p)), in_axes=(None, 0))
    self._place = pmap(lambda x: x)  # places arrays as the step returns them
    self._step = pmap(
      self._counted(step), in_axes=(0, 0, 0, None), donate_argnums=(0, 1)
    )
    self._follow = pmap(
      lambda *state: edgc_jax.follow_first_replica(state, DATA),
      donate_argnums=(0, 1),
    )
    self._evaluate = pmap(lambda *x: lax.pmean(task.evaluate(*x), DATA))

  def init(self, key: jax.Array) -> tuple[Any, Any]:
    return self._init(jax.jit(self.task.init)(key), np.zeros(self._local))

  def load(self, *args: Any) -> tuple[Any, ...]:
    return self._place(super().load(*args))

  def _placed(self, batch: Any) -> Any:
    """Reshapes [rows, ...] to [replicas, rows / replicas, ...], local."""
    return jax.tree.map(
      lambda x: x.reshape(self._local, -1, *x.shape[1:]), batch
    )

  def _common(self, numbers: Numbers) -> Numbers:
    """Returns what the first of this process's devices has."""
    return jax.tree.map(lambda x: x.addressable_shards[0].data, numbers)
