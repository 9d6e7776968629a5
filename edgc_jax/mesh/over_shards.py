"""Runs a chain on each device's part of what the compiler shards."""

from typing import Any

import jax
import optax

from edgc_jax import validation
from edgc_jax.mesh.sharding import axes_of, specs_like, specs_of_parts
from edgc_jax.wire import order


def over_shards(
  tx: optax.GradientTransformation, param_specs: Any
) -> optax.GradientTransformationExtraArgs:
  """Runs a transformation on each device's own parts of sharded parameters.

  For `jax.shard_map` over the replicas alone, which leaves the axes that shard
  the parameters to the compiler. A reducer there sees whole matrices, and the
  compiler would gather what it flattens. Inside this wrapper these axes are
  bound, too, in a `shard_map` of its own: a part of a matrix is a matrix,
  nothing is gathered, and updates and state have the shards of the parameters.

    tx = optax.chain(over_shards(edgc("replica"), param_specs), optax.adamw(lr))
    how = dict(mesh=mesh, param_specs=param_specs)
    shardings = state_specs(tx, params, "replica", **how)
    specs = state_specs(tx, params, "replica", **how, axis_names={"replica"})
    init = jax.shard_map(
        tx.init, mesh=mesh, in_specs=PartitionSpec(), out_specs=specs,
        axis_names={"replica"})

  Where the axes are bound already it does nothing.

  Args:
    tx: A reducer, or a chain that begins with one. In a chain,
      `edgc_jax.clip_by_global_norm` must replace optax's, and no link gets
      extra arguments.
    param_specs: PartitionSpecs of the parameters, in a tree like them or a
      prefix of it, without the axes of the replicas.

  Returns:
    A gradient transformation, with the state of `tx`.

  Raises:
    TypeError: if `tx` is no transformation.
    ValueError: where it runs, if no enclosing `shard_map` has a mesh with all
      axes of `param_specs`, or `late_updates` is given.
  """
  validation.require_transformation("tx", tx)
  tx = optax.with_extra_args_support(tx)

  def inside(tree: Any) -> tuple[set[str], Any]:
    """Returns all axes that are not bound, and the specs of a tree."""
    specs = specs_like(param_specs, tree)
    mesh = jax.sharding.get_abstract_mesh()  # without axes outside of one
    axes = axes_of(specs)
    validation.require(
      axes <= set(mesh.axis_names),
      "param_specs",
      sorted(axes),
      f"specs over the axes of an enclosing mesh ({mesh.axis_names})",
      "call init and update inside jax.shard_map over the replicas, and pass"
      " describe and state_specs the mesh and param_specs",
    )
    return set(mesh.axis_names) - set(mesh.manual_axes), specs

  def init_fn(params: optax.Params) -> Any:
    axes, specs = inside(params)
    if not axes:
      return tx.init(params)
    own = specs_of_parts(tx, params, specs, axes)
    init = jax.shard_map(
      tx.init, in_specs=(specs,), out_specs=own, axis_names=axes
    )
    return init(params)

  def update_fn(
    updates: optax.Updates,
    state: Any,
    params: optax.Params | None = None,
    **extra_args: Any,
  ) -> tuple[optax.Updates, Any]:
    axes, specs = inside(updates)
    if not axes:
      return tx.update(updates, state, params, **extra_args)
    validation.require(
      extra_args.get("late_updates") is None,
      "late_updates",
      extra_args.get("late_updates"),
      "None under `over_shards`",
      "use pipeline stages on a mesh whose axes are all bound",
    )
    own = specs_of_parts(tx, updates, specs, axes)

    def update_parts(updates: Any, state: Any, params: Any) -> tuple[Any, Any]:
      # The compiler may send parts of any argument before.
      leaves, structure = jax.tree.flatten(updates)
      leaves[:1] = order.in_turn(leaves[:1], (state, params))
      return tx.update(jax.tree.unflatten(structure, leaves), state, params)

    update = jax.shard_map(
      update_parts,
      in_specs=(specs, own, None if params is None else specs),
      out_specs=(specs, own),
      axis_names=axes,
    )
    return update(updates, state, params)

  return optax.GradientTransformationExtraArgs(init_fn, update_fn)
