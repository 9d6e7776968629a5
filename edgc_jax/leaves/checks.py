"""Checks of the gradients and of the state that `update` gets."""

import contextlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from edgc_jax import validation
from edgc_jax.leaves.leaf import (
  Leaf,
  LeafState,
  arrays_of,
  is_leaf_state,
  is_variable,
)
from edgc_jax.wire import collectives
from edgc_jax.wire.order import Axes, AxisName, is_varying, names


def require_local(
  gradients: Sequence[jax.Array],
  leaves: Sequence[Leaf],
  axis_name: AxisName,
  axes: Axes | None = None,
) -> None:
  """Raises if JAX's types show that gradients are already summed over the axis.

  Args:
    gradients: The leaves passed to `update`.
    leaves: Their descriptions.
    axis_name: The bound axes of the replicas.
    axes: All axes that do not shard leaves, to check that without types there
      are no more; None checks nothing.

  Raises:
    ValueError: if varying types are tracked and a leaf does not vary over all
      of the axes, or if they are not tracked and leaves may be sharded.
  """
  if collectives.num_devices(axis_name) == 1 or not gradients:
    return
  if not collectives.tracks_varying(axis_name):
    mesh = jax.sharding.get_abstract_mesh()
    if axes is not None and mesh.manual_axes:
      _require_no_more(mesh, axes)
    return
  summed = [
    leaf.path
    for gradient, leaf in zip(gradients, leaves, strict=True)
    if not all(is_varying(gradient, axis) for axis in names(axis_name))
  ]
  if summed:
    raise ValueError(
      f"`updates` must be local gradients that vary over axis {axis_name!r},"
      f" got gradients equal on all replicas at {summed[0] or 'the root'}"
      f" ({len(summed)} of {len(leaves)} leaves): under shard_map, jax.grad"
      " with respect to replicated parameters sums them over the axis,"
      " uncompressed;"
      f" differentiate with respect to jax.lax.pcast(params, {axis_name!r},"
      ' to="varying") instead, and drop any pmean or psum of the gradients. If'
      " the step does so already: only one reducer may see a leaf, so drop the"
      " other from the chain; and optax.MultiSteps types gradients as equal on"
      " all replicas, so use edgc_jax.accumulate in its place."
    )


def _require_no_more(mesh: jax.sharding.AbstractMesh, axes: Axes) -> None:
  """Raises if the mesh has bound axes that may shard leaves, without types."""
  more = sorted(set(mesh.manual_axes) - axes.known)
  more = [axis for axis in more if mesh.shape[axis] > 1]
  if more:
    raise ValueError(
      f"`check_vma` must be True, its default, on a mesh with further axes, got"
      f" False with {more}: only JAX's types show which leaves they shard;"
      " remove check_vma=False."
    )


def warn_of_narrow_gradients(
  gradients: Sequence[jax.Array],
  leaves: Sequence[Leaf],
  params: Sequence[jax.Array],
) -> None:
  """Warns of gradients in float16 whose parameters are wider.

  Warns:
    RuntimeWarning: if there are any. Scaled losses overflow in float16, and
      every step with an overflow is skipped.
  """
  narrow = [
    leaf.path
    for leaf, gradient, param in zip(leaves, gradients, params, strict=True)
    if gradient.dtype == jnp.float16 and param.dtype != jnp.float16
  ]
  if narrow:
    validation.warn(
      f"Gradients at {narrow[0]} ({len(narrow)} of {len(leaves)} leaves) are"
      " float16 although their parameters are not. Gradients that overflow in"
      " float16 on a replica make the reducer skip the step, and it returns"
      " means in float16. Cast gradients to float32, and divide by the scale of"
      " the loss, before `update`."
    )


def require_state(state: Any, kind: type) -> None:
  """Raises unless `update` got a state of the reducer's kind."""
  if not isinstance(state, kind):
    raise TypeError(
      f"`state` must be a {kind.__name__}, got a {type(state).__name__}; pass"
      " what `init` or `update` of this transformation returned, and not the"
      " state of a whole chain or of another one."
    )


def params_of(
  params: Any, updates: Any, leaves: Sequence[Leaf]
) -> list[jax.Array] | None:
  """Returns the parameter of each gradient; None if none were passed.

  Args:
    params: The parameters; None if they were not passed.
    updates: The gradients, with None for parameters that have none.
    leaves: Descriptions of the gradients.

  Raises:
    ValueError: if their numbers or a shape differ.
  """
  if params is None:
    return None
  with contextlib.suppress(ValueError, TypeError):  # trees that differ
    params = jax.tree.map(
      lambda u, p: None if u is None else p,
      updates,
      params,
      is_leaf=lambda u: u is None,
    )
  own = [
    p
    for p in jax.tree.leaves(arrays_of(params))
    if jnp.issubdtype(p.dtype, jnp.floating)
  ]
  validation.require(
    len(own) == len(leaves),
    "params",
    f"{len(own)} arrays",
    f"the {len(leaves)} parameters of which `updates` are the gradients",
    "pass the tree that `init` got",
  )
  for param, leaf in zip(own, leaves, strict=True):
    shape = tuple(param.shape)
    validation.require(
      shape == leaf.shape,
      "params",
      shape,
      f"the parameters of which `updates` are the gradients, of shape"
      f" {leaf.shape} at {leaf.path or 'the root'}",
      "pass the tree that `init` got",
    )
  return own


def require_same_leaves(tree: Any, like: Any, name: str = "updates") -> None:
  """Raises unless gradients, or parameters, have the leaves that `init` saw.

  Args:
    tree: The tree passed to `update`.
    like: The tree of the leaves' states.
    name: Of the argument.

  Raises:
    ValueError: if a leaf is missing (a gradient is None, for example) or new.
  """
  now, then = (
    {
      jax.tree_util.keystr(path)
      for path, _ in jax.tree_util.tree_leaves_with_path(
        own, is_leaf=lambda x: is_leaf_state(x) or is_variable(x)
      )
    }
    for own in (tree, like)
  )
  missing, new = sorted(then - now), sorted(now - then)
  if missing or new:
    found = f"none at {missing[0]}" if missing else f"one more at {new[0]}"
    remedy = "pass the parameters that `init` was given"
    if name == "updates":
      remedy = (
        "a gradient that is None is no leaf, so pass zeros, or split the tree"
        " with optax.partition before `init`"
      )
    raise ValueError(
      f"`{name}` must have the leaves of the parameters that `init` saw, got"
      f" {found} ({len(missing)} missing, {len(new)} more); {remedy}."
    )


def require_shapes(leaf: Leaf, state: LeafState) -> None:
  """Raises unless the arrays of a leaf's state have the shapes of one replica.

  Only shapes distinguish the arrays of one replica from global ones.

  Raises:
    ValueError: if an array has another shape.
  """
  of_residual = (1, *leaf.shape) if leaf.has_residual else None
  for name, found, expected in (
    ("factor_q", state.factor_q, leaf.shape_of_q),
    ("residual", getattr(state.residual, "values", None), of_residual),
  ):
    got = None if found is None else tuple(found.shape)
    is_other_rank = name == "factor_q" and got and expected
    if is_other_rank and got[::2] == expected[::2] and got != expected:
      raise ValueError(
        f"`state` must be made with the options of this reducer, got factors of"
        f" {got[1]} columns for the leaf at {leaf.path or 'the root'}, where"
        f" they need {expected[1]}; pass the old rank, or give the state other"
        " factors with edgc_jax.resize."
      )
    if got != expected:
      raise ValueError(
        f"`state` must be the state of one replica, with a {name} of shape"
        f" {expected} for the leaf at {leaf.path or 'the root'}, got {got};"
        " under jax.shard_map create it inside, with jax.shard_map(tx.init,"
        " mesh=mesh, in_specs=PartitionSpec(), out_specs=edgc_jax.state_specs("
        "tx, params)); resize a state of another number of replicas with"
        " edgc_jax.resize; a state of other options, such as another"
        " method, cannot be continued."
      )
