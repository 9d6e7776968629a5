"""Training under `jax.jit`, on replicas, with stages or shards."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

import edgc_jax
from experiments.parallel import meshes
from experiments.parallel.backend import Backend, Numbers
from experiments.parallel.meshes import DATA, SHARD, STAGE
from experiments.parallel.stored_state import StoredForm
from experiments.tasks.base import Layout, StagedTask, Task


class OnMesh(Backend):
  """A backend on a mesh, in one process or in several."""

  def __init__(
    self,
    task: Task,
    tx: optax.GradientTransformation,
    mesh: Mesh,
    seed: int,
    num_microbatches: int,
  ):
    """Arguments as for `Backend`.

    Args:
      task: As for `Backend`.
      tx: As for `Backend`.
      mesh: As for `Backend`.
      seed: As for `Backend`.
      num_microbatches: Parts of a replica's batch; unused without stages.
    """
    super().__init__(task, tx, mesh, seed)
    params = task.layout(mesh.shape)
    self.stored = stored_form(params, tx, mesh)
    specs = self.stored.specs
    if STAGE in mesh.shape:
      step, evaluate = self._on_stages(num_microbatches)
    else:
      step, evaluate = self._in_plain_jit, self._in_plain_evaluation
    shardings = self._shardings(specs)
    everywhere = NamedSharding(mesh, PartitionSpec())
    self._draw = jax.jit(params.init, out_shardings=shardings[0])
    self._init = jax.jit(
      jax.shard_map(tx.init, mesh=mesh, in_specs=specs[:1], out_specs=specs[1])
    )
    self._step = jax.jit(
      self._counted(step),
      out_shardings=(*shardings, everywhere),
      donate_argnums=(0, 1),
    )
    self._follow = jax.jit(
      jax.shard_map(
        lambda *state: edgc_jax.follow_first_replica(state, DATA),
        mesh=mesh,
        in_specs=specs,
        out_specs=specs,
      ),
      donate_argnums=(0, 1),
    )
    self._evaluate = jax.jit(evaluate, out_shardings=everywhere)

  def init(self, key: jax.Array) -> tuple[Any, Any]:
    params = self._draw(key)
    return params, self._init(params)

  def _placed(self, batch: Any) -> Any:
    """Places each device's rows, as a part of the batch."""
    sharding = NamedSharding(self.mesh, meshes.batch_spec(self.mesh))
    return jax.tree.map(
      lambda x: jax.make_array_from_process_local_data(sharding, x), batch
    )

  def _shardings(self, specs: Any) -> Any:
    return jax.tree.map(lambda spec: NamedSharding(self.mesh, spec), specs)

  def _gathered(self, params: Any) -> Any:
    """Has the compiler gather sharded parameters.

    Otherwise it sends activations, too: a step of GPT-2 on 2 replicas of 4
    shards then took 1.6 times as long.
    """
    if SHARD not in self.mesh.shape:
      return params
    whole = NamedSharding(self.mesh, PartitionSpec())
    return lax.with_sharding_constraint(params, whole)

  def _in_plain_evaluation(self, params: Any, batch: Any) -> Numbers:
    return self.task.evaluate(self._gathered(params), batch)

  def _in_plain_jit(
    self, params: Any, opt_state: Any, batch: Any, step: jax.Array
  ) -> tuple[Any, Any, Numbers]:
    """Runs a step on replicas, whose shards the compiler gathers."""

    def loss_fn(params: Any, batch: Any, key: jax.Array) -> Any:
      return self.task.loss(self._gathered(params), batch, key)

    differentiated = edgc_jax.value_and_grad(
      loss_fn, self.mesh, DATA, has_aux=True
    )
    (loss, others), gradients = differentiated(params, batch, self._key(step))
    updates, opt_state = self._tx.update(gradients, opt_state, params)
    params = optax.apply_updates(params, updates)
    # Statistics of shards are joined after the exchange.
    numbers = edgc_jax.metrics(edgc_jax.after_update(opt_state, opt_state))
    return params, opt_state, {**numbers, "loss": loss, **others}

  def _on_stages(self, num_microbatches: int) -> tuple[Callable, Callable]:
    """Returns step and evaluation on pipeline stages."""
    task = self.task
    assert isinstance(task, StagedTask)  # as `checks` requires
    rows, everywhere = meshes.batch_spec(self.mesh), PartitionSpec()
    specs = self.stored.specs
    on_mesh = functools.partial(jax.shard_map, mesh=self.mesh)

    @functools.partial(
      on_mesh, in_specs=(*specs, rows), out_specs=(*specs, everywhere)
    )
    def on_stage(
      params: Any, opt_state: Any, batch: Any
    ) -> tuple[Any, Any, Numbers]:
      # If parameters did not vary over the replicas, JAX would all-reduce their
      # gradients itself, uncompressed.
      local = lax.pcast(params, DATA, to="varying")
      loss, gradients, late_updates = task.staged_value_and_grad(
        num_microbatches, local, batch
      )
      updates, opt_state = self._tx.update(
        gradients, opt_state, params, late_updates=late_updates
      )
      params = optax.apply_updates(params, updates)
      numbers = _of_all_stages(edgc_jax.metrics(opt_state))
      loss = lax.pmean(edgc_jax.after_update(loss, opt_state), DATA)
      return params, opt_state, {**numbers, "loss": loss}

    def step(
      params: Any, opt_state: Any, batch: Any, step: jax.Array
    ) -> tuple[Any, Any, Numbers]:
      del step  # the loss draws no numbers
      return on_stage(params, opt_state, batch)

    @functools.partial(on_mesh, in_specs=(specs[0], rows), out_specs=everywhere)
    def evaluate(params: Any, batch: Any) -> Numbers:
      loss = task.staged_loss(num_microbatches, params, batch)
      return {"loss": lax.pmean(loss, DATA)}

    return step, evaluate


def stored_form(
  params: Layout,
  tx: optax.GradientTransformation,
  mesh: Mesh | AbstractMesh,
) -> StoredForm:
  """Returns the stored form of a state on a mesh, which need not exist."""
  specs = edgc_jax.state_specs(
    tx, params.shapes, DATA, mesh=mesh, param_specs=params.specs
  )
  init = jax.shard_map(
    tx.init, mesh=mesh, in_specs=(params.specs,), out_specs=specs
  )
  return StoredForm(
    shapes=(params.shapes, jax.eval_shape(init, params.shapes)),
    specs=(params.specs, specs),
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
