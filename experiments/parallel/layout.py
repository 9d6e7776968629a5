"""The parameters of a model on a mesh: how they are made and divided."""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
from jax.sharding import PartitionSpec

from experiments.models import gpt2, gpt2_shards, gpt2_stages
from experiments.models.gpt2 import GPT2Config
from experiments.parallel.meshes import SHARD, STAGE


class Layout(NamedTuple):
  """The parameters of a model on a mesh."""

  init: Callable[[jax.Array], Any]  # draws the global arrays from a key
  shapes: Any  # of the global arrays
  specs: Any  # their PartitionSpecs


def of_params(model: GPT2Config, mesh_shape: Mapping[str, int]) -> Layout:
  """Returns the layout of a model's parameters.

  Args:
    model: Sizes of the model.
    mesh_shape: Size of each axis of the mesh.
  """
  if STAGE in mesh_shape:
    init = functools.partial(gpt2_stages.init_params, model, mesh_shape[STAGE])
    shapes = jax.eval_shape(init, jax.random.key(0))
    return Layout(init, shapes, gpt2_stages.param_specs(shapes))
  init = functools.partial(gpt2.init_params, model)
  shapes = gpt2.param_shapes(model)
  if SHARD in mesh_shape:
    specs = gpt2_shards.param_specs(shapes, mesh_shape[SHARD])
  else:
    specs = jax.tree.map(lambda _: PartitionSpec(), shapes)
  return Layout(init, shapes, specs)


def of_one_device(model: GPT2Config, mesh_shape: Mapping[str, int]) -> Any:
  """Returns the shapes of one device's parameters; arguments as above."""

  def local(leaf: Any, spec: PartitionSpec) -> jax.ShapeDtypeStruct:
    shape = list(leaf.shape)
    for i, axis in enumerate(spec):
      shape[i] //= mesh_shape[axis] if axis else 1
    return jax.ShapeDtypeStruct(tuple(shape), leaf.dtype)

  layout = of_params(model, mesh_shape)
  return jax.tree.map(local, layout.shapes, layout.specs)
