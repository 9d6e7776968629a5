"""Computes the PartitionSpecs of optimiser state on a mesh.

The first axis of an array is sharded over these axes of the mesh:

  local to a replica   residuals, sums of `accumulate`         data
  local to a stage     controller, allocator, factors,         stage
                       statistics
  the same everywhere  counters                                none

On pipeline stages residuals are sharded over both axes, and state that mirrors
the parameters, such as Adam's moments, is sharded like the parameters. A
residual of a leaf [m, n] is [m, n] locally; as a global array it is [N m, n] on
N replicas, and [S N m, n] on S stages of N replicas.
"""

from typing import Any

import jax
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from edgc_jax import validation
from edgc_jax.compression.base import ExchangeState
from edgc_jax.state.base import AccumulateState, ReducerState


def state_specs(
  tx: optax.GradientTransformation,
  params: Any,
  axis_name: str = "data",
  *,
  mesh: Mesh | None = None,
  param_specs: Any = None,
  stage_axis: str = "stage",
) -> Any:
  """Returns the PartitionSpecs of an optimiser state under `jax.shard_map`.

  Create the state with them, then pass them as specs of the train step. (The
  axes of `jax.make_mesh` are Explicit by default, and `shard_map` then requires
  inputs that are placed already.)

    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
    specs = state_specs(tx, params)
    init = jax.shard_map(
        tx.init, mesh=mesh, in_specs=PartitionSpec(), out_specs=specs)
    opt_state = jax.jit(init)(params)

  Args:
    tx: Any optax transformation, with or without reducers of this package. On
      stages, state that mirrors the parameters is recognised by their paths and
      shapes; state of other shapes, such as Adafactor's, is not.
    params: Parameters or their `jax.ShapeDtypeStruct`s: the global arrays, not
      one stage's part.
    axis_name: The mesh axis of the replicas.
    mesh: The mesh; needed with `param_specs`.
    param_specs: PartitionSpecs of the parameters, in a tree like them, if they
      are sharded over pipeline stages; None if every device has all of them.
    stage_axis: The mesh axis of the stages.

  Returns:
    A tree like `tx.init(params)`, of PartitionSpecs.

  Raises:
    ValueError: if `param_specs` is given without a mesh, or the mesh lacks one
      of the axes.
  """
  by_path = {}
  if param_specs is not None:
    validation.require(
      mesh is not None,
      "mesh",
      mesh,
      "given with `param_specs`",
      "pass the mesh of shard_map",
    )
    for name, axis in (("axis_name", axis_name), ("stage_axis", stage_axis)):
      validation.require(
        axis in mesh.shape,
        name,
        axis,
        f"an axis of the mesh {dict(mesh.shape)}",
        "pass the name of an axis of the mesh",
      )
    params = jax.tree.map(
      lambda p, spec: jax.ShapeDtypeStruct(
        NamedSharding(mesh, spec).shard_shape(p.shape), p.dtype
      ),
      params,
      param_specs,
    )
    shapes = jax.tree_util.tree_leaves_with_path(params)
    by_path = {
      path: (leaf.shape, spec)
      for (path, leaf), spec in zip(
        shapes, jax.tree.leaves(param_specs), strict=True
      )
    }

  def mirrored(path: tuple, leaf: Any) -> PartitionSpec:
    """Returns the spec of the parameter that `leaf` mirrors, if there is one.

    The path of the leaf ends in the path of that parameter.
    """
    for start in range(len(path) + 1):
      shape, spec = by_path.get(path[start:], (None, None))
      if shape == leaf.shape:
        return spec
    return PartitionSpec()

  def everywhere(tree: Any, *axes: str) -> Any:
    spec = PartitionSpec(axes if len(axes) > 1 else axes[0])
    return jax.tree.map(lambda _: spec, tree)

  def sums(path: tuple, leaf: Any) -> PartitionSpec:
    """Returns the spec of a gradient sum: over replicas, and its own stages."""
    del leaf
    _, spec = by_path.get(path, (None, ()))
    if stage_axis in jax.tree.leaves(tuple(spec)):
      return PartitionSpec((stage_axis, axis_name))
    return PartitionSpec(axis_name)

  def of_reducer(state: ReducerState) -> ReducerState:
    common = jax.tree.map(lambda _: PartitionSpec(), state)
    is_staged = state.stats.rank.ndim > state.count.ndim
    own = (stage_axis,) if is_staged else ()
    residual = everywhere(state.exchange.residual, *own, axis_name)
    if not is_staged:
      return common._replace(
        exchange=common.exchange._replace(residual=residual)
      )
    controller = common.controller
    if controller:
      controller = everywhere(state.controller, stage_axis)
      controller = controller._replace(lead_rung=PartitionSpec())
    return common._replace(
      controller=controller,
      allocator=everywhere(state.allocator, stage_axis),
      stats=everywhere(state.stats, stage_axis),
      exchange=ExchangeState(
        everywhere(state.exchange.factor_q, stage_axis),
        residual,
      ),
    )

  def specs(path: tuple, state: Any) -> Any:
    if isinstance(state, ReducerState):
      return of_reducer(state)
    if isinstance(state, AccumulateState):
      return AccumulateState(
        PartitionSpec(),
        jax.tree_util.tree_map_with_path(sums, state.accumulated),
        walk(state.inner_state),
      )
    return mirrored(path, state)

  def walk(tree: Any) -> Any:
    kinds = (ReducerState, AccumulateState)
    return jax.tree_util.tree_map_with_path(
      specs, tree, is_leaf=lambda x: isinstance(x, kinds)
    )

  return walk(jax.eval_shape(tx.init, params))
