"""GPT-2 with parameters sharded within each replica (FSDP).

Every device of a replica stores a part of each large parameter, and reads its
own rows of the batch. The compiler gathers the parameters, and sums their
gradients over the shards.
"""

from typing import Any

import jax
from jax.sharding import PartitionSpec

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
