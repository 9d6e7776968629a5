"""Reviews leaves at `init`: warns of mistakes, and shows them to `describe`."""

import contextlib
import contextvars
from collections.abc import Generator, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp

from edgc_jax import validation
from edgc_jax.leaves.leaf import Leaf
from edgc_jax.wire.order import Axes, AxisName, names


class Reviewed(NamedTuple):
  """What the `init` of one reducer found."""

  axes: Axes
  leaves: tuple[Leaf, ...]
  budget: Any
  code: Any
  by_error: bool  # whether matrices share the bytes of a rank
  replicas: int | None  # their number, where the axis is bound


_HEAVY = 2**20  # bytes of a gradient from which dense leaves deserve a warning
_seen: contextvars.ContextVar[list[Reviewed] | None]
_seen = contextvars.ContextVar("seen", default=None)


def at_init(reviewed: Reviewed, min_ratio: float) -> None:
  """Warns of leaves that lose precision, and of ranks that save nothing."""
  seen = _seen.get()
  if seen is not None:
    facts = lambda x: (x.axes, x.leaves, x.budget.ladder, x.code)  # noqa: E731
    if facts(reviewed) not in map(facts, seen):  # `init` may run twice
      seen.append(reviewed)
    return
  _warn_if_nothing_saves(reviewed, min_ratio)
  _warn_if_most_is_dense(reviewed)
  _warn_of_dtypes(reviewed.leaves)


@contextlib.contextmanager
def reducers_seen() -> Generator[list[Reviewed]]:
  """Collects what all reducers find whose `init` runs inside, in order."""
  seen: list[Reviewed] = []
  token = _seen.set(seen)
  try:
    yield seen
  finally:
    _seen.reset(token)


def require_over(
  seen: Sequence[Reviewed], axis_name: AxisName, reducer: str
) -> None:
  """Raises unless all reducers in a wrapper are over its axis of replicas."""
  for own in seen:
    over = own.axes.replicas
    validation.require(
      set(names(over)) == set(names(axis_name)),
      "axis_name",
      axis_name,
      f"{over!r}, the axis of {reducer}",
      "give both the axis of the replicas",
    )


def _warn_if_nothing_saves(reviewed: Reviewed, min_ratio: float) -> None:
  """Warns if no rank of the ladder compresses any leaf.

  Warns:
    RuntimeWarning: if every leaf is sent dense at every rank.
  """
  ranks = [rank for rank in reviewed.budget.ladder if rank]
  if (
    ranks
    and reviewed.leaves
    and not any(x.is_compressed for x in reviewed.leaves)
  ):
    validation.warn(
      f"No leaf saves `min_ratio` ({min_ratio:g}) at rank {min(ranks)} or"
      " above, so all gradients are sent dense. Lower the rank or `min_ratio`,"
      " or give a `matrix_view` that folds the leaves into larger matrices;"
      " edgc_jax.describe(tx, params) shows the matrices."
    )


def _warn_if_most_is_dense(reviewed: Reviewed) -> None:
  """Warns if leaves with several axes that are sent dense are the larger part.

  Warns:
    RuntimeWarning: if they have more than half of all bytes, and some weight.
  """
  dense = [
    leaf
    for leaf in reviewed.leaves
    if leaf.view is not None and not leaf.is_compressed
  ]
  total = sum(leaf.size for leaf in reviewed.leaves)
  share = sum(leaf.size for leaf in dense) / max(total, 1)
  is_compressing = any(x.is_compressed and x.cap for x in reviewed.leaves)
  if is_compressing and share > 0.5 and 4 * total > _HEAVY:
    dense.sort(key=lambda leaf: -leaf.size)
    named = ", ".join(f"{x.path} {x.shape}" for x in dense[:3])
    validation.warn(
      f"{share:.0%} of the gradient's bytes are sent dense, in"
      f" {len(dense)} leaves such as {named}: their views save less than"
      " `min_ratio`. Give a `matrix_view` that returns the matrices which the"
      " layers multiply with, such as edgc_jax.scanned(1) for layers that are"
      " stacked along the second axis; edgc_jax.describe(tx, params) shows the"
      " matrices."
    )


def _warn_of_dtypes(leaves: Sequence[Leaf]) -> None:
  """Warns of leaves whose mean loses range or precision.

  Warns:
    RuntimeWarning: for float64, which is exchanged in float32, and for float16,
      whose mean is returned in float16, too narrow for an optimiser's squares.
  """
  for dtype, effect, remedy in (
    (
      jnp.float64,
      "exchanged in float32 and rounded to it",
      "Average such leaves with jax.lax.pmean, or train them in float32",
    ),
    (
      jnp.float16,
      "returned in float16, in which squares above 65504 are infinite, as in"
      " Adam's second moment",
      "Cast gradients to float32, and undo loss scaling, before the chain",
    ),
  ):
    paths = [leaf.path for leaf in leaves if leaf.dtype == dtype]
    if paths:
      validation.warn(
        f"Gradients of {jnp.dtype(dtype).name} are {effect}: {paths[0]}"
        f" ({len(paths)} of {len(leaves)} leaves). {remedy}."
      )
