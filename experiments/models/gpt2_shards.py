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

  Shards the longer side of each large matrix that the number of shards divides:
  F shards of [m, n] send r (F m + n) values at rank r if they share n.

  Args:
    shapes: Shapes of the parameters, from `gpt2.param_shapes`.
    shards: F, the number of devices of a replica.
  """

  def spec(leaf: jax.ShapeDtypeStruct) -> PartitionSpec:
    if leaf.ndim < 2 or leaf.size < _LEAST:
      return PartitionSpec()
    sides = [-2, -1] if leaf.shape[-2] > leaf.shape[-1] else [-1, -2]
    for side in sides:
      if leaf.shape[side] % shards == 0:
        return PartitionSpec(*[None] * (leaf.ndim + side), AXIS)
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
    if AXIS not in spec:  # its gradient is summed over the shards
      return lax.pcast(part, AXIS, to="varying")
    return lax.all_gather(part, AXIS, axis=tuple(spec).index(AXIS), tiled=True)

  gathered = jax.tree.map(whole, params, specs)
  return gpt2.loss_fn(config, gathered, batch) / lax.axis_size(AXIS)
