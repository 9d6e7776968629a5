"""Properties and order of values while JAX traces a program.

Which mesh axes a value varies over, whether it is finite, and which of two
collectives runs first if the platform does not keep their order.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


def after(tree: Any, earlier: Any) -> Any:
  """Returns `tree` unchanged, with a data dependency on `earlier`.

  Every leaf is selected by a condition on the last value of each leaf of
  `earlier`. It is always true, but the compiler cannot know. A branch replaces
  the `where` for leaves that it would make vary over more axes.
  """
  may_send = None
  for leaf in jax.tree.leaves(earlier):
    if leaf.size:
      value = leaf[(-1,) * leaf.ndim].astype(jnp.float32)
      is_true = ~(value > 0) | (value > -1)
      may_send = is_true if may_send is None else may_send & is_true
  if may_send is None:
    return tree
  axes = set(varying_axes(may_send))

  def wait(leaf: jax.Array) -> jax.Array:
    if axes <= set(varying_axes(leaf)):
      return jnp.where(may_send, leaf, jnp.zeros_like(leaf))
    return lax.cond(may_send, lambda x: x, jnp.zeros_like, leaf)

  return jax.tree.map(wait, tree)


def in_turn(tree: Any, earlier: Any) -> Any:
  """Orders collectives on CPUs: `after(tree, earlier)` there, else `tree`.

  XLA's CPU backend (of JAX 0.10.2) holds a collective back until the previous
  ones have started, but takes a conditional or a loop for started before the
  collectives in it have. A collective that does not need their results then
  overtakes them, on one device sooner than on another, and operands of
  different collectives are mixed up: stages as CPU devices of one process had
  their memory overwritten. So if one of two collectives is in a branch or a
  loop, the second must depend on the first. Accelerators keep the order.
  """
  return after(tree, earlier) if jax.default_backend() == "cpu" else tree


def one_by_one(send: Callable[[jax.Array], jax.Array], tree: Any) -> Any:
  """Applies the collective `send` to each leaf, after the one before it."""
  leaves, structure = jax.tree.flatten(tree)
  results: list[jax.Array] = []
  last: list[jax.Array] = []  # the last result that is not empty
  for leaf in leaves:
    result = send(in_turn(leaf, last))
    results.append(result)
    last = [result] if result.size else last
  return jax.tree.unflatten(structure, results)


def is_varying(value: jax.Array, axes: str | Sequence[str]) -> bool:
  """Returns whether JAX tracks `value` as varying over any of the axes."""
  names = {axes} if isinstance(axes, str) else set(axes)
  return bool(names & set(varying_axes(value)))


def varying_axes(tree: Any) -> tuple[str, ...]:
  """Returns all axes that JAX tracks any leaf to vary over, sorted."""
  axes = set()
  for leaf in jax.tree.leaves(tree):
    kind = jax.typeof(leaf).manual_axis_type
    axes |= set(kind.varying if kind else ())
  return tuple(sorted(axes))


def all_finite(tree: Any) -> jax.Array:
  """Returns whether every entry of every leaf is finite; bool []."""
  flags = [jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(tree)]
  return jnp.all(jnp.stack(flags)) if flags else jnp.array(True)


def zeros_unless(flag: jax.Array, tree: Any) -> Any:
  """Returns `tree`, with zeros in place of its leaves if `flag` is false.

  If `flag` varies over the stages, leaves that are equal on all stages stay:
  the stages have to agree before they drop such a leaf.
  """
  axes = set(varying_axes(flag))

  def keep(leaf: jax.Array) -> jax.Array:
    if not axes <= set(varying_axes(leaf)):
      return leaf
    return jnp.where(flag, leaf, jnp.zeros_like(leaf))

  return jax.tree.map(keep, tree)
