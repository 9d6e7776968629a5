"""Replicas simulated on one device, through `jax.vmap`."""

import functools
from typing import Any

import jax
import optax
from jax import lax
from jax.sharding import AbstractMesh

import edgc_jax
from experiments.trainer.parallel.backend import Backend, Numbers
from experiments.trainer.parallel.meshes import DATA
from experiments.trainer.tasks.base import Task


class Vmap(Backend):
  """A backend for all replicas on one device.

  The state has the stored form: what is equal on all replicas is kept once, and
  what differs is one array, with their parts along the first axis.
  """

  def __init__(
    self,
    task: Task,
    tx: optax.GradientTransformation,
    mesh: AbstractMesh,
    seed: int,
  ):
    """Arguments as for `Backend`; the mesh has replicas alone."""
    super().__init__(task, tx, mesh, seed)
    replicas = mesh.shape[DATA]
    axes = edgc_jax.state_axes(tx, self.stored.shapes[0], DATA)
    # One after the other they stay in a CPU's caches: the gradients of a GPT
    # of 0.4M parameters on 4 replicas then take 0.7 of the time.
    is_cpu = jax.default_backend() == "cpu"
    map_replicas = lax.map if is_cpu else lambda f, x: jax.vmap(f)(x)

    def split(x: jax.Array) -> jax.Array:
      return x.reshape(replicas, -1, *x.shape[1:])

    def own(reshape: Any, opt_state: Any) -> Any:
      """Reshapes what differs by replica."""
      return jax.tree.map(
        lambda x, spec: reshape(x) if len(spec) else x,
        opt_state,
        self.stored.specs[1],
      )

    joined = functools.partial(own, lambda x: x.reshape(-1, *x.shape[2:]))

    def step(
      params: Any, opt_state: Any, batch: Any, step: jax.Array
    ) -> tuple[Any, Any, Numbers, Numbers]:
      parts = jax.tree.map(split, batch)
      keys = jax.random.split(self._key(step), replicas)
      opt_state = own(split, opt_state)
      if self._is_local:
        points = jax.vmap(self._own, (None, axes))(params, opt_state)
        found = map_replicas(
          lambda each: self._differentiate(*each), (points, parts, keys)
        )
      else:
        points = params
        found = map_replicas(
          lambda each: self._differentiate(params, *each), (parts, keys)
        )
      update = jax.vmap(
        self._update,
        in_axes=(None, axes, 0, 0),
        out_axes=(None, axes, None, 0),
        axis_name=DATA,
      )
      params, opt_state, *numbers = update(
        params, opt_state, *found, **self._extra(points)
      )
      return params, joined(opt_state), *numbers

    def init(key: jax.Array) -> tuple[Any, Any]:
      params = task.init(key)
      size = {"axis_name": DATA, "axis_size": replicas}
      on_replicas = jax.vmap(tx.init, in_axes=None, out_axes=axes, **size)
      return params, joined(on_replicas(params))

    self.init = jax.jit(init)
    self._step = jax.jit(self._counted(step), donate_argnums=(0, 1))
    # What should be equal is kept once.
    self.follow_first_replica = lambda *state: state
    self._evaluate = jax.jit(task.evaluate)

  def rows(self, batch_size: int) -> slice:
    return slice(0, batch_size)

  def _placed(self, batch: Any) -> Any:
    return batch
