"""Binds the axes of a mesh inside a reducer, where nobody has bound them."""

from typing import Any

import jax
import optax
from jax.core import Tracer
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from edgc_jax import validation
from edgc_jax.leaves import checks as leaf_checks
from edgc_jax.leaves.leaf import (
  arrays_of,
  is_placeholder,
  leaves_in,
  masked_paths,
)
from edgc_jax.leaves.review import reducers_seen, require_over
from edgc_jax.mesh.sharding import (
  axes_of,
  bound_init,
  mesh_here,
  num_replicas,
  require_specs,
  specs_like,
  specs_of,
  specs_of_parts,
)
from edgc_jax.state.state import ReducerState
from edgc_jax.wire import order
from edgc_jax.wire.order import AxisName


def on_mesh(
  tx: optax.GradientTransformation,
  mesh: Mesh | None = None,
  param_specs: Any = None,
  *,
  axis_name: AxisName = "data",
) -> optax.GradientTransformationExtraArgs:
  """Runs a reducer on each device's parts, in a `shard_map` of its own.

  In plain `jax.jit` reducers do so by themselves, on the mesh of
  `jax.set_mesh`. `update` takes gradients of all replicas, stacked along a
  first axis, [N, ...], as `edgc_jax.value_and_grad` returns them, and returns
  their mean, [...]; `init` takes the parameters and returns a state that is
  sharded over the mesh. This wrapper names another mesh, and the specs that no
  type shows, those of parameters that Auto axes shard:

    tx = optax.chain(on_mesh(edgc(), mesh, param_specs), optax.adamw(lr))

  Under `jax.shard_map` over the replicas alone, the compiler has the axes that
  shard the parameters. A reducer would there see whole matrices, and the
  compiler gather what it flattens. The wrapper binds these axes, too: a part of
  a matrix is a matrix, nothing is gathered, and updates and state have the
  shards of the parameters.

    tx = optax.chain(
        on_mesh(edgc("replica"), param_specs=param_specs), optax.adamw(lr))
    how = dict(mesh=mesh, param_specs=param_specs)
    shardings = state_specs(tx, params, "replica", **how)
    specs = state_specs(tx, params, "replica", **how, axis_names={"replica"})
    init = jax.shard_map(
        tx.init, mesh=mesh, in_specs=PartitionSpec(), out_specs=specs,
        axis_names={"replica"})

  Where all axes are bound, it does what `tx` does.

  Args:
    tx: A reducer; under `shard_map` over the replicas alone also a chain that
      begins with one. In a chain, `edgc_jax.clip_by_global_norm` must replace
      optax's, and no link gets extra arguments.
    mesh: The mesh of the training; None takes the one of `jax.set_mesh`.
    param_specs: PartitionSpecs of the parameters, in a tree like them or a
      prefix of it, without the axes of the replicas. None if every device has
      all of them, or types say how they lie, on Explicit axes.
    axis_name: The axis of the replicas, or a tuple of axes, as of `tx`.

  Returns:
    A gradient transformation, with the state of `tx`.

  Raises:
    TypeError: if `tx` is no transformation, or `mesh` no mesh.
    ValueError: if the mesh lacks an axis; where it runs, if no mesh has all
      axes of `param_specs`, gradients are not stacked, or `late_updates` is
      given.
  """
  validation.require_transformation("tx", tx)
  order.require_names("axis_name", axis_name)
  require_specs(param_specs)
  if mesh is not None:
    _require_replicas(mesh, axis_name)
  tx = optax.with_extra_args_support(tx)

  def is_inside() -> bool:
    """Returns whether a `shard_map` or `pmap` runs around it."""
    return param_specs is not None and bool(order.bound_axes())

  def on_all(params: Any, mesh: Any, specs: Any) -> tuple[Any, Any, Any]:
    with reducers_seen() as seen:  # warnings come once, from `init` itself
      found = bound_init(tx, params, mesh, axis_name, specs)
    _require_reducer(found[2])
    require_over(seen, axis_name, "the reducer")
    return found

  def init_fn(params: optax.Params) -> Any:
    if is_inside():
      return _init_inside(tx, params, param_specs)
    here = mesh_here(mesh, axis_name, param_specs)
    if here is None or is_placeholder(params):
      return tx.init(params)
    if mesh is None:
      _require_replicas(here, axis_name)
    _require_all(params)
    leaves_in(params)  # raises if a leaf is not real floating
    specs = specs_of(param_specs, params, here)
    _require_placed(params, here, specs)
    return jax.jit(on_all(params, here, specs)[0])(params)

  def update_fn(
    updates: optax.Updates,
    state: Any,
    params: optax.Params | None = None,
    **extra_args: Any,
  ) -> tuple[optax.Updates, Any]:
    if is_inside():
      return _update_inside(
        tx, param_specs, updates, state, params, **extra_args
      )
    here = mesh_here(mesh, axis_name, param_specs)
    if here is None:
      return tx.update(updates, state, params, **extra_args)
    _require_stacked(updates, params, num_replicas(here, axis_name))
    # `shard_map` would fail first, and say less.
    leaf_checks.require_state(state, ReducerState)
    leaf_checks.require_same_leaves(updates, state.leaves)
    if params is not None:
      leaf_checks.require_same_leaves(params, state.leaves, "params")
    _require_nothing_late(extra_args)
    one = jax.tree.map(
      lambda g: jax.ShapeDtypeStruct(g.shape[1:], g.dtype), updates
    )
    like, skip = (updates, 1) if params is None else (params, 0)
    specs = specs_of(param_specs, like, here, skip)
    _, own, of_state = on_all(one, here, specs)
    stacked = jax.tree.map(lambda s: PartitionSpec(axis_name, *s), own)

    def update_local(updates: Any, state: Any, params: Any) -> tuple[Any, Any]:
      # Or XLA orders the gradients after the loss once for each shape in which
      # they are read. A barrier for each: one over all of them takes each to
      # vary over the axes of any.
      one = jax.tree.map(lambda g: jax.lax.optimization_barrier(g[0]), updates)
      return tx.update(one, state, params)

    update = jax.shard_map(
      update_local,
      mesh=here,
      in_specs=(stacked, of_state, None if params is None else own),
      out_specs=(own, of_state),
    )
    return update(updates, state, params)

  return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _init_inside(tx: Any, params: optax.Params, param_specs: Any) -> Any:
  """Binds the axes that a `shard_map` around leaves to the compiler."""
  axes, specs = _left(params, param_specs)
  if not axes:
    return tx.init(params)
  of_state = specs_of_parts(tx, params, specs, axes)
  init = jax.shard_map(
    tx.init, in_specs=(specs,), out_specs=of_state, axis_names=axes
  )
  return init(params)


def _update_inside(
  tx: Any,
  param_specs: Any,
  updates: optax.Updates,
  state: Any,
  params: optax.Params | None,
  **extra_args: Any,
) -> tuple[optax.Updates, Any]:
  """Binds the axes that a `shard_map` around leaves to the compiler."""
  axes, specs = _left(updates, param_specs)
  if not axes:
    return tx.update(updates, state, params, **extra_args)
  _require_nothing_late(extra_args)
  of_state = specs_of_parts(tx, updates, specs, axes)

  def update_parts(updates: Any, state: Any, params: Any) -> tuple[Any, Any]:
    # The compiler may send parts of any argument before.
    leaves, structure = jax.tree.flatten(updates)
    leaves[:1] = order.in_turn(leaves[:1], (state, params))
    return tx.update(jax.tree.unflatten(structure, leaves), state, params)

  update = jax.shard_map(
    update_parts,
    in_specs=(specs, of_state, None if params is None else specs),
    out_specs=(specs, of_state),
    axis_names=axes,
  )
  return update(updates, state, params)


def _left(tree: Any, param_specs: Any) -> tuple[set[str], Any]:
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


def _require_nothing_late(extra_args: dict[str, Any]) -> None:
  """Raises if a stage's late gradients are given."""
  late = extra_args.get("late_updates")
  validation.require(
    late is None,
    "late_updates",
    late,
    "None where the reducer binds axes itself",
    "use pipeline stages on a mesh whose axes are all bound, with"
    " jax.shard_map",
  )


def _require_reducer(state: Any) -> None:
  """Raises unless a state is that of a reducer alone."""
  validation.require(
    isinstance(state, ReducerState),
    "tx",
    type(state).__name__,
    "a reducer alone where on_mesh binds the replicas, whose state is a"
    " ReducerState",
    "wrap the reducer, optax.chain(on_mesh(reducer, mesh), ...), and give"
    " wrappers such as accumulate the mesh",
  )


def _require_replicas(mesh: Any, axis_name: AxisName) -> None:
  """Warns of a mesh with one replica; raises if it lacks the axis."""
  if num_replicas(mesh, axis_name) == 1:
    validation.warn(
      f"the mesh has one replica along {axis_name!r}, so the reducer sends"
      " nothing and only takes time: leave it out, or name the axis that splits"
      " the batch."
    )


def _require_all(params: Any) -> None:
  """Raises if a mask hides leaves, whose gradients would stay stacked."""
  hidden = masked_paths(params)
  validation.require(
    not hidden,
    "params",
    f"a mask over {', '.join(hidden[:3])}",
    "all parameters for a reducer in plain jax.jit: gradients that pass it by"
    " would keep their axis of replicas, and grow the parameters",
    "put the reducer first, optax.chain(reducer, optax.partition(...)), or"
    " differentiate the trained parameters alone, with"
    " edgc_jax.value_and_grad(loss_fn, mesh, in_axes=(None, 0)) and the frozen"
    " ones as an argument",
  )


def _require_placed(params: Any, mesh: Any, specs: Any) -> None:
  """Raises if parameters lie on the mesh otherwise than their specs say."""
  found = jax.tree_util.tree_leaves_with_path(params)
  for (path, x), spec in zip(found, jax.tree.leaves(specs), strict=True):
    where = getattr(x, "sharding", None)
    if isinstance(x, Tracer):
      continue
    if not isinstance(where, NamedSharding):
      # `shard_map` over such axes takes only arrays whose types name them.
      validation.require(
        AxisType.Explicit not in mesh.axis_types or not any(spec),
        "params",
        f"one at {jax.tree_util.keystr(path)} that does not",
        "parameters that lie on the mesh as `param_specs` say, since an axis of"
        " it is Explicit",
        "place them with jax.device_put first",
      )
      continue
    validation.require(
      where.mesh.abstract_mesh != getattr(mesh, "abstract_mesh", mesh)
      or where.is_equivalent_to(NamedSharding(where.mesh, spec), x.ndim),
      "param_specs",
      spec,
      f"the spec of the parameter at {jax.tree_util.keystr(path)}, which lies"
      f" on the mesh as {where.spec}",
      "pass the specs with which you place the parameters",
    )


def _require_stacked(updates: Any, params: Any, replicas: int) -> None:
  """Raises unless gradients have a first axis of replicas."""
  shapes = [None] * len(jax.tree.leaves(updates))
  if params is not None:
    shapes = [p.shape for p in jax.tree.leaves(arrays_of(params))]
  gradients = jax.tree_util.tree_leaves_with_path(updates)
  if len(gradients) != len(shapes):
    return  # `tx.update` names the missing leaf
  for (path, gradient), shape in zip(gradients, shapes, strict=True):
    got = tuple(jax.numpy.shape(gradient))
    is_stacked = got[:1] == (replicas,) and shape in (None, got[1:])
    place = jax.tree_util.keystr(path) or "the root"
    wanted = "..." if shape is None else ", ".join(map(str, shape))
    validation.require(
      is_stacked,
      "updates",
      got,
      f"gradients of all {replicas} replicas, stacked as [{replicas}, {wanted}]"
      f" at {place}, in plain jax.jit",
      "differentiate with edgc_jax.value_and_grad, put the"
      " reducer first in the chain, clip and scale after it, and accumulate by"
      " edgc_jax.accumulate, not optax.MultiSteps",
    )
