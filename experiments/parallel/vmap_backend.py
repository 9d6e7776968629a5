"""Replicas simulated on one device, through `jax.vmap`."""

import functools
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
import optax
from jax import lax
from jax.sharding import AbstractMesh

import edgc_jax
from experiments.models import gpt2
from experiments.models.gpt2 import GPT2Config
from experiments.parallel import meshes
from experiments.parallel.meshes import DATA
from experiments.parallel.stored_state import Stored, StoredForm


class Simulated:
  """A backend for all replicas on one device.

  The state has the stored form: what differs by replica is one array, with the
  replicas' parts concatenated along the first axis.
  """

  def __init__(
    self,
    model: GPT2Config,
    tx: optax.GradientTransformation,
    mesh: AbstractMesh,
  ):
    """Compiles nothing yet.

    Args:
      model: Sizes of the model.
      tx: The optimiser.
      mesh: The replicas to simulate.
    """
    replicas = mesh.shape[DATA]
    loss_fn = functools.partial(gpt2.loss_fn, model)
    self.traces = 0
    self._tx = tx
    params = gpt2.param_shapes(model)
    self.num_params = sum(p.size for p in jax.tree.leaves(params))
    state = jax.eval_shape(tx.init, params)
    self.stored = StoredForm.of_replicas(tx, params, state, mesh, DATA)
    specs = self.stored.specs[1]
    axes = edgc_jax.state_axes(tx, params, DATA)
    self._blank = functools.partial(meshes.blank_rows, self.rows, model.context)

    def split(x: jax.Array) -> jax.Array:
      return x.reshape(replicas, -1, *x.shape[1:])

    def parted(opt_state: Any) -> Any:
      """Gives what differs by replica a first axis of replicas."""
      return jax.tree.map(
        lambda x, spec: split(x) if len(spec) else x, opt_state, specs
      )

    def joined(opt_state: Any) -> Any:
      return jax.tree.map(
        lambda x, spec: x.reshape(-1, *x.shape[2:]) if len(spec) else x,
        opt_state,
        specs,
      )

    @functools.partial(
      jax.vmap,
      in_axes=(None, axes, 0),
      out_axes=(None, axes, None),
      axis_name=DATA,
    )
    def on_replica(
      params: Any, opt_state: Any, batch: jax.Array
    ) -> tuple[Any, Any, dict[str, jax.Array]]:
      loss, gradients = jax.value_and_grad(loss_fn)(params, batch)
      updates, opt_state = tx.update(gradients, opt_state, params)
      params = optax.apply_updates(params, updates)
      numbers = edgc_jax.metrics(opt_state)
      loss = lax.pmean(edgc_jax.after_update(loss, opt_state), DATA)
      return params, opt_state, numbers | {"loss": loss}

    def step(
      params: Any, opt_state: Any, batch: jax.Array
    ) -> tuple[Any, Any, dict[str, jax.Array]]:
      self.traces += 1  # runs when JAX traces, not when the step runs
      params, opt_state, numbers = on_replica(
        params, parted(opt_state), split(batch)
      )
      return params, joined(opt_state), numbers

    init = jax.vmap(
      tx.init, in_axes=None, out_axes=axes, axis_name=DATA, axis_size=replicas
    )
    self._draw = functools.partial(gpt2.init_params, model)
    self._init = jax.jit(lambda params: joined(init(params)))
    self._step = jax.jit(step, donate_argnums=(0, 1))
    self._loss = jax.jit(loss_fn)

  def init(self, key: jax.Array) -> tuple[Any, Any]:
    params = self._draw(key)
    return params, self._init(params)

  def load(
    self,
    trees: Mapping[str, Stored],
    replicas: int,
    before: StoredForm | None = None,
  ) -> tuple[Any, ...]:
    state = self.stored.load(trees, replicas, self._tx, before)
    return jax.device_put(state)

  def step(
    self, params: Any, opt_state: Any, batch: np.ndarray
  ) -> tuple[Any, Any, dict[str, jax.Array]]:
    return self._step(params, opt_state, batch)

  def follow_first_replica(
    self, params: Any, opt_state: Any
  ) -> tuple[Any, Any]:
    return params, opt_state  # what should be equal is kept once

  def loss(self, params: Any, batch: np.ndarray) -> jax.Array:
    return self._loss(params, batch)

  def compile_step(
    self, params: Any, opt_state: Any, batch_size: int
  ) -> jax.stages.Compiled:
    batch = self._blank(batch_size)
    return self._step.lower(params, opt_state, batch).compile()

  def compile_loss(self, params: Any, batch_size: int) -> None:
    self._loss.lower(params, self._blank(batch_size)).compile()

  def rows(self, batch_size: int) -> slice:
    return slice(0, batch_size)
