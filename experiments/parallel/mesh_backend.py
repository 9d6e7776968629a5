"""Training through `jax.shard_map`, on replicas, with stages or shards."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

import edgc_jax
from experiments.models import gpt2, gpt2_shards, gpt2_stages
from experiments.models.gpt2 import GPT2Config
from experiments.parallel import layout, meshes
from experiments.parallel.meshes import DATA, SHARD, STAGE
from experiments.parallel.stored_state import Stored, StoredForm


class OnMesh:
  """A backend on a mesh, in one process or in several."""

  def __init__(
    self,
    model: GPT2Config,
    tx: optax.GradientTransformation,
    mesh: Mesh,
    num_microbatches: int,
  ):
    """Compiles nothing yet.

    Args:
      model: Sizes of the model.
      tx: The optimiser, made for the axes of the mesh.
      mesh: From `make_mesh`.
      num_microbatches: Parts of a replica's batch; unused without stages.
    """
    self.traces = 0
    self._tx = tx
    self._mesh = mesh
    self.rows = functools.partial(meshes.rows_of, mesh)
    self._blank = functools.partial(meshes.blank_rows, self.rows, model.context)
    params = layout.of_params(model, mesh.shape)
    self._fresh = params.init
    self.stored = stored_form(params, tx, mesh)
    param_specs, specs = self.stored.specs
    if STAGE in mesh.shape:
      value_and_grad = functools.partial(
        gpt2_stages.value_and_grad, model, num_microbatches
      )
      loss_fn = functools.partial(gpt2_stages.loss_fn, model, num_microbatches)
    else:
      loss_fn = functools.partial(gpt2.loss_fn, model)
      if SHARD in mesh.shape:
        loss_fn = functools.partial(gpt2_shards.loss_fn, model, param_specs)

      def value_and_grad(params: Any, batch: jax.Array) -> tuple:
        return *jax.value_and_grad(loss_fn)(params, batch), None

    self.num_params = sum(
      p.size for p in jax.tree.leaves(gpt2.param_shapes(model))
    )
    everywhere, rows = PartitionSpec(), meshes.batch_spec(mesh)

    def step(
      params: Any, opt_state: Any, batch: jax.Array
    ) -> tuple[Any, Any, dict[str, jax.Array]]:
      self.traces += 1  # runs when JAX traces, not when the step runs
      # If parameters did not vary over the replicas, JAX would all-reduce
      # their gradients itself, uncompressed.
      local = lax.pcast(params, DATA, to="varying")
      loss, gradients, late_updates = value_and_grad(local, batch)
      updates, opt_state = tx.update(
        gradients, opt_state, params, late_updates=late_updates
      )
      params = optax.apply_updates(params, updates)
      numbers = edgc_jax.metrics(opt_state)
      if STAGE in mesh.shape:
        numbers = _of_all_stages(numbers)
      loss = of_replicas(edgc_jax.after_update(loss, opt_state))
      return params, opt_state, numbers | {"loss": loss}

    def of_replicas(loss: jax.Array) -> jax.Array:
      if SHARD in mesh.shape:  # a shard's loss is its part of the replica's
        loss = lax.psum(loss, SHARD)
      return lax.pmean(loss, DATA)

    def losses(params: Any, batch: jax.Array) -> jax.Array:
      return of_replicas(loss_fn(params, batch))

    def on_mesh(fn: Callable, in_specs: tuple, out_specs: Any) -> Callable:
      return jax.shard_map(
        fn, mesh=mesh, in_specs=in_specs, out_specs=out_specs
      )

    self._params_sharding = self._shardings(param_specs)
    self._init = jax.jit(on_mesh(tx.init, (param_specs,), specs))
    self._step = jax.jit(
      on_mesh(
        step,
        (param_specs, specs, rows),
        (param_specs, specs, everywhere),
      ),
      donate_argnums=(0, 1),
    )
    self._follow = jax.jit(
      on_mesh(
        lambda *state: edgc_jax.follow_first_replica(state, DATA),
        (param_specs, specs),
        (param_specs, specs),
      ),
      donate_argnums=(0, 1),
    )
    self._loss = jax.jit(on_mesh(losses, (param_specs, rows), everywhere))

  def init(self, key: jax.Array) -> tuple[Any, Any]:
    make = jax.jit(self._fresh, out_shardings=self._params_sharding)
    params = make(key)
    return params, self._init(params)

  def load(
    self,
    trees: Mapping[str, Stored],
    replicas: int,
    before: StoredForm | None = None,
  ) -> tuple[Any, ...]:
    return self.stored.load(trees, replicas, self._tx, before)

  def step(
    self, params: Any, opt_state: Any, batch: np.ndarray
  ) -> tuple[Any, Any, dict[str, jax.Array]]:
    return self._step(params, opt_state, self._placed(batch))

  def follow_first_replica(
    self, params: Any, opt_state: Any
  ) -> tuple[Any, Any]:
    return self._follow(params, opt_state)

  def loss(self, params: Any, batch: np.ndarray) -> jax.Array:
    return self._loss(params, self._placed(batch))

  def compile_step(
    self, params: Any, opt_state: Any, batch_size: int
  ) -> jax.stages.Compiled:
    batch = self._placed(self._blank(batch_size))
    return self._step.lower(params, opt_state, batch).compile()

  def compile_loss(self, params: Any, batch_size: int) -> None:
    batch = self._placed(self._blank(batch_size))
    self._loss.lower(params, batch).compile()

  def _placed(self, batch: np.ndarray) -> jax.Array:
    """Places each device's rows, as a part of the batch."""
    sharding = NamedSharding(self._mesh, meshes.batch_spec(self._mesh))
    return jax.make_array_from_process_local_data(sharding, batch)

  def _shardings(self, specs: Any) -> Any:
    return jax.tree.map(lambda spec: NamedSharding(self._mesh, spec), specs)


def stored_form(
  params: layout.Layout,
  tx: optax.GradientTransformation,
  mesh: Mesh | AbstractMesh,
) -> StoredForm:
  """Returns the stored form of a state on a mesh, which need not exist."""
  _, shapes, param_specs = params
  specs = edgc_jax.state_specs(
    tx, shapes, DATA, mesh=mesh, param_specs=param_specs
  )
  init = jax.shard_map(
    tx.init, mesh=mesh, in_specs=(param_specs,), out_specs=specs
  )
  return StoredForm(
    shapes=(shapes, jax.eval_shape(init, shapes)),
    specs=(param_specs, specs),
    mesh=mesh,
    data_axis=DATA,
    is_stacked=False,
  )


def _of_all_stages(numbers: dict[str, jax.Array]) -> dict[str, jax.Array]:
  """Gathers metrics that differ by stage, along a first axis of stages."""
  stage, stages = lax.axis_index(STAGE), lax.axis_size(STAGE)
  slots = {
    name: jax.tree.map(
      lambda x: jnp.zeros((stages, *x.shape[1:]), x.dtype).at[stage].set(x[0]),
      tree,
    )
    for name, tree in numbers.items()
    if all(x.ndim for x in jax.tree.leaves(tree))
  }
  return numbers | lax.psum(slots, STAGE)
