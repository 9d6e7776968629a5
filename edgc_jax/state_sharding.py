"""Where optimiser state lives on a mesh: the one place that knows.

Two classes of state: what each replica has for itself (residuals, sums of
`accumulate`), sharded over the replicas on its first axis, and all the rest,
equal on every replica. A residual of a leaf [m, n] is [m, n] locally and
[N m, n] as a global array on N replicas.
"""

from typing import Any

import jax
import optax
from jax.sharding import PartitionSpec

from edgc_jax.low_rank import LowRankState
from edgc_jax.wrappers import AccumulateState

# Per kind of state, the fields that each replica has for itself.
_PER_REPLICA = {LowRankState: "residual", AccumulateState: "accumulated"}


def state_specs(
  tx: optax.GradientTransformation,
  params: Any,
  axis_name: str = "data",
) -> Any:
  """PartitionSpecs of an optimiser state under `jax.shard_map`.

  Make the state with them, then pass them as specs of the train step (the
  axes of `jax.make_mesh` are Explicit unless it is told otherwise, and
  `shard_map` then wants its inputs placed already):

    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
    specs = state_specs(tx, params)
    init = jax.shard_map(
        tx.init, mesh=mesh, in_specs=PartitionSpec(), out_specs=specs)
    opt_state = jax.jit(init)(params)

  Args:
    tx: Any optax transformation, with or without reducers of this package.
    params: Parameters or their `jax.ShapeDtypeStruct`s.
    axis_name: The mesh axis of the replicas.

  Returns:
    A tree like `tx.init(params)`, of PartitionSpecs.
  """

  def specs(state: Any) -> Any:
    own = _PER_REPLICA.get(type(state))
    if own is None:
      return PartitionSpec()
    parts = {name: walk(value) for name, value in state._asdict().items()}
    parts[own] = jax.tree.map(
      lambda _: PartitionSpec(axis_name), getattr(state, own)
    )
    return type(state)(**parts)

  def walk(tree: Any) -> Any:
    return jax.tree.map(specs, tree, is_leaf=lambda x: type(x) in _PER_REPLICA)

  return walk(jax.eval_shape(tx.init, params))
