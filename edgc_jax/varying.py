"""Over which axes of a mesh JAX tracks values to vary, known when tracing."""

from collections.abc import Sequence
from typing import Any

import jax


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
