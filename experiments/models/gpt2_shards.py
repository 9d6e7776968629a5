"""GPT-2 with parameters sharded within each replica (FSDP).

Every device of a replica stores a part of each large parameter, and reads its
own rows of the batch. A step gathers the parameters, and its backward pass
sums their gradients over the shards and scatters them, so that each device has
the mean gradient of its part:

  loss of the replica = mean over shards of the loss of their rows
"""

from typing import Any

import jax
from jax import lax
from jax.sharding import PartitionSpec

from experiments.models import gpt2
from experiments.models.gpt2 import GPT2Config

AXIS = "fsdp"
_LEAST = 2**12  # entries; smaller parameters are whole on every device


def param_specs(shapes: Any, shards: int) -> Any:
  """Returns the PartitionSpecs of the parameters.

  Shards the last dimension that the number of shards divides, except for the
  first dimension of a stack of layers.

  Args:
    shapes: Shapes of the parameters, from `gpt2.param_shapes`.
    shards: Number of devices of a replica.
  """

  def spec(leaf: jax.ShapeDtypeStruct) -> PartitionSpec:
    sides = range(leaf.ndim - 1, leaf.ndim - 3, -1)
    for side in sides:
      if leaf.ndim > 1 and leaf.size >= _LEAST and leaf.shape[side] % shards == 0:
        return PartitionSpec(*[None] * side, AXIS)
    return PartitionSpec()

  return jax.tree.map(spec, shapes)


def loss_fn(
  config: GPT2Config, specs: Any, params: Any, batch: jax.Array
) -> jax.Array:
  """Returns a device's part of the loss of its replica.

  The sum over the shards is the mean loss of the replica's rows, and the
  gradient of a part is the gradient of that mean.

  Args:
    config: Sizes of the model.
    specs: From `param_specs`.
    params: The device's parts.
    batch: int32 [rows, time + 1], the device's rows.
  """

  def whole(part: jax.Array, spec: PartitionSpec) -> jax.Array:
    if AXIS not in spec:
      return part
    return lax.all_gather(part, AXIS, axis=tuple(spec).index(AXIS), tiled=True)

  gathered = jax.tree.map(whole, params, specs)
  return gpt2.loss_fn(config, gathered, batch) / lax.axis_size(AXIS)
