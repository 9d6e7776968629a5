"""Properties and order of values while JAX traces a program.

Which mesh axes a value varies over, whether it is finite, and which of two
collectives runs first if the platform does not keep their order.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from edgc_jax import validation

AxisName = str | tuple[str, ...]


class Axes(NamedTuple):
  """Axes of a mesh, by what differs along them.

  All other axes that JAX tracks a leaf to vary over shard it: every device
  holds a part of the leaf, and a part of a matrix is a matrix.
  """

  replicas: AxisName  # batches; gradients are averaged over them, compressed
  stage: str | None = None  # layers: the stages of a pipeline

  @property
  def known(self) -> set[str]:
    """All axes that do not shard leaves."""
    return {*names(self.replicas), *names(self.stage)}

  def shards(self, tree: Any) -> list[tuple[str, ...]]:
    """Returns the axes over which each leaf is sharded, sorted."""
    known = self.known
    return [
      tuple(sorted(set(varying_axes(leaf)) - known))
      for leaf in jax.tree.leaves(tree)
    ]


def names(axis_name: AxisName | None) -> tuple[str, ...]:
  """Returns the names in an argument that takes one axis or several.

  >>> names("data"), names(("pod", "data")), names(None)
  (('data',), ('pod', 'data'), ())
  """
  if axis_name is None:
    return ()
  return (axis_name,) if isinstance(axis_name, str) else tuple(axis_name)


def axes_left() -> list[str]:
  """Returns the axes that the enclosing `shard_map` leaves to the compiler.

  Arrays may be sharded over them, which no type shows. The compiler may gather
  such an array to flatten it, or to join it with an array of other shards. Axes
  of one device do not count.
  """
  mesh = jax.sharding.get_abstract_mesh()
  left = [a for a in mesh.axis_names if a not in mesh.manual_axes]
  return [a for a in left if mesh.manual_axes and mesh.shape[a] > 1]


def bound_axes() -> tuple[str, ...]:
  """Returns the axes that `shard_map` or `pmap` binds here."""
  return tuple(jax.sharding.get_abstract_mesh().manual_axes)


def is_bound(axis_name: AxisName) -> bool:
  """Returns whether `shard_map` or `pmap` binds any of the axes here."""
  return bool(set(names(axis_name)) & set(bound_axes()))


def require_all_bound() -> None:
  """Raises if the enclosing `shard_map` leaves axes to the compiler.

  Raises:
    ValueError: if it does, and they have more than one device.
  """
  left = axes_left()
  validation.require(
    not left,
    "axis_names",
    jax.sharding.get_abstract_mesh().manual_axes,
    f"all axes of the mesh for a reducer that reads single entries ({left} are"
    " left to the compiler, which would gather whole gradients)",
    "wrap the reducer with edgc_jax.on_mesh(tx, param_specs=param_specs)",
  )


def require_names(argument: str, axis_name: Any) -> None:
  """Raises unless `axis_name` is the name of an axis, or a tuple of names.

  Raises:
    ValueError: if it is not.
  """
  is_sequence = isinstance(axis_name, str | tuple)  # JAX hashes it
  found = names(axis_name) if is_sequence else ()
  is_name = [isinstance(name, str) and bool(name) for name in found]
  validation.require(
    bool(found) and all(is_name) and len(set(found)) == len(found),
    argument,
    axis_name,
    "the name of a mesh axis, or a tuple of different names",
    "pass the axis that splits the batch",
  )


def after(tree: Any, earlier: Any) -> Any:
  """Returns `tree` unchanged, with a data dependency on `earlier`.

  Selects each leaf by an always-true predicate that depends on the last value
  of each leaf of `earlier`; the compiler cannot know that it is true. A branch
  replaces the `where` for leaves that a `where` would make vary over more axes.
  """
  last = [_last(leaf) for leaf in jax.tree.leaves(earlier) if leaf.size]
  if not last:
    return tree
  values = together(last)
  may_send = jnp.all(~(values > 0) | (values > -1))
  axes = set(varying_axes(may_send))

  def wait(leaf: jax.Array) -> jax.Array:
    if axes <= set(varying_axes(leaf)):
      return jnp.where(may_send, leaf, jnp.zeros_like(leaf))
    return lax.cond(may_send, lambda x: x, jnp.zeros_like, leaf)

  return jax.tree.map(wait, tree)


def _last(leaf: jax.Array) -> jax.Array:
  """Returns the last value of an array, or of the data of a random key."""
  if is_key(leaf):
    leaf = jax.random.key_data(leaf)
  return leaf[(-1,) * leaf.ndim].astype(jnp.float32)


def in_turn(tree: Any, earlier: Any) -> Any:
  """Orders collectives on CPUs: `after(tree, earlier)` there, else `tree`.

  If one of two collectives is in a branch or a loop, the second must depend on
  the first (`wire.channel`). Replicas that `jax.vmap` simulates on one device
  send nothing.
  """
  return after_all(tree, earlier) if bound_axes() else tree


def after_all(tree: Any, earlier: Any) -> Any:
  """Does as `in_turn`, in plain `jax.jit`, too."""
  return after(tree, earlier) if jax.default_backend() == "cpu" else tree


def branch_index(index: jax.Array | int) -> jax.Array | int:
  """Returns the index of a branch in which devices send, unchanged.

  Raises:
    ValueError: if `jax.vmap` maps the index beside replicas that `pmap` or
      `shard_map` binds. It makes a selection of the conditional: every branch
      would send in every step, and none would be counted.
  """
  return _one_index(index) if bound_axes() else index


@jax.custom_batching.custom_vmap
def _one_index(index: jax.Array) -> jax.Array:
  return index


@_one_index.def_vmap
def _refuse(size: int, is_mapped: list[bool], index: jax.Array) -> Any:
  validation.require(
    False,  # JAX asks for this rule only if the index is mapped
    "state",
    f"{size} of them in a jax.vmap",
    "of one run where pmap or shard_map binds the replicas: jax.vmap makes a"
    " selection of every conditional, so each branch would send in every step",
    "map them one after the other, with jax.lax.map in place of jax.vmap",
  )


def is_key(value: Any) -> bool:
  """Returns whether this is a key of `jax.random.key`, or an array of them."""
  return jax.dtypes.issubdtype(jnp.result_type(value), jax.dtypes.prng_key)


def is_varying(value: jax.Array, axes: AxisName) -> bool:
  """Returns whether JAX tracks `value` as varying over any of the axes."""
  return bool(set(names(axes)) & set(varying_axes(value)))


def varying_axes(tree: Any) -> tuple[str, ...]:
  """Returns all axes that JAX tracks any leaf to vary over, sorted."""
  axes = set()
  for leaf in jax.tree.leaves(tree):
    kind = jax.typeof(leaf).manual_axis_type
    axes |= set(kind.varying if kind else ())
  return tuple(sorted(axes))


def all_finite(tree: Any) -> jax.Array:
  """Returns whether every entry of every leaf is finite; bool []."""
  leaves = jax.tree.leaves(tree)
  # Integers always are: XLA would compute that, entry by entry, as it compiles.
  flags = [
    jnp.all(jnp.isfinite(leaf))
    for leaf in leaves
    if jnp.issubdtype(jnp.result_type(leaf), jnp.inexact)
  ]
  return jnp.all(together(flags)) if flags else jnp.array(True)


def together(values: Sequence[jax.Array]) -> jax.Array:
  """Returns a vector of scalars and vectors, to be reduced.

  Without the barrier XLA takes a reduction of parts for a chain of elementwise
  operations, and copies the chain into the computation of every leaf that uses
  the result: with n leaves n^2 operations.
  """
  return lax.optimization_barrier(
    jnp.concatenate([jnp.atleast_1d(x) for x in values])
  )


def zeros_unless(flag: jax.Array, tree: Any) -> Any:
  """Returns `tree`, with zeros in place of its leaves if `flag` is false.

  If `flag` varies over the stages or shards, leaves that are equal on all of
  them stay as they are: the devices have to agree before they drop such a leaf.
  """
  axes = set(varying_axes(flag))

  def kept(x: jax.Array) -> jax.Array:
    if not axes <= set(varying_axes(x)):
      return x
    return jnp.where(flag, x, jnp.zeros_like(x))

  return jax.tree.map(kept, tree)
