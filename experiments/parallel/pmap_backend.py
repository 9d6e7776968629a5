"""Data-parallel training through `jax.pmap`."""

import functools
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
import optax
from jax import lax
from jax.sharding import Mesh

import edgc_jax
from experiments.models import gpt2
from experiments.models.gpt2 import GPT2Config
from experiments.parallel import meshes
from experiments.parallel.meshes import DATA
from experiments.parallel.stored_state import Stored, StoredForm


class Pmap:
  """A backend for the replicas of one process, or of several."""

  def __init__(
    self, model: GPT2Config, tx: optax.GradientTransformation, mesh: Mesh
  ):
    """Compiles nothing yet.

    Args:
      model: Sizes of the model.
      tx: The optimiser.
      mesh: From `make_mesh`, without stages.
    """
    devices = None  # all devices: required with several processes
    if jax.process_count() == 1:
      devices = list(mesh.devices.flat)
    pmap = functools.partial(jax.pmap, axis_name=DATA, devices=devices)
    loss_fn = functools.partial(gpt2.loss_fn, model)
    self.traces = 0
    self._local = len(mesh.local_devices)
    self.rows = functools.partial(meshes.rows_of, mesh)
    self._blank = functools.partial(meshes.blank_rows, self.rows, model.context)

    def step(
      params: Any, opt_state: Any, batch: jax.Array
    ) -> tuple[Any, Any, dict[str, jax.Array]]:
      self.traces += 1  # runs when JAX traces, not when the step runs
      loss, gradients = jax.value_and_grad(loss_fn)(params, batch)
      updates, opt_state = tx.update(gradients, opt_state, params)
      params = optax.apply_updates(params, updates)
      numbers = edgc_jax.metrics(opt_state)
      loss = lax.pmean(edgc_jax.after_update(loss, opt_state), DATA)
      return params, opt_state, numbers | {"loss": loss}

    params = gpt2.param_shapes(model)
    shapes = (params, jax.eval_shape(tx.init, params))
    self.num_params = sum(p.size for p in jax.tree.leaves(shapes[0]))
    self._tx = tx
    self.stored = StoredForm.of_replicas(
      tx, *shapes, mesh, DATA, is_stacked=True
    )
    self._draw = functools.partial(gpt2.init_params, model)
    self._init = pmap(lambda p, _: (p, tx.init(p)), in_axes=(None, 0))
    self._place = pmap(lambda x: x)  # places arrays as the step returns them
    self._step = pmap(step, donate_argnums=(0, 1))
    self._follow = pmap(
      lambda *state: edgc_jax.follow_first_replica(state, DATA),
      donate_argnums=(0, 1),
    )
    self._loss = pmap(lambda *x: lax.pmean(loss_fn(*x), DATA))

  def init(self, key: jax.Array) -> tuple[Any, Any]:
    return self._init(self._draw(key), np.zeros(self._local))

  def load(
    self,
    trees: Mapping[str, Stored],
    replicas: int,
    before: StoredForm | None = None,
  ) -> tuple[Any, ...]:
    return self._place(self.stored.load(trees, replicas, self._tx, before))

  def step(
    self, params: Any, opt_state: Any, batch: np.ndarray
  ) -> tuple[Any, Any, dict[str, jax.Array]]:
    params, opt_state, numbers = self._step(
      params, opt_state, self._split(batch)
    )
    return params, opt_state, jax.tree.map(_first, numbers)

  def follow_first_replica(
    self, params: Any, opt_state: Any
  ) -> tuple[Any, Any]:
    return self._follow(params, opt_state)

  def loss(self, params: Any, batch: np.ndarray) -> jax.Array:
    return _first(self._loss(params, self._split(batch)))

  def compile_step(
    self, params: Any, opt_state: Any, batch_size: int
  ) -> jax.stages.Compiled:
    batch = self._split(self._blank(batch_size))
    return self._step.lower(params, opt_state, batch).compile()

  def compile_loss(self, params: Any, batch_size: int) -> None:
    batch = self._split(self._blank(batch_size))
    self._loss.lower(params, batch).compile()

  def _split(self, batch: np.ndarray) -> np.ndarray:
    """Reshapes [rows, time] to [replicas, rows / replicas, time], local."""
    return batch.reshape(self._local, -1, batch.shape[-1])


def _first(x: jax.Array) -> jax.Array:
  """Returns the part of `x` on the first of this process's devices."""
  return x.addressable_shards[0].data
