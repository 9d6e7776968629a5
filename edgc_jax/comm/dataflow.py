"""Which collective comes first, where a platform does not see to it."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


def after(tree: Any, earlier: Any) -> Any:
  """A tree as it is, not to be had before all of another (their last values).

  The condition of a `where`, or of a branch where that would make a leaf vary
  over more axes, is always true, as no compiler can tell.
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
  """As `after` on CPUs, where collectives may overtake each other.

  XLA's CPU backend (of JAX 0.10.2) holds a collective back until those before
  it have started, and takes a conditional or a loop for started when those in
  it have not. What needs nothing of its results overtakes them, on one device
  sooner than on another, and operands that do not belong together are mixed
  up: stages as CPU devices of one process had their memory overwritten. So
  where one of two collectives is in a branch or a loop, the second waits for
  the first. Accelerators keep their order by themselves.
  """
  return after(tree, earlier) if jax.default_backend() == "cpu" else tree


def one_by_one(send: Callable[[jax.Array], jax.Array], tree: Any) -> Any:
  """What a collective makes of every leaf, each when the last is done."""
  leaves, structure = jax.tree.flatten(tree)
  results: list[jax.Array] = []
  last: list[jax.Array] = []  # that has values to wait for
  for leaf in leaves:
    result = send(in_turn(leaf, last))
    results.append(result)
    last = [result] if result.size else last
  return jax.tree.unflatten(structure, results)


def is_varying(value: jax.Array, axes: str | Sequence[str]) -> bool:
  """Whether `value` is tracked as different along one of the axes."""
  names = {axes} if isinstance(axes, str) else set(axes)
  return bool(names & set(varying_axes(value)))


def varying_axes(tree: Any) -> tuple[str, ...]:
  """All axes that some leaf is tracked to vary over."""
  axes = set()
  for leaf in jax.tree.leaves(tree):
    kind = jax.typeof(leaf).manual_axis_type
    axes |= set(kind.varying if kind else ())
  return tuple(sorted(axes))


def all_finite(tree: Any) -> jax.Array:
  """Whether every entry of every leaf is finite; bool []."""
  flags = [jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(tree)]
  return jnp.all(jnp.stack(flags)) if flags else jnp.array(True)


def zeros_unless(flag: jax.Array, tree: Any) -> Any:
  """Returns `tree`, or zeros if `flag` is false.

  Stages may differ in the flag. They have to agree before a leaf that is
  equal on all of them is dropped, so such leaves stay as they are.
  """
  axes = set(varying_axes(flag))

  def keep(leaf: jax.Array) -> jax.Array:
    if not axes <= set(varying_axes(leaf)):
      return leaf
    return jnp.where(flag, leaf, jnp.zeros_like(leaf))

  return jax.tree.map(keep, tree)
