"""Differentiates a loss on each replica alone, under plain `jax.jit`."""

import contextlib
import functools
import sys
from collections.abc import Callable, Generator, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.extend.core import jaxpr_as_fun, jaxprs_in_params
from jax.sharding import (
  AbstractMesh,
  AxisType,
  Mesh,
  NamedSharding,
  PartitionSpec,
)

from edgc_jax import validation
from edgc_jax.mesh.sharding import axes_of, num_replicas
from edgc_jax.wire import collectives, order
from edgc_jax.wire.order import AxisName, names


def value_and_grad(
  loss_fn: Callable[..., Any],
  mesh: Mesh | AbstractMesh | None = None,
  axis_name: AxisName = "data",
  *,
  has_aux: bool = False,
  in_axes: int | tuple[int | None, ...] | None = 0,
  wrt: Any = None,
  is_local: bool = False,
  averages: bool = True,
  aux_axes: Any = "checked",
) -> Callable[..., Any]:
  """Differentiates a loss on every replica's part of the batch.

  As `jax.value_and_grad`, for a step in plain `jax.jit`:

    loss, grads = edgc_jax.value_and_grad(loss_fn, mesh)(params, batch, key)

  but gradients are not averaged: they have a first axis of replicas, sharded
  over `axis_name`, and go to a reducer that was told the mesh. Nothing but the
  loss and the auxiliary outputs crosses that axis. Other axes of the mesh are
  left to the compiler, so sharded parameters, sharding constraints over these
  axes and scans work inside `loss_fn` as without this function. (Constraints
  must be bare PartitionSpecs if the loss has a convolution or `top_k`, or an
  axis is Explicit.) The axis is bound in `loss_fn`:
  `jax.lax.pmean(x, axis_name)` averages over all replicas.

  Args:
    loss_fn: From parameters and further arguments to a loss that is a mean over
      the batch, float [].
    mesh: The mesh of the training; None takes the one of `jax.set_mesh`.
    axis_name: The axis of the replicas, or a tuple of axes.
    has_aux: Whether `loss_fn` returns a pair of the loss and other outputs. Of
      these, floats are averaged over the replicas, as running statistics of
      batches; all others are those of the first replica. Sum counts inside:
      `jax.lax.psum(count, axis_name)`.
    in_axes: As for `jax.vmap`, one entry for each argument after the
      parameters, or one for all: 0 for arguments that are split over the
      replicas along their first axis, None for arguments that every replica
      gets whole. Of split arguments, scalars are whole, and keys
      (`jax.random.key`) are split, so that replicas draw different numbers.
      Other axes than the first are not split: move the batch there.
    wrt: For a module of Flax NNX in place of parameters, the filter of the
      variables to differentiate; None for `nnx.Param`. All other variables
      that `loss_fn` changes are updated in the module: floats by their mean,
      such as the statistics of `nnx.BatchNorm`, and counts of random numbers as
      on the first replica. The keys of random streams differ by replica.
    is_local: Whether the parameters have a first axis of replicas, each with
      its own, as `edgc_jax.local_params` returns them.
    averages: Whether the loss and auxiliary outputs are averaged. Otherwise
      they have a first axis of replicas, and nothing crosses `axis_name`, as
      `edgc_jax.split_local_steps` needs it, and links of long latency: between
      CPU hosts one number takes N - 1 round trips.
    aux_axes: A prefix of the tree of other outputs: 0 for those with a row for
      each row of the batch, as logits, which come back with the rows of all
      replicas in order; None for all others. By default all are others, but
      one that is as long as a replica's part of the batch is refused, since it
      may be either; that depends on the batch and the mesh, so pass it if any
      output is no scalar. Unused with averages=False.

  Returns:
    A function of the parameters and the further arguments, which returns
    `(loss, gradients)`, or `((loss, aux), gradients)`: the mean loss, and
    gradients [N, ...] for N replicas.

  Raises:
    ValueError: if the mesh lacks an axis, no argument is split, replicas do not
      divide a batch, `aux_axes` does not fit the other outputs, own parameters
      have no axis of replicas, variables of a module are not to be averaged, or
      `loss_fn` constrains arrays over `axis_name`.
    TypeError: if `mesh` is no mesh or an option of another type; when called,
      if `loss_fn` returns no scalar, a parameter is no float, an argument no
      array, or one that looks like a key of the old kind.
  """
  validation.require_function(
    "loss_fn", loss_fn, "parameters and a batch", optional=False
  )
  for name, flag in (
    ("has_aux", has_aux), ("is_local", is_local), ("averages", averages),
  ):  # fmt: skip
    validation.require_flag(name, flag)
  if mesh is None:
    return functools.wraps(loss_fn)(
      lambda *args: value_and_grad(
        loss_fn,
        _ambient_mesh(),
        axis_name,
        has_aux=has_aux,
        in_axes=in_axes,
        wrt=wrt,
        is_local=is_local,
        averages=averages,
        aux_axes=aux_axes,
      )(*args)
    )
  replicas = num_replicas(mesh, axis_name)
  split, whole = PartitionSpec(axis_name), PartitionSpec()

  types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
  is_explicit = AxisType.Explicit in {types[a] for a in names(axis_name)}
  # Whether the compiler shards over further axes.
  others = [n for a, n in mesh.shape.items() if a not in names(axis_name)]
  has_more_axes = max(others, default=1) > 1 and (
    AxisType.Explicit not in mesh.axis_types
  )

  def typed(x: Any, spec: PartitionSpec) -> Any:
    """Places an array, where types of arrays say how they lie."""
    if is_explicit:
      return jax.sharding.reshard(x, NamedSharding(mesh, spec))
    return x

  @functools.wraps(loss_fn)
  def run(params: Any, *args: Any) -> Any:
    is_each = isinstance(in_axes, tuple | list)
    axes = tuple(in_axes) if is_each else (in_axes,) * len(args)
    validation.require(
      wrt is None or _is_module(params),
      "wrt",
      wrt,
      "None for parameters that are no module of Flax NNX",
      "leave it out, or pass the module",
    )
    if is_local:
      _require_own(params, replicas)
      params = jax.tree.map(lambda x: typed(x, split), params)
    elif _is_module(params):
      validation.require(
        averages,
        "averages",
        averages,
        "True for a module of Flax NNX, whose variables all replicas share",
        "leave it out, or pass the parameters of nnx.split",
      )
      loss_of, own, others = _without_module(
        loss_fn, params, wrt, axis_name, has_aux
      )
      axes = (None, *axes)
      inner = value_and_grad(
        loss_of,
        mesh,
        axis_name,
        has_aux=True,
        in_axes=axes,
        aux_axes=(aux_axes, None),
      )
      (loss, (aux, left)), gradients = inner(own, others, *args)
      sys.modules["flax.nnx"].update(params, left)
      return (loss, aux) if has_aux else loss, gradients
    validation.require(
      len(axes) == len(args) and all(a is None or a == 0 for a in axes),
      "in_axes",
      in_axes,
      f"0 or None for each of the {len(args)} arguments after the parameters",
      "give one entry for each",
    )
    _require_floats(params)
    leaves, structure = jax.tree.flatten_with_path(args)
    values, specs, is_key = [], [], []
    for path, x in leaves:
      _require_array(x, jax.tree_util.keystr(path))
      splits, key = axes[path[0].idx] == 0, order.is_key(x) and jnp.ndim(x) == 0
      if splits and key:
        x = jax.random.split(x, replicas)
      elif splits and jnp.ndim(x):
        _require_even(x, replicas, jax.tree_util.keystr(path))
      specs.append(split if splits and jnp.ndim(x) else whole)
      values.append(typed(x, specs[-1]))
      is_key.append(splits and key)

    validation.require(
      any(map(axes_of, specs)),
      "args",
      [jnp.shape(x) for _, x in leaves],
      f"an array or a key that is split over {axis_name!r}, or all replicas"
      " compute the same",
      "pass the batch as an argument of the loss, not in a closure, with 0 in"
      " `in_axes`",
    )

    def scalar_loss(*args: Any) -> Any:
      found = loss_fn(*args)
      _require_loss(found, has_aux)
      return found

    def on_replica(params: Any, values: list) -> Any:
      own = [x[0] if key else x for x, key in zip(values, is_key, strict=True)]
      own = jax.tree.unflatten(structure, own)
      if is_local:
        params = jax.tree.map(lambda x: x[0], params)
      differentiated = jax.value_and_grad(scalar_loss, has_aux=has_aux)
      value, gradients = differentiated(params, *own)
      if not averages:
        return jax.tree.map(lambda x: jnp.asarray(x)[None], (value, gradients))
      loss, aux = value if has_aux else (value, None)
      lengths = {
        x.shape[0]
        for x, spec, key in zip(values, of_values, is_key, strict=True)
        if axes_of(spec) and not key
      }
      aux, tree = jax.tree.flatten(aux)
      is_row = _are_rows(aux, tree, aux_axes, lengths)
      found[:] = tree, is_row
      rows = [x for x, own in zip(aux, is_row, strict=True) if own]
      others = [x for x, own in zip(aux, is_row, strict=True) if not own]
      common = _common((loss, others), axis_name)
      # On CPUs the collectives of the update must follow.
      gradients = order.after_all(gradients, common)
      return (common, rows), jax.tree.map(lambda g: g[None], gradients)

    def joined(value: Any, gradients: Any) -> tuple[Any, Any]:
      if not averages:
        return value, gradients
      ((loss, others), rows), (tree, is_row) = value, found
      kinds = {True: iter(rows), False: iter(others)}
      aux = jax.tree.unflatten(tree, [next(kinds[own]) for own in is_row])
      return (loss, aux) if has_aux else loss, gradients

    found: list[Any] = []  # what is known of other outputs once it is traced
    of_values = specs
    of_params = split if is_local else whole
    of_value = (whole, split) if averages else split
    specs = of_params, specs, of_value
    how, traced = (on_replica, mesh, axis_name, specs), None
    with _constraint_errors(axis_name):
      if has_more_axes:
        traced = _traced(_by_vmap(*how), mesh, params, values)
      if traced is None:
        result = jax.jit(_by_shard_map(*how))(params, values)
      else:
        jaxpr, result = traced
        flat = jaxpr_as_fun(jaxpr)(*jax.tree.leaves((params, values)))
        result = jax.tree.unflatten(jax.tree.structure(result), flat)
    is_traced = any(isinstance(x, Tracer) for x in jax.tree.leaves(result))
    if not is_traced and not getattr(jax.config, "jax_disable_jit", False):
      validation.warn(
        "`value_and_grad` was called outside of jax.jit, where each call"
        " compiles its program again; call it in a jitted step."
      )
    return joined(*result)

  return run


def _ambient_mesh() -> AbstractMesh:
  """Returns the mesh of `jax.set_mesh`."""
  mesh = jax.sharding.get_abstract_mesh()
  validation.require(
    bool(mesh.axis_names),
    "mesh",
    None,
    "given, or set before",
    "pass it, or call jax.set_mesh(mesh)",
  )
  return mesh


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


def _is_module(params: Any) -> bool:
  """Returns whether this is a module of Flax NNX."""
  nnx = sys.modules.get("flax.nnx")
  return nnx is not None and isinstance(params, nnx.Module)


def _without_module(
  loss_fn: Callable[..., Any],
  module: Any,
  wrt: Any,
  axis_name: AxisName,
  has_aux: bool,
) -> tuple[Callable[..., Any], Any, Any]:
  """Returns a loss of plain trees in place of a loss of a module.

  Returns:
    A loss of the parameters, the other variables and the further arguments,
    which also returns the other variables as it left them; and both trees.
  """
  nnx = sys.modules["flax.nnx"]
  kinds = nnx.Param if wrt is None else wrt, ...
  graph, params, others = nnx.split(module, *kinds)

  def loss_of(params: Any, others: Any, *args: Any) -> tuple[Any, Any]:
    index = collectives.device_index(axis_name)

    def own_key(x: Any) -> Any:
      if not order.is_key(x):
        return x
      # Scanned layers have an array of keys.
      keys = jax.vmap(jax.random.fold_in, (0, None))(x.ravel(), index)
      return keys.reshape(x.shape)

    own = jax.tree.map(own_key, others)
    module = nnx.merge(graph, params, own)
    value = loss_fn(module, *args)
    left = nnx.split(module, *kinds)[2]
    # The keys of all replicas stay equal.
    left = jax.tree.map(lambda x, y: x if order.is_key(x) else y, others, left)
    value, aux = value if has_aux else (value, None)
    return value, (aux, left)

  return loss_of, params, others


def _require_own(params: Any, replicas: int) -> None:
  """Raises unless parameters have a first axis of replicas."""
  if _is_module(params):
    raise TypeError(
      "`params` must be a tree of arrays with is_local=True, got a module of"
      " Flax NNX; pass nnx.state(model, nnx.Param), and merge it in the loss."
    )
  for path, x in jax.tree_util.tree_leaves_with_path(params):
    validation.require(
      jnp.shape(x)[:1] == (replicas,),
      "params",
      jnp.shape(x),
      f"own parameters of {replicas} replicas, [{replicas}, ...], with"
      f" is_local=True, at {jax.tree_util.keystr(path) or 'the root'}",
      "pass edgc_jax.local_params(params, opt_state, mesh), with a state that"
      " local_steps(..., mesh=mesh) made or edgc_jax.restore converted",
    )


def _require_floats(params: Any) -> None:
  """Raises unless all parameters can be differentiated."""
  for path, x in jax.tree_util.tree_leaves_with_path(params):
    place = jax.tree_util.keystr(path) or "the root"
    _require_array(x, place, "params")
    dtype = jnp.result_type(x)
    if not jnp.issubdtype(dtype, jnp.floating):
      raise TypeError(
        f"`params` must have real floating leaves, got {dtype} at {place}; pass"
        " such leaves as a further argument, with None in `in_axes`."
      )


def _require_array(x: Any, place: str, name: str = "args") -> None:
  """Raises unless this is an array, or a number."""
  try:
    jnp.result_type(x)
  except TypeError as error:
    raise TypeError(
      f"`{name}` must have arrays as leaves, got {validation.shown(x)} at"
      f" {place}; bind all else with functools.partial(loss_fn, ...)."
    ) from error


def _require_loss(found: Any, has_aux: bool) -> None:
  """Raises unless `loss_fn` returned a scalar, or with `has_aux` a pair."""
  is_pair = isinstance(found, tuple) and len(found) == 2
  loss = found[0] if has_aux and is_pair else found
  is_scalar = hasattr(loss, "dtype") and not jnp.ndim(loss)
  is_scalar |= isinstance(loss, float)
  if (has_aux and not is_pair) or not (
    is_scalar and jnp.issubdtype(jnp.result_type(loss), jnp.floating)
  ):
    rule = "a pair of a loss, float [], and other outputs with has_aux=True"
    types = jax.tree.map(lambda x: getattr(x, "aval", x), found)
    raise TypeError(
      "`loss_fn` must return"
      f" {rule if has_aux else 'a loss, float [], with has_aux=False'}, got"
      f" {validation.shown(types)}; average it over the batch, and set has_aux"
      " to whether there are other outputs."
    )


def _require_even(x: Any, replicas: int, place: str) -> None:
  """Raises unless the first axis of an argument splits over the replicas."""
  shape = jnp.shape(x)
  if jnp.result_type(x) == jnp.uint32 and shape == (2,):
    raise TypeError(
      f"`args` must have keys of jax.random.key, which are split over the"
      f" replicas, got an array uint32[2] at {place}, which may be a key of"
      " jax.random.PRNGKey; pass jax.random.wrap_key_data(key), or None for it"
      " in `in_axes`, with which all replicas draw the same numbers."
    )
  validation.require(
    shape[0] % replicas == 0,
    "args",
    shape,
    f"arrays whose first axis {replicas} replicas divide, at {place}",
    "pass a batch that divides, or None for this argument in `in_axes`",
  )


def _are_rows(
  aux: list, tree: Any, aux_axes: Any, lengths: set[int]
) -> list[bool]:
  """Returns which auxiliary outputs have a row for each row of the batch.

  Args:
    aux: The outputs of a replica.
    tree: Their tree.
    aux_axes: As for `value_and_grad`.
    lengths: The rows of the replica's part of each split argument.

  Raises:
    ValueError: if one may have rows or not, or has none and should.
  """
  named = jax.tree.map(
    lambda x: "common" if x is None else x,
    aux_axes,
    is_leaf=lambda x: x is None,
  )
  filled = jax.tree.unflatten(tree, range(len(aux)))
  axes = jax.tree.leaves(jax.tree.broadcast(named, filled))
  for x, axis in zip(aux, axes, strict=True):
    shape = jnp.shape(x)
    is_long = bool(shape) and shape[0] in lengths
    validation.require(
      axis in ("common", "checked") or (axis == 0 and axis is not False),
      "aux_axes",
      axis,
      "0 or None for each of the outputs beside the loss",
      "give one entry for all, or a tree like them",
    )
    validation.require(
      axis != 0 or is_long,
      "aux_axes",
      f"0 for an output of shape {shape} on a replica",
      f"0 only for outputs with as many rows as the batch, {sorted(lengths)}",
      "pass None for it",
    )
    validation.require(
      axis != "checked" or not is_long,
      "aux_axes",
      f"nothing for an output of shape {shape} on a replica",
      "given for outputs that are as long as a replica's part of the batch",
      "pass 0 if it has a row for each of the batch, which all come back, or"
      " None if it has not, so that floats are averaged",
    )
  return [axis == 0 for axis in axes]


def _common(value: Any, axis_name: AxisName) -> Any:
  """Returns the means of floats; of all else, those of the first replica."""
  leaves, structure = jax.tree.flatten(value)
  leaves = [x if hasattr(x, "dtype") else jnp.asarray(x) for x in leaves]
  is_float = [jnp.issubdtype(jnp.result_type(x), jnp.floating) for x in leaves]
  means = collectives.mean(
    [x for x, own in zip(leaves, is_float, strict=True) if own], axis_name
  )
  others = [x for x, own in zip(leaves, is_float, strict=True) if not own]
  if others:
    others = collectives.from_first(order.in_turn(others, means), axis_name)
  found = {True: iter(means), False: iter(others)}
  return jax.tree.unflatten(structure, [next(found[own]) for own in is_float])
