"""What the ways to run a training step on many devices share.

The trainer does not need to know how a backend places its arrays.
"""

import abc
import collections
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import AbstractMesh, Mesh

import edgc_jax
from edgc_jax.measure import timing
from edgc_jax.state.metrics import find
from edgc_jax.state.state import LocalStepsState
from experiments.trainer.parallel import meshes
from experiments.trainer.parallel.meshes import DATA
from experiments.trainer.parallel.stored_state import StoredForm
from experiments.trainer.runtime import hosts
from experiments.trainer.tasks.base import Task

Numbers = Mapping[str, Any]
OWN = "own"  # key of the numbers that each replica has alone
# Steps that may be under way: a signal to stop waits for all of them.
_RUNNING = 4


class Backend(abc.ABC):
  """A way to run the training step; its subclasses make the functions.

  Attributes:
    init: Returns new parameters and optimiser state from a key.
    follow_first_replica: Takes parameters and optimiser state, and copies the
      first replica's values, where replicas should be equal.
    stored: The stored form of (parameters, optimiser state).
    num_params: Number of parameters of the model.
    traces: Number of times that JAX has traced the step.
  """

  init: Callable[[jax.Array], tuple[Any, Any]]
  follow_first_replica: Callable[[Any, Any], tuple[Any, Any]]
  # Jitted: (params, opt_state, batch, step) to new ones, metrics that are equal
  # on all replicas, and those that each replica has alone.
  _step: Any
  _evaluate: Any  # jitted: (params, batch) to metrics

  def __init__(
    self,
    task: Task,
    tx: optax.GradientTransformation,
    mesh: Mesh | AbstractMesh,
    seed: int,
  ):
    """Compiles nothing yet.

    Args:
      task: The model and its data.
      tx: The optimiser, made for the axes of the mesh.
      mesh: From `meshes.of_config`.
      seed: Of the keys of the steps.
    """
    self.task, self.mesh, self.traces = task, mesh, 0
    # Numbers of steps that may be under way, of this process's replicas.
    self._running: collections.deque[Any] = collections.deque()
    self._tx, self._seed = tx, seed
    self.stored = StoredForm.of(task.layout(mesh.shape), tx, mesh)
    # Replicas differentiate at parameters of their own between exchanges.
    self._is_local = bool(find(self.stored.shapes[1], LocalStepsState))
    shapes = jax.eval_shape(task.init, jax.random.key(0))
    self.num_params = sum(p.size for p in jax.tree.leaves(shapes))

  @abc.abstractmethod
  def _placed(self, batch: Any) -> Any:
    """Converts this process's rows of a batch to an argument of the step."""

  def rows(self, batch_size: int) -> slice:
    """Returns the rows of a batch for this process's devices."""
    return meshes.rows_of(self.mesh, batch_size)

  def of_stored(self, tree: Any) -> Any:
    """Converts stored parameters, or parameters and optimiser state."""
    return tree

  def to_stored(self, state: tuple[Any, Any]) -> tuple[Any, Any]:
    """Reverses `of_stored`, as far as this process's devices hold the state."""
    return state

  def step(
    self, params: Any, opt_state: Any, batch: Any, step: int
  ) -> tuple[Any, Any, Numbers]:
    """Starts a step on this process's rows of a batch; few are under way.

    Args:
      params: The parameters; the call consumes them.
      opt_state: The optimiser state; the call consumes it.
      batch: From the task.
      step: Number of the step, from 1, for its key.

    Returns:
      Parameters, optimiser state and metrics, for `fetch`.
    """
    batch = self._placed(batch)
    *state, numbers, own = self._step(params, opt_state, batch, np.int32(step))
    self._running.append(own)
    if len(self._running) > _RUNNING:
      oldest = self._running.popleft()
      hosts.wait_for_devices(oldest)
      jax.block_until_ready(oldest)
    return *state, {**numbers, OWN: own}

  def fetch(self, steps: Sequence[Numbers]) -> list[Numbers]:
    """Returns metrics of steps on the host, equal in all processes.

    All call it at the same point. It averages over replicas what each of them
    has alone, of all steps at once: a mean in each step would wait for the link
    once more, and in every local step.

    Returns:
      Scalars, and arrays over a leaf's matrices by its path. Those that differ
      by stage have a first axis of stages.
    """
    hosts.wait_for_devices(steps)
    numbers, structure = jax.tree.flatten([step[OWN] for step in steps])
    own = [
      float(np.mean([np.mean(part) for part in parts]))
      for parts in jax.device_get([_own_parts(x) for x in numbers])
    ]
    if own and jax.process_count() > 1:
      own = timing.agree(self.mesh, own)
    common = [
      {name: x for name, x in step.items() if name != OWN} for step in steps
    ]
    return [
      both | means
      for both, means in zip(
        jax.device_get(common), structure.unflatten(own), strict=True
      )
    ]

  def wait(self, params: Any) -> None:
    """Waits until the devices of this process have the newest parameters.

    If a process has died, an earlier step has failed, and newer ones may wait
    for it for ever: so it reads the steps that may be under way, too.

    Raises:
      jax.errors.JaxRuntimeError: as soon as a device has failed.
    """
    hosts.wait_for_devices((params, list(self._running)))
    self._running.clear()

  def evaluate(self, params: Any, batch: Any) -> Numbers:
    """Returns the task's metrics on such rows, as means over the replicas."""
    return self._evaluate(params, self._placed(batch))

  def compile_step(
    self, params: Any, opt_state: Any, batch_size: int
  ) -> jax.stages.Compiled:
    """Compiles the step for later calls, without running a collective."""
    batch = self._placed(self.blank(batch_size))
    return self._step.lower(params, opt_state, batch, np.int32(1)).compile()

  def compile_evaluation(self, params: Any, batch_size: int) -> None:
    """Compiles `evaluate` for later calls, without running a collective."""
    self._evaluate.lower(params, self._placed(self.blank(batch_size))).compile()

  def blank(self, batch_size: int) -> Any:
    """Returns zeros in the shape of this process's rows of a batch."""
    return self.task.blank(len(range(batch_size)[self.rows(batch_size)]))

  def _key(self, step: jax.Array) -> jax.Array:
    """Returns the key of a step, which differs between steps and seeds."""
    return jax.random.fold_in(jax.random.key(self._seed), step)

  def _counted(self, step: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(step)
    def counted(*args: Any) -> Any:
      self.traces += 1  # runs when JAX traces, not when the step runs
      return step(*args)

    return counted

  def _differentiate(
    self, params: Any, batch: Any, key: jax.Array
  ) -> tuple[Numbers, Any]:
    """Returns loss and other metrics of a replica, and its gradients."""
    differentiated = jax.value_and_grad(self.task.loss, has_aux=True)
    (loss, others), gradients = differentiated(params, batch, key)
    return {"loss": loss, **others}, gradients

  def _update(
    self,
    params: Any,
    opt_state: Any,
    numbers: Numbers,
    gradients: Any,
    **extra: Any,
  ) -> tuple[Any, Any, Numbers, Numbers]:
    """Ends a step where the axis of the replicas is bound."""
    updates, opt_state = self._tx.update(gradients, opt_state, params, **extra)
    params = optax.apply_updates(params, updates)
    own = {**numbers, **self._skips(opt_state)}
    return params, opt_state, edgc_jax.metrics(opt_state), own

  def _own(self, params: Any, opt_state: Any, mesh: Mesh | None = None) -> Any:
    """Returns where a replica, or each on a mesh, differentiates."""
    if self._is_local:
      return edgc_jax.local_params(params, opt_state, mesh)
    return params

  def _extra(self, own: Any) -> Mapping[str, Any]:
    """Returns what the optimiser takes by name."""
    return {"local_params": own} if self._is_local else {}

  def _skips(self, opt_state: Any) -> Numbers:
    """Returns N times a replica's skipped inner steps: the mean is the sum."""
    states = find(opt_state, LocalStepsState)
    skips = [self.mesh.shape[DATA] * x.skipped.values for x in states]
    return {"skipped_inner_steps": sum(skips)} if skips else {}


def _own_parts(x: jax.Array) -> list[jax.Array]:
  """Returns the numbers of this process's replicas, by replica."""
  # Once each: shards and stages of a replica have the same number.
  parts = {str(part.index): part.data for part in x.addressable_shards}
  return list(parts.values())
