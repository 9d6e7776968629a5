"""Runs a function on every replica, and leaves other axes to the compiler.

`jax.vmap` binds the axes of the replicas if further axes shard arrays: XLA then
partitions one program. A partial `jax.shard_map` binds them otherwise, and
where the program has operations that `vmap` does not know or XLA would gather.
"""

import contextlib
from collections.abc import Callable, Generator, Iterator
from typing import Any

import jax
from jax.extend.core import jaxpr_as_fun, jaxprs_in_params
from jax.sharding import (
  AbstractMesh,
  AxisType,
  Mesh,
  NamedSharding,
  PartitionSpec,
)

from edgc_jax.mesh.sharding import axes_of, num_replicas
from edgc_jax.wire.order import AxisName, names

OnReplica = Callable[[Any, list], tuple[Any, Any]]
# Operations that XLA gathers over a sharded axis which `vmap` adds.
_GATHERED = {"conv_general_dilated", "top_k"}
# What JAX says of a sharding constraint over an axis that is bound.
_OF_CONSTRAINTS = (
  "should match the mesh of sharding",
  "can only refer to Auto axes",
  "contains a manual axes",
  "cannot appear in with_sharding_constraint",
)


def on_replicas(
  function: OnReplica,
  mesh: Mesh | AbstractMesh,
  axis_name: AxisName,
  specs: tuple,
  params: Any,
  values: list,
) -> tuple[Any, Any]:
  """Runs a function on every replica's part of the values.

  Args:
    function: From parameters and values to a pair, of which the second part has
      a first axis of one replica.
    mesh: The mesh of the training.
    axis_name: The axis of the replicas, or a tuple of axes.
    specs: Over the replicas alone: the spec of the parameters; those of the
      values; and that of the first part of the pair, or a pair of what is
      common and what is by row.
    params: The parameters.
    values: Arrays.

  Returns:
    The pair, with an axis of N replicas where the function has one.
  """
  others = [n for a, n in mesh.shape.items() if a not in names(axis_name)]
  has_more_axes = max(others, default=1) > 1
  how = function, mesh, axis_name, specs
  with _constraint_errors(axis_name):
    if has_more_axes and AxisType.Explicit not in mesh.axis_types:
      traced = _traced(_by_vmap(*how), mesh, params, values)
      if traced is not None:
        jaxpr, result = traced
        flat = jaxpr_as_fun(jaxpr)(*jax.tree.leaves((params, values)))
        return jax.tree.unflatten(jax.tree.structure(result), flat)
    return jax.jit(_by_shard_map(*how))(params, values)


@contextlib.contextmanager
def _constraint_errors(axis_name: AxisName) -> Generator[None]:
  """Says what to do where JAX refuses a constraint over a bound axis."""
  try:
    yield
  except ValueError as error:
    if not any(text in str(error) for text in _OF_CONSTRAINTS):
      raise
    raise ValueError(
      "`loss_fn` must constrain arrays over other axes than the axis of the"
      f" replicas, {axis_name!r}, along which each has its own; leave it out of"
      " jax.lax.with_sharding_constraint. If it is not there, pass a bare"
      " PartitionSpec in place of a NamedSharding, or drop the constraint if"
      " the mesh has no other axis."
    ) from error


def _traced(
  bound: OnReplica, mesh: Mesh | AbstractMesh, params: Any, values: list
) -> tuple[Any, Any] | None:
  """Traces a function that is bound by `vmap`, with the mesh as context.

  Returns:
    The jaxpr and the shapes of the result; None if `vmap` does not know an
    operation, or XLA would gather its operands.
  """
  trace = jax.make_jaxpr(bound, return_shape=True)
  try:
    abstract = mesh if isinstance(mesh, AbstractMesh) else mesh.abstract_mesh
    with jax.sharding.use_abstract_mesh(abstract):
      found = trace(params, values)
  except NotImplementedError:
    return None
  return None if _GATHERED & set(_operations(found[0].jaxpr)) else found


def _operations(jaxpr: Any) -> Iterator[str]:
  """Returns the names of all operations, also of inner functions."""
  for equation in jaxpr.eqns:
    yield equation.primitive.name
    for inner in jaxprs_in_params(equation.params):
      yield from _operations(inner)


def _by_shard_map(
  on_replica: OnReplica,
  mesh: Mesh | AbstractMesh,
  axis_name: AxisName,
  specs: tuple,
) -> OnReplica:
  """Binds the axes of the replicas by `shard_map`; all others stay.

  The specs are those of parameters, other arguments, and the loss with other
  outputs: of all, or of those that are common, and by row.
  """
  return jax.shard_map(
    on_replica,
    mesh=mesh,
    in_specs=specs[:2],
    out_specs=(specs[2], PartitionSpec(axis_name)),
    axis_names=set(names(axis_name)),
    check_vma=False,
  )


def _by_vmap(
  on_replica: OnReplica,
  mesh: Mesh | AbstractMesh,
  axis_name: AxisName,
  specs: tuple,
) -> OnReplica:
  """Binds the axes by `vmap`, and has the compiler split them."""
  axes = names(axis_name)
  is_local, is_each = bool(axes_of(specs[0])), not isinstance(specs[2], tuple)
  is_split = [bool(axes_of(spec)) for spec in specs[1]]
  bound = on_replica
  for axis in reversed(axes):
    bound = jax.vmap(
      bound,
      in_axes=(
        0 if is_local else None,
        [0 if own else None for own in is_split],
      ),
      out_axes=(0 if is_each else (None, 0), 0),
      axis_name=axis,
      axis_size=mesh.shape[axis],
      spmd_axis_name=axis,
    )

  def cut(x: Any) -> Any:
    """Reshapes [rows, ...] to [*replicas, rows of each, ...]."""
    rows = x.shape[0] // num_replicas(mesh, axis_name)
    x = x.reshape(*(mesh.shape[a] for a in axes), rows, *x.shape[1:])
    free = [PartitionSpec.UNCONSTRAINED] * (x.ndim - len(axes))
    sharding = NamedSharding(mesh, PartitionSpec(*axes, *free))
    return jax.lax.with_sharding_constraint(x, sharding)

  def flat(x: Any) -> Any:
    """Reshapes [*replicas, 1, ...] to [N, ...]."""
    replicas = num_replicas(mesh, axis_name)
    return x.reshape(replicas, *x.shape[len(axes) + 1 :])

  def of_all_rows(x: Any) -> Any:
    """Reshapes [*replicas, rows of each, ...] to [rows, ...]."""
    return x.reshape(-1, *x.shape[len(axes) + 1 :])

  def run(params: Any, values: list) -> tuple[Any, Any]:
    values = [
      cut(x) if own else x for x, own in zip(values, is_split, strict=True)
    ]
    if is_local:
      params = jax.tree.map(cut, params)
    value, gradients = bound(params, values)
    if is_each:
      value = jax.tree.map(flat, value)
    else:
      value = value[0], jax.tree.map(of_all_rows, value[1])
    return value, jax.tree.map(flat, gradients)

  return run
