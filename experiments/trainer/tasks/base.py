"""What a trainer has to know of a model and its data."""

import abc
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import grain
import jax
import numpy as np
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

Metrics = Mapping[str, jax.Array]


class Source(NamedTuple):
  """The data of a task: a short name for reports, and a hash of it all."""

  name: str
  sha256: str


class Layout(NamedTuple):
  """The parameters of a model on a mesh.

  Attributes:
    init: Draws the global arrays from a key.
    shapes: Of the global arrays.
    specs: Their PartitionSpecs.
  """

  init: Callable[[jax.Array], Any]
  shapes: Any
  specs: Any

  def of_one_device(self, mesh_shape: Mapping[str, int]) -> Any:
    """Returns the shapes of one device's parts."""
    mesh = AbstractMesh(tuple(mesh_shape.values()), tuple(mesh_shape))

    def local(leaf: Any, spec: PartitionSpec) -> jax.ShapeDtypeStruct:
      shape = NamedSharding(mesh, spec).shard_shape(leaf.shape)
      return jax.ShapeDtypeStruct(shape, leaf.dtype)

    return jax.tree.map(local, self.shapes, self.specs)


class Task(abc.ABC):
  """A model with its loss and data.

  Attributes:
    version: Raised when the same configuration gives other results; records of
      runs hold it.
    metrics: What `evaluate` measures, and which end is better: min or max.
    axes: Further axes of a mesh that the task can run on: "stage", "tensor",
      "fsdp".
    unit: What a row consists of, such as tokens.
    units_per_row: Number of them.
    row: Types of one row of a batch, a tree of `jax.ShapeDtypeStruct`.
    source: The data.
  """

  version: int = 1
  metrics: Mapping[str, str] = {"loss": "min"}
  axes: frozenset[str] = frozenset()
  unit: str = "rows"
  units_per_row: int = 1
  row: Any
  source: Source

  @abc.abstractmethod
  def init(self, key: jax.Array) -> Any:
    """Draws float32 parameters."""

  @abc.abstractmethod
  def loss(
    self, params: Any, batch: Any, key: jax.Array
  ) -> tuple[jax.Array, Metrics]:
    """Returns the loss to differentiate, and other metrics to log.

    Args:
      params: As from `init`.
      batch: Rows: arrays with a first axis of rows.
      key: For dropout and augmentation; another in each step and replica.

    Returns:
      The mean over the rows, float32 [], and means of other metrics by name.
    """

  @abc.abstractmethod
  def evaluate(self, params: Any, batch: Any) -> Metrics:
    """Returns the means over the rows of all `metrics`, without any noise."""

  @abc.abstractmethod
  def train_batches(
    self, batch_size: int, seed: int, rows: slice
  ) -> grain.DatasetIterator:
    """Returns an endless iterator over these rows of shuffled batches."""

  @abc.abstractmethod
  def held_out_batches(
    self, batch_size: int, num_batches: int
  ) -> Iterable[Any]:
    """Returns at most so many batches to evaluate, the same in every run."""

  def layout(self, mesh_shape: Mapping[str, int]) -> Layout:
    """Returns the layout of the parameters on a mesh of these axes."""
    del mesh_shape
    shapes = jax.eval_shape(self.init, jax.random.key(0))
    specs = jax.tree.map(lambda _: PartitionSpec(), shapes)
    return Layout(self.init, shapes, specs)

  def blank(self, rows: int) -> Any:
    """Returns a batch of zeros."""
    return jax.tree.map(
      lambda leaf: np.zeros((rows, *leaf.shape), leaf.dtype), self.row
    )


class StagedTask(Task):
  """A task whose model can be cut into pipeline stages.

  Its loss must not draw random numbers.
  """

  @abc.abstractmethod
  def placement(self, path: str, shape: tuple[int, ...]) -> str:
    """Returns where a parameter lies, as for `edgc_jax.Stages`."""

  @abc.abstractmethod
  def staged_loss(
    self, num_microbatches: int, params: Any, batch: Any
  ) -> jax.Array:
    """Returns the loss on one stage's part of the parameters."""

  @abc.abstractmethod
  def staged_value_and_grad(
    self, num_microbatches: int, params: Any, batch: Any
  ) -> tuple[jax.Array, Any, Callable]:
    """Returns loss, gradients, and `late_updates` of a reducer's `update`."""

  @abc.abstractmethod
  def stage_of(
    self, mesh_shape: Mapping[str, int], rows: int
  ) -> tuple[Callable[[Any, jax.Array], jax.Array], Any, jax.Array]:
    """Returns one stage's function, parameters and inputs, to time it.

    Args:
      mesh_shape: Size of each axis of the mesh.
      rows: Rows of a microbatch.
    """
