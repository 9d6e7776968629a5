"""Computes the PartitionSpecs of optimiser state on a mesh.

Arrays differ over these axes of the mesh:

  local to a replica   residuals, sums of `accumulate`, own    data
                       parameters of `local_steps`
  local to a stage     the rank, and what else a budget        stage
                       decides
  local to a stage     budget, allocation, factors,            stage
    or a shard         other statistics                        shards
  the same everywhere  counters, the rank of stage 0           none

State that mirrors the parameters, such as Adam's moments, is sharded like them.
What is local to a replica is [1, *shape] on a device, and [N, *shape] as a
global array of N replicas; its other axes are sharded like the parameter's.
Factors are sharded along their first axis, which counts matrices.
"""

import functools
import math
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import (
  AbstractMesh,
  AxisType,
  Mesh,
  NamedSharding,
  PartitionSpec,
)

from edgc_jax import validation
from edgc_jax.leaves.leaf import (
  LeafState,
  arrays_of,
  is_leaf_state,
  is_variable,
)
from edgc_jax.state.metrics import find
from edgc_jax.state.state import (
  PerReplica,
  ReducerState,
  map_parts,
  parts_of,
)
from edgc_jax.wire import collectives, order
from edgc_jax.wire.order import AxisName, is_bound, names, varying_axes


def state_specs(
  tx: Any,
  params: Any,
  axis_name: AxisName = "data",
  *,
  mesh: Mesh | AbstractMesh | None = None,
  param_specs: Any = None,
  stage_axis: str = "stage",
  axis_names: Collection[str] | None = None,
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

  If parameters are sharded, over pipeline stages or within a replica, pass the
  mesh and their specs, and `in_specs=(param_specs,)` to `shard_map`. If
  `shard_map` leaves some axes to the compiler, pass its `axis_names`, too: the
  specs of `shard_map` name those axes alone. Without `axis_names` they are the
  shardings of the global arrays.

  Args:
    tx: Any optax transformation, with or without reducers of this package. If
      parameters are sharded, state that mirrors them is recognised by paths and
      shapes; state of other shapes, such as Adafactor's, is not. Or an
      optimiser of Flax NNX (as `jax.eval_shape` returns it, too): the specs are
      then in a tree like it.
    params: Parameters or their `jax.ShapeDtypeStruct`s: the global arrays, not
      one device's part. Leaves that are no arrays, such as the functions of an
      Equinox model, are left out.
    axis_name: The mesh axis of the replicas, or a tuple of axes, as given to
      the reducer.
    mesh: The mesh, to check names of axes; needed with `param_specs`.
    param_specs: PartitionSpecs of the parameters, in a tree like them or a
      prefix of it, if they are sharded; None if every device has all of them.
    stage_axis: The mesh axis of the stages, if there are any.
    axis_names: Keeps only these axes in the specs; None keeps all.

  Returns:
    A tree like `tx.init(params)`, of PartitionSpecs.

  Raises:
    TypeError: if `tx` is no transformation, or `mesh` no mesh.
    ValueError: if `param_specs` is given without a mesh, has another structure
      or does not divide the parameters, the mesh lacks one of the axes, or
      parameters are sharded over the replicas.
  """
  if mesh is not None:
    require_axes(mesh, "axis_name", axis_name)
  else:
    order.require_names("axis_name", axis_name)
  params = arrays_of(params)
  if hasattr(tx, "opt_state"):  # of NNX; all else that it holds is replicated
    how = {"mesh": mesh, "param_specs": param_specs, "stage_axis": stage_axis}
    own = state_specs(tx.tx, params, axis_name, **how, axis_names=axis_names)
    specs = jax.tree.map(lambda _: PartitionSpec(), tx)
    specs.opt_state = jax.tree.unflatten(
      jax.tree.structure(specs.opt_state), jax.tree.leaves(own)
    )
    return specs
  validation.require_transformation("tx", tx)
  if param_specs is None:
    specs = _Specs(axis_name, stage_axis, {})
    return _only(specs.of(jax.eval_shape(tx.init, params)), axis_names)
  require_not_split(param_specs, axis_name)
  by_path, state = traced_init(tx, params, mesh, param_specs)
  if any(parts_of(reducer).stages for reducer in find(state, ReducerState)):
    require_axes(mesh, "stage_axis", stage_axis)
  return _only(_Specs(axis_name, stage_axis, by_path).of(state), axis_names)


def state_axes(
  tx: optax.GradientTransformation, params: Any, axis_name: AxisName = "data"
) -> Any:
  """Returns the axes of an optimiser state under `jax.vmap`.

  For replicas that `vmap` simulates on one device. A part that is equal on all
  replicas is kept once, and conditions on it run one branch:

    axes = state_axes(tx, params)
    init = jax.vmap(
        tx.init, in_axes=None, out_axes=axes, axis_name="data", axis_size=8)
    update = jax.vmap(
        tx.update, in_axes=(0, axes, None), out_axes=(None, axes),
        axis_name="data")

  Args:
    tx: Any optax transformation, with reducers of this package over
      `axis_name`.
    params: Parameters or their `jax.ShapeDtypeStruct`s.
    axis_name: The name of the axis that `vmap` binds.

  Returns:
    A tree like `tx.init(params)`: 0 for residuals, sums of `accumulate` and own
    parameters of `local_steps`, which each replica has for itself, along a new
    first axis; None for all else.
  """
  own = set(names(axis_name))
  return jax.tree.map(
    lambda spec: 0 if own & set(_axes_of(spec)) else None,
    state_specs(tx, params, axis_name),
  )


def traced_init(
  tx: optax.GradientTransformation,
  params: Any,
  mesh: Mesh | AbstractMesh | None,
  param_specs: Any,
) -> tuple[dict[tuple[Any, ...], tuple[Any, ...]], Any]:
  """Traces `init` on one device's parts; arguments as for `state_specs`.

  Returns:
    Local shape and spec of each parameter by path, and the types of the state.

  Raises:
    ValueError: if there is no mesh.
  """
  validation.require(
    mesh is not None,
    "mesh",
    mesh,
    "given with `param_specs`",
    "pass the mesh of shard_map",
  )
  own = specs_like(param_specs, params)
  _require_fit(own, params, mesh)
  return _types(tx, params, own, mesh=mesh)


def specs_of_parts(
  tx: optax.GradientTransformation,
  params: Any,
  param_specs: Any,
  axis_names: Collection[str],
) -> Any:
  """Returns the specs of a state over axes that are left to the compiler.

  Call it inside `jax.shard_map` over the other axes.

  Args:
    tx: Any optax transformation.
    params: Parameters, or gradients.
    param_specs: Their specs, in a tree like them.
    axis_names: The axes.
  """
  by_path, state = _types(tx, params, param_specs, axis_names=set(axis_names))
  return _only(_Specs((), "", by_path).of(state), axis_names)


def bound_init(
  tx: optax.GradientTransformation,
  params: Any,
  mesh: Mesh,
  axis_name: AxisName,
  param_specs: Any,
  stage_axis: str = "stage",
) -> tuple[Callable[[Any], Any], Any, Any]:
  """Binds the axes of a mesh in `init`; arguments as for `state_specs`.

  Returns:
    A function that creates the global state; the specs of the parameters, in a
    tree like them; and the specs of the state.
  """
  require_axes(mesh, "axis_name", axis_name)
  own = specs_like(param_specs, params)
  of_state = state_specs(
    tx,
    params,
    axis_name,
    mesh=mesh,
    param_specs=param_specs,
    stage_axis=stage_axis,
  )
  init = jax.shard_map(tx.init, mesh=mesh, in_specs=(own,), out_specs=of_state)
  return init, own, of_state


def given_or_set(mesh: Any, ambient: Callable[[], Any]) -> Any:
  """Returns a mesh, or if it is None the one of `jax.set_mesh`.

  Args:
    mesh: The mesh.
    ambient: Returns the one that is set, as JAX's devices or abstract.

  Raises:
    ValueError: if none is given or set.
  """
  if mesh is not None:
    return mesh
  found = ambient()
  validation.require(
    bool(found.axis_names),
    "mesh",
    None,
    "given, or set before",
    "pass it, or call jax.set_mesh(mesh)",
  )
  return found


def mesh_here(mesh: Any, axis_name: AxisName, param_specs: Any = None) -> Any:
  """Returns the mesh over which an axis has to be bound; None if it is.

  Args:
    mesh: The mesh; None takes the one of `jax.set_mesh`, if it has the axis.
    axis_name: The axis of the replicas, or a tuple of axes.
    param_specs: The specs of the parameters.

  Raises:
    ValueError: if there are specs, but no mesh.
  """
  if mesh is not None:
    return None if is_bound(axis_name) else mesh
  here = jax.sharding.get_abstract_mesh()
  has_all = set(names(axis_name)) <= set(here.axis_names)
  is_free = not order.bound_axes() and not collectives.has_axis(axis_name)
  is_ambient = has_all and is_free
  validation.require(
    is_ambient or param_specs is None,
    "param_specs",
    param_specs,
    "None without a mesh",
    "call jax.set_mesh first, or leave them out if shard_map binds the axes",
  )
  return here if is_ambient else None


def specs_of(param_specs: Any, tree: Any, mesh: Any, skip: int = 0) -> Any:
  """Returns the specs of parameters, in a tree like them.

  Args:
    param_specs: The specs, or a prefix of them. None takes those of the types,
      which have them if an axis of the mesh is Explicit.
    tree: The parameters, or arrays with `skip` axes more in front.
    mesh: The mesh of the training.
    skip: Number of these axes.
  """
  if param_specs is not None or AxisType.Explicit not in mesh.axis_types:
    return specs_like(param_specs, tree)

  def of_type(x: Any) -> PartitionSpec:
    where = getattr(jax.typeof(x), "sharding", None)
    return PartitionSpec(*(where.spec[skip:] if where else ()))

  return jax.tree.map(of_type, tree)


def num_replicas(mesh: Any, axis_name: AxisName) -> int:
  """Returns the number of replicas along one axis or several.

  Raises:
    ValueError: if the mesh lacks an axis.
  """
  require_axes(mesh, "axis_name", axis_name)
  return math.prod(mesh.shape[axis] for axis in names(axis_name))


def require_mesh(mesh: Any, axis_name: AxisName, param_specs: Any) -> None:
  """Raises if a wrapper's specs are none, or its mesh lacks an axis."""
  require_specs(param_specs)
  if mesh is not None:
    require_axes(mesh, "axis_name", axis_name)


def start_on_mesh(
  start: Callable[[Any, int], Any],
  params: Any,
  specs: Any,
  mesh: Mesh,
  axis_name: AxisName,
) -> Any:
  """Creates arrays of all replicas, [N, *shape], each part on its devices.

  Args:
    start: From the parameters and N to the arrays.
    params: The parameters.
    specs: The PartitionSpecs of `shape`, in a tree like the arrays.
    mesh: The mesh of the training.
    axis_name: The axis of the replicas, or a tuple of axes.
  """

  def place(spec: PartitionSpec) -> Any:
    spec = PartitionSpec(axis_name, *spec)
    # JAX knows the mesh of `jax.set_mesh`; naming it hides specs in `jax.jit`.
    return spec if isinstance(mesh, AbstractMesh) else NamedSharding(mesh, spec)

  shardings = jax.tree.map(place, specs)

  def typed(params: Any, count: int) -> Any:
    found = start(params, count)
    if set(mesh.axis_types) == {AxisType.Explicit}:
      return jax.tree.map(jax.sharding.reshard, found, shardings)
    return found

  on_mesh = jax.jit(typed, static_argnums=1, out_shardings=shardings)
  return on_mesh(params, num_replicas(mesh, axis_name))


def specs_like(param_specs: Any, params: Any) -> Any:
  """Returns the specs in a tree like the parameters, given a prefix of it.

  None stands for parameters that every device has whole.
  """
  if param_specs is None:
    param_specs = PartitionSpec()
  require_specs(param_specs)
  try:
    return jax.tree.map(
      lambda spec, part: jax.tree.map(lambda _: _bare(spec), part),
      param_specs,
      params,
    )
  except ValueError as error:  # of another structure
    raise ValueError(
      "`param_specs` must be a tree like the parameters or a prefix of it, got"
      f" {jax.tree.structure(param_specs)} for {jax.tree.structure(params)};"
      " give a PartitionSpec for each array, or one for all."
    ) from error


def require_not_split(param_specs: Any, axis_name: AxisName) -> None:
  """Raises if specs shard parameters over the replicas."""
  require_specs(param_specs)
  split = axes_of(param_specs)
  validation.require(
    not split & set(names(axis_name)),
    "param_specs",
    sorted(split),
    f"specs without the axes of the replicas, {axis_name!r}",
    "every replica holds all parameters; shard them over other axes",
  )


def require_specs(param_specs: Any) -> None:
  """Raises unless the leaves of a tree are PartitionSpecs."""
  for path, spec in jax.tree_util.tree_leaves_with_path(param_specs):
    validation.require(
      isinstance(_bare(spec), PartitionSpec),
      "param_specs",
      spec,
      f"PartitionSpecs, at {jax.tree_util.keystr(path) or 'the root'}",
      "pass jax.sharding.PartitionSpec() for what every device has whole",
    )


def _require_fit(specs: Any, params: Any, mesh: Any) -> None:
  """Raises unless a mesh divides parameters as their specs say.

  Args:
    specs: PartitionSpecs in a tree like the parameters.
    params: The parameters.
    mesh: The mesh.
  """
  if axes := axes_of(specs):
    require_axes(mesh, "param_specs", tuple(sorted(axes)))
  leaves = jax.tree_util.tree_leaves_with_path(params)
  for (path, leaf), spec in zip(leaves, jax.tree.leaves(specs), strict=True):
    shape = tuple(jnp.shape(leaf))
    parts = [math.prod(mesh.shape[a] for a in names(axes)) for axes in spec]
    validation.require(
      len(parts) <= len(shape)
      and all(n % k == 0 for n, k in zip(shape, parts, strict=False)),
      "param_specs",
      spec,
      f"a spec whose shards divide the parameter of shape {shape} at"
      f" {jax.tree_util.keystr(path) or 'the root'} on the mesh"
      f" {dict(mesh.shape)}",
      "shard an axis that they divide, or leave it whole",
    )


def axes_of(param_specs: Any) -> set[str]:
  """Returns the axes that any spec of a tree names."""
  specs = map(_bare, jax.tree.leaves(param_specs))
  return {axis for spec in specs for axis in _axes_of(spec)}


def _bare(spec: Any) -> PartitionSpec:
  """Returns the spec of a NamedSharding, or the spec that is given."""
  return getattr(spec, "spec", spec)


class _Specs(NamedTuple):
  """Finds the specs of the parts of a state."""

  axis_name: AxisName
  stage_axis: str
  by_path: dict[tuple, tuple]  # local shape and spec of sharded parameters

  def of(self, state: Any) -> Any:
    """Returns the specs of a state of one device, as its tree."""

    def specs(path: tuple, part: Any) -> Any:
      if isinstance(part, ReducerState):
        return self._of_reducer(part)
      if isinstance(part, PerReplica):
        return jax.tree_util.tree_map_with_path(
          lambda path, x: self._of_replica(self._mirrored(path, x.shape[1:])),
          part,
        )
      return self._mirrored(path, part.shape)

    kinds = (ReducerState, PerReplica)
    return jax.tree_util.tree_map_with_path(
      specs, state, is_leaf=lambda x: isinstance(x, kinds)
    )

  def _mirrored(self, path: tuple, shape: tuple[int, ...]) -> PartitionSpec:
    """Returns the spec of the parameter that a leaf mirrors, if there is one.

    The path of the leaf ends in the path of that parameter.
    """
    for start in range(len(path) + 1):
      known, spec = self.by_path.get(path[start:], (None, None))
      if known == shape:
        return spec
    return PartitionSpec()

  def _of_replica(self, spec: PartitionSpec) -> PartitionSpec:
    """Returns the spec of an array [N, *shape], given the one of `shape`."""
    return PartitionSpec(_joined(*names(self.axis_name)), *spec)

  def _of_leaf(
    self, stage: tuple[str, ...], path: tuple, leaf: LeafState
  ) -> LeafState:
    """Returns the specs of factors and residual of one leaf.

    Args:
      stage: The axis of the stages, if there are any.
      path: Of the leaf.
      leaf: Its state.
    """
    _, spec = self.by_path.get(path, (None, PartitionSpec()))
    shards = [axis for axis in _axes_of(spec) if axis not in stage]
    each = LeafState._make(
      [_along_first(*stage, *shards), self._of_replica(spec), PartitionSpec()]
    )
    return jax.tree.map(
      lambda spec, own: jax.tree.map(lambda _: spec, own), each, leaf
    )

  def _of_reducer(self, state: ReducerState) -> ReducerState:
    parts = parts_of(state)
    stage = names(self.stage_axis) if parts.stages else ()
    own = of_stage = PartitionSpec(*stage)
    if parts.shards:
      axes = varying_axes(state.stats.wire_bytes)
      shards = tuple(axis for axis in axes if axis not in stage)
      own = PartitionSpec(*(stage or (None,)), shards)
    leaves = jax.tree_util.tree_map_with_path(
      functools.partial(self._of_leaf, stage),
      state.leaves,
      is_leaf=is_leaf_state,
    )
    common = jax.tree.map(lambda _: PartitionSpec(), state)
    return map_parts(
      lambda _: own, lambda _: of_stage, common._replace(leaves=leaves)
    )


def require_is_mesh(
  mesh: Any, *, optional: bool = False, kinds: Any = Mesh | AbstractMesh
) -> None:
  """Raises unless this is a mesh, or None where that may be."""
  if not (isinstance(mesh, kinds) or (optional and mesh is None)):
    of_devices = " with devices" if kinds is Mesh else ""
    raise TypeError(
      f"`mesh` must be a mesh of JAX{of_devices}, got"
      f" {validation.shown(mesh)}; make one"
      ' with jax.make_mesh((8,), ("data",)).'
    )


def require_axes(mesh: Any, argument: str, axis_name: AxisName) -> None:
  """Raises unless this is a mesh, and has all the axes."""
  require_is_mesh(mesh)
  order.require_names(argument, axis_name)
  validation.require(
    set(names(axis_name)) <= set(mesh.shape),
    argument,
    axis_name,
    f"an axis of the mesh {dict(mesh.shape)}",
    "pass the name of an axis of the mesh",
  )


def _types(
  tx: optax.GradientTransformation, params: Any, param_specs: Any, **where: Any
) -> tuple[dict[tuple[Any, ...], tuple[Any, ...]], Any]:
  """Returns types of one device's parts, as `init` sees them in `shard_map`.

  Args:
    tx: The transformation.
    params: Parameters.
    param_specs: Their specs.
    **where: Arguments of `shard_map`: the mesh, or the axes of the mesh around.

  Returns:
    Shape and spec of each parameter by path, and the state.
  """
  found = []

  def init(local: Any) -> tuple[()]:
    found.append(jax.eval_shape(lambda p: (p, tx.init(p)), local))
    return ()

  trace = jax.shard_map(init, in_specs=(param_specs,), out_specs=(), **where)
  jax.eval_shape(trace, types_on(where.get("mesh"), params, param_specs))
  local, state = found[0]
  shapes = [leaf.shape for leaf in jax.tree.leaves(local)]
  specs = jax.tree.leaves(param_specs)
  by_path = {}
  # Moments are inside of NNX's variables, as parameters are; states are not.
  for is_leaf in (None, is_variable):
    paths = jax.tree_util.tree_leaves_with_path(local, is_leaf=is_leaf)
    by_path |= {
      path: (shape, spec)
      for (path, _), shape, spec in zip(paths, shapes, specs, strict=True)
    }
  return by_path, state


def types_on(mesh: Mesh | AbstractMesh | None, tree: Any, specs: Any) -> Any:
  """Returns the types of arrays that lie on a mesh as their specs say.

  A `shard_map` over axes that are `Explicit` refuses types without their specs.
  Without a mesh, the tree itself.
  """
  if mesh is None:
    return tree

  def type_of(x: Any, spec: PartitionSpec) -> jax.ShapeDtypeStruct:
    sharding = NamedSharding(mesh, spec)
    return jax.ShapeDtypeStruct(jnp.shape(x), x.dtype, sharding=sharding)

  return jax.tree.map(type_of, tree, specs)


def _only(specs: Any, axis_names: Collection[str] | None) -> Any:
  """Drops all other axes from the specs of a tree; None keeps all."""
  if axis_names is None:
    return specs
  kept_names = set(axis_names)

  def kept(part: AxisName | None) -> AxisName | None:
    return _joined(*(axis for axis in names(part) if axis in kept_names))

  return jax.tree.map(lambda s: PartitionSpec(*[kept(x) for x in s]), specs)


def _along_first(*axes: str) -> PartitionSpec:
  """Shards the first axis of an array over all these axes of the mesh."""
  return PartitionSpec(_joined(*axes)) if axes else PartitionSpec()


def _joined(*axes: str) -> AxisName | None:
  """Returns the entry of a spec for some axes of the mesh."""
  return axes if len(axes) > 1 else (*axes, None)[0]


def _axes_of(spec: PartitionSpec | tuple) -> tuple[str, ...]:
  """Returns the axes of the mesh that a spec names, in its order."""
  return tuple(axis for part in spec for axis in names(part))
