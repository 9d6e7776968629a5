"""Training under `jax.jit`, on replicas, with stages or shards."""

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
    self.num_params = sum(
      p.size for p in jax.tree.leaves(gpt2.param_shapes(model))
    )
    if STAGE in mesh.shape:
      step, loss = _on_stages(
        model, tx, mesh, num_microbatches, self.stored.specs
      )
    else:
      step, loss = _in_plain_jit(model, tx, mesh)

    def traced(*args: Any) -> tuple[Any, Any, dict[str, jax.Array]]:
      self.traces += 1  # runs when JAX traces, not when the step runs
      return step(*args)

    self._params_sharding = self._shardings(param_specs)
    everywhere = NamedSharding(mesh, PartitionSpec())
    self._init = jax.jit(
      jax.shard_map(
        tx.init, mesh=mesh, in_specs=(param_specs,), out_specs=specs
      )
    )
    self._step = jax.jit(
      traced,
      out_shardings=(*self._shardings(self.stored.specs), everywhere),
      donate_argnums=(0, 1),
    )
    self._follow = jax.jit(
      jax.shard_map(
        lambda *state: edgc_jax.follow_first_replica(state, DATA),
        mesh=mesh,
        in_specs=self.stored.specs,
        out_specs=self.stored.specs,
      ),
      donate_argnums=(0, 1),
    )
    self._loss = jax.jit(loss, out_shardings=everywhere)

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


def _in_plain_jit(
  model: GPT2Config, tx: optax.GradientTransformation, mesh: Mesh
) -> tuple[Callable, Callable]:
  """Returns step and loss on replicas, whose shards the compiler gathers.

  Args:
    model: Sizes of the model.
    tx: The optimiser, with a reducer that was told the mesh.
    mesh: The devices.
  """
  loss_fn = functools.partial(gpt2.loss_fn, model)
  if SHARD in mesh.shape:
    loss_fn = functools.partial(gpt2_shards.loss_fn, model, mesh)

  def step(
    params: Any, opt_state: Any, batch: jax.Array
  ) -> tuple[Any, Any, dict[str, jax.Array]]:
    value_and_grad = edgc_jax.value_and_grad(loss_fn, mesh, DATA)
    loss, gradients = value_and_grad(params, batch)
    updates, opt_state = tx.update(gradients, opt_state, params)
    params = optax.apply_updates(params, updates)
    # Statistics of shards are joined after the exchange.
    numbers = edgc_jax.metrics(edgc_jax.after_update(opt_state, opt_state))
    return params, opt_state, numbers | {"loss": loss}

  return step, loss_fn


def _on_stages(
  model: GPT2Config,
  tx: optax.GradientTransformation,
  mesh: Mesh,
  num_microbatches: int,
  specs: tuple[Any, Any],
) -> tuple[Callable, Callable]:
  """Returns step and loss on pipeline stages.

  Args:
    model: Sizes of the model.
    tx: The optimiser.
    mesh: The devices.
    num_microbatches: Parts of a replica's batch.
    specs: Of parameters and optimiser state.
  """
  rows, everywhere = meshes.batch_spec(mesh), PartitionSpec()
  on_mesh = functools.partial(jax.shard_map, mesh=mesh)

  @functools.partial(
    on_mesh, in_specs=(*specs, rows), out_specs=(*specs, everywhere)
  )
  def step(
    params: Any, opt_state: Any, batch: jax.Array
  ) -> tuple[Any, Any, dict[str, jax.Array]]:
    # If parameters did not vary over the replicas, JAX would all-reduce their
    # gradients itself, uncompressed.
    local = lax.pcast(params, DATA, to="varying")
    loss, gradients, late_updates = gpt2_stages.value_and_grad(
      model, num_microbatches, local, batch
    )
    updates, opt_state = tx.update(
      gradients, opt_state, params, late_updates=late_updates
    )
    params = optax.apply_updates(params, updates)
    numbers = _of_all_stages(edgc_jax.metrics(opt_state))
    loss = lax.pmean(edgc_jax.after_update(loss, opt_state), DATA)
    return params, opt_state, numbers | {"loss": loss}

  @functools.partial(on_mesh, in_specs=(specs[0], rows), out_specs=everywhere)
  def loss(params: Any, batch: jax.Array) -> jax.Array:
    return lax.pmean(
      gpt2_stages.loss_fn(model, num_microbatches, params, batch), DATA
    )

  return step, loss


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
