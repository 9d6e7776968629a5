"""Reviews plans at `init`: warns of mistakes, and shows plans to `describe`."""

import contextlib
import contextvars
import warnings
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax.numpy as jnp

from edgc_jax.comm.dataflow import Axes
from edgc_jax.plan.leaves import Leaf
from edgc_jax.plan.plan import Plan


class Reviewed(NamedTuple):
  """The plans of one reducer, as its `init` made them."""

  axes: Axes
  plans: tuple[Plan, ...]  # one for each exchange

  @property
  def leaves(self) -> list[tuple[Leaf, Plan]]:
    """All leaves with their plans, in tree order."""
    places = [
      (place, leaf, plan)
      for plan in self.plans
      for place, leaf in zip(plan.positions, plan.leaves, strict=True)
    ]
    return [x[1:] for x in sorted(places, key=lambda x: x[0])]


_seen: contextvars.ContextVar[list[Reviewed] | None]
_seen = contextvars.ContextVar("seen", default=None)


def at_init(plan: Plan, plans: tuple[Plan, ...], axes: Axes) -> None:
  """Warns of leaves that lose precision, and of a plan that saves nothing.

  Args:
    plan: The plan of all leaves.
    plans: Its parts, one for each exchange.
    axes: The axes of the reducer.
  """
  seen = _seen.get()
  if seen is not None:
    reviewed = Reviewed(axes, plans)
    seen += [] if reviewed in seen else [reviewed]  # `init` may run twice
    return
  _warn_if_nothing_saves(plan)
  _warn_of_dtypes(plan.leaves)


@contextlib.contextmanager
def plans_seen() -> Iterator[list[Reviewed]]:
  """Collects the plans of all reducers whose `init` runs inside, in order."""
  token = _seen.set([])
  try:
    yield _seen.get()
  finally:
    _seen.reset(token)


def _warn_if_nothing_saves(plan: Plan) -> None:
  """Warns if no rank of the ladder compresses any leaf.

  Warns:
    RuntimeWarning: if every leaf is sent dense at every rung.
  """
  ranks = [rank for rank in plan.ladder if rank]
  if ranks and plan.leaves and not plan.compressible:
    warnings.warn(
      f"No leaf saves `min_ratio` ({plan.min_ratio:g}) at rank {min(ranks)} or"
      " above, so all gradients are sent dense. Lower the rank, or give a"
      " `matrix_view` that folds the leaves into larger matrices;"
      " edgc_jax.describe(tx, params) shows the matrices.",
      RuntimeWarning,
      stacklevel=5,
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
      warnings.warn(
        f"Gradients of {jnp.dtype(dtype).name} are {effect}: {paths[0]}"
        f" ({len(paths)} of {len(leaves)} leaves). {remedy}.",
        RuntimeWarning,
        stacklevel=5,
      )
