"""Differentiates a loss on each replica alone, under plain `jax.jit`."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.sharding import (
  AbstractMesh,
  AxisType,
  Mesh,
  NamedSharding,
  PartitionSpec,
)

from edgc_jax import validation
from edgc_jax.mesh.nnx_module import is_module, update_module, without_module
from edgc_jax.mesh.on_replicas import on_replicas
from edgc_jax.mesh.sharding import axes_of, given_or_set, num_replicas
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
  over `axis_name`, and go to a reducer. Nothing but the loss and the auxiliary
  outputs crosses that axis. Other axes of the mesh are left to the compiler, so
  sharded parameters, sharding constraints over these axes and scans work inside
  `loss_fn` as without this function. (Constraints
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
  if mesh is not None:
    num_replicas(mesh, axis_name)  # raises if it lacks the axis

  @functools.wraps(loss_fn)
  def run(params: Any, *args: Any) -> Any:
    is_each = isinstance(in_axes, tuple | list)
    own = _LocalGradients(
      loss_fn,
      given_or_set(mesh, jax.sharding.get_abstract_mesh),
      axis_name,
      has_aux,
      tuple(in_axes) if is_each else (in_axes,) * len(args),
      is_local,
      averages,
      aux_axes,
    )
    if is_module(params) and not is_local:
      return own.of_module(params, wrt, *args)
    validation.require(
      wrt is None,
      "wrt",
      wrt,
      "None for parameters that are no module of Flax NNX",
      "leave it out, or pass the module",
    )
    return own.of(params, *args)

  return run


class _Arguments(NamedTuple):
  """The arguments after the parameters, as the replicas get them."""

  tree: Any
  values: list[jax.Array]
  specs: list[PartitionSpec]  # over the replicas alone
  is_key: list[bool]  # whether a value is an array of one key for each replica

  @property
  def lengths(self) -> set[int]:
    """The rows of each array that is split, of all replicas together."""
    own = zip(self.values, self.specs, self.is_key, strict=True)
    return {x.shape[0] for x, spec, key in own if axes_of(spec) and not key}

  def of_replica(self, values: list[jax.Array]) -> Any:
    """Returns the arguments of one replica, given its values."""
    own = zip(values, self.is_key, strict=True)
    return jax.tree.unflatten(self.tree, [x[0] if key else x for x, key in own])


@dataclasses.dataclass(frozen=True)
class _LocalGradients:
  """The loss and gradients of all replicas; `value_and_grad` has the options.

  `in_axes` has an entry for each argument.
  """

  loss_fn: Callable[..., Any]
  mesh: Mesh | AbstractMesh
  axis_name: AxisName
  has_aux: bool
  in_axes: tuple[int | None, ...]
  is_local: bool
  averages: bool
  aux_axes: Any

  def of(self, params: Any, *args: Any) -> tuple[Any, Any]:
    """Returns the loss, with other outputs if there are some, and gradients."""
    split, whole = PartitionSpec(self.axis_name), PartitionSpec()
    if self.is_local:
      _require_own(params, self._replicas)
      params = jax.tree.map(lambda x: self._typed(x, split), params)
    given = self._arguments(args)
    _require_floats(params)
    outputs = _Outputs(self)
    specs = (
      split if self.is_local else whole,
      given.specs,
      (whole, split) if self.averages else split,
    )
    value, gradients = on_replicas(
      functools.partial(self._on_replica, given, outputs),
      self.mesh,
      self.axis_name,
      specs,
      params,
      given.values,
    )
    _warn_outside_of_jit(value)
    return outputs.joined(value) if self.averages else value, gradients

  def of_module(self, module: Any, wrt: Any, *args: Any) -> tuple[Any, Any]:
    """Returns what `of` does of a module of NNX, and updates the module."""
    validation.require(
      self.averages,
      "averages",
      self.averages,
      "True for a module of Flax NNX, whose variables all replicas share",
      "leave it out, or pass the parameters of nnx.split",
    )
    loss_of, params, others = without_module(
      self.loss_fn, module, wrt, self.axis_name, self.has_aux
    )
    plain = dataclasses.replace(
      self,
      loss_fn=loss_of,
      has_aux=True,
      in_axes=(None, *self.in_axes),
      aux_axes=(self.aux_axes, None),
    )
    (loss, (aux, left)), gradients = plain.of(params, others, *args)
    update_module(module, left)
    return (loss, aux) if self.has_aux else loss, gradients

  @property
  def _replicas(self) -> int:
    return num_replicas(self.mesh, self.axis_name)

  def _typed(self, x: Any, spec: PartitionSpec) -> Any:
    """Places an array, where types of arrays say how they lie."""
    types = dict(zip(self.mesh.axis_names, self.mesh.axis_types, strict=True))
    if AxisType.Explicit in {types[a] for a in names(self.axis_name)}:
      return jax.sharding.reshard(x, NamedSharding(self.mesh, spec))
    return x

  def _arguments(self, args: tuple) -> _Arguments:
    """Splits the arguments over the replicas."""
    axes, replicas = self.in_axes, self._replicas
    validation.require(
      len(axes) == len(args) and all(a is None or a == 0 for a in axes),
      "in_axes",
      axes,
      f"0 or None for each of the {len(args)} arguments after the parameters",
      "give one entry for each",
    )
    leaves, tree = jax.tree.flatten_with_path(args)
    values, specs, is_key = [], [], []
    for path, x in leaves:
      place, is_split = jax.tree_util.keystr(path), axes[path[0].idx] == 0
      _require_array(x, place)
      key = is_split and order.is_key(x) and jnp.ndim(x) == 0
      if key:
        x = jax.random.split(x, replicas)
      elif is_split and jnp.ndim(x):
        _require_even(x, replicas, place)
      has_parts = is_split and jnp.ndim(x)
      spec = PartitionSpec(self.axis_name) if has_parts else PartitionSpec()
      specs.append(spec)
      values.append(self._typed(x, spec))
      is_key.append(key)
    validation.require(
      any(map(axes_of, specs)),
      "args",
      [jnp.shape(x) for _, x in leaves],
      f"an array or a key that is split over {self.axis_name!r}, or all"
      " replicas compute the same",
      "pass the batch as an argument of the loss, not in a closure, with 0 in"
      " `in_axes`",
    )
    return _Arguments(tree, values, specs, is_key)

  def _on_replica(
    self,
    given: _Arguments,
    outputs: "_Outputs",
    params: Any,
    values: list[jax.Array],
  ) -> tuple[Any, Any]:
    """Differentiates the loss of one replica; gradients are [1, ...]."""

    def loss_fn(*args: Any) -> Any:
      found = self.loss_fn(*args)
      _require_loss(found, self.has_aux)
      return found

    if self.is_local:
      params = jax.tree.map(lambda x: x[0], params)
    value, gradients = jax.value_and_grad(loss_fn, has_aux=self.has_aux)(
      params, *given.of_replica(values)
    )
    if not self.averages:
      return jax.tree.map(lambda x: jnp.asarray(x)[None], (value, gradients))
    lengths = given._replace(values=values).lengths
    common, rows = outputs.of_replica(value, lengths)
    # On CPUs the collectives of the update must follow.
    gradients = order.after_all(gradients, common)
    return (common, rows), jax.tree.map(lambda g: g[None], gradients)


class _Outputs:
  """The loss and other outputs: those that are averaged, and those by row.

  `of_replica` parts them while it is traced, `joined` puts them together.
  """

  def __init__(self, options: _LocalGradients):
    self._options = options
    self._tree: Any = None
    self._is_row: list[bool] = []

  def of_replica(self, value: Any, lengths: set[int]) -> tuple[Any, list]:
    """Returns the means over the replicas, and the rows of a replica.

    Args:
      value: What the loss returned.
      lengths: The rows of the replica's part of each split argument.
    """
    loss, aux = value if self._options.has_aux else (value, None)
    outputs, self._tree = jax.tree.flatten(aux)
    axes = self._options.aux_axes
    self._is_row = _are_rows(outputs, self._tree, axes, lengths)
    parts: dict[bool, list] = {True: [], False: []}
    for x, is_row in zip(outputs, self._is_row, strict=True):
      parts[is_row].append(x)
    common = _common((loss, parts[False]), self._options.axis_name)
    return common, parts[True]

  def joined(self, value: Any) -> Any:
    """Returns the loss, or with other outputs both, of all replicas."""
    (loss, others), rows = value
    kinds = {True: iter(rows), False: iter(others)}
    outputs = [next(kinds[is_row]) for is_row in self._is_row]
    aux = jax.tree.unflatten(self._tree, outputs)
    return (loss, aux) if self._options.has_aux else loss


def _warn_outside_of_jit(result: Any) -> None:
  """Warns unless a result is traced."""
  is_traced = any(isinstance(x, Tracer) for x in jax.tree.leaves(result))
  if not is_traced and not getattr(jax.config, "jax_disable_jit", False):
    validation.warn(
      "`value_and_grad` was called outside of jax.jit, where each call"
      " compiles its program again; call it in a jitted step."
    )


def _require_own(params: Any, replicas: int) -> None:
  """Raises unless parameters have a first axis of replicas."""
  if is_module(params):
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
