"""Decides how each leaf is sent, and predicts the bytes, before compilation.

A rank-r exchange of a matrix [m, n] sends P [m, r] and Q [n, r] instead of
m n values. Bytes are the payload of an all-reduce per replica. Rank 0 means
dense. `tests/wire_bytes_test.py` holds these numbers against the collectives
of the compiled program.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from edgc_jax import validation
from edgc_jax.comm import averages
from edgc_jax.comm.codes import Bfloat16, NativeBfloat16
from edgc_jax.plan.leaves import (
  Leaf,
  PlacementFn,
  ViewFn,
  describe,
  own_placement,
  trailing_matrix,
)

BYTES_PER_VALUE = 4
SKETCH_VALUES = (
  16  # of each matrix's residual: see `compression.linear_algebra`
)
# Sent in float32 with the factors of each matrix: the sketch and a norm.
_ERROR_VALUES = SKETCH_VALUES + 1
# More columns cost products; whether they would be worth it is not measured.
_WIDE = 64


class Layout(NamedTuple):
  """How the leaves of a plan are sent at one rank; indices into its leaves."""

  rank: int
  factored: tuple[int, ...]  # sent as factors
  columns: tuple[int, ...]  # of the factors of each `factored` leaf
  widths: tuple[int, ...]  # most columns that one of its matrices may have
  encoded: tuple[int, ...]  # sent dense, in the plan's code
  exact: tuple[int, ...]  # sent dense in float32


@dataclasses.dataclass(frozen=True)
class Plan:
  """Decides which leaves are sent as factors, at which rank.

  Attributes:
    leaves: The leaves exchanged together, in tree order.
    ladder: The ranks that may be used, 0 for dense, one collective shape each.
    min_ratio: Least m n / (r (m + n)) at which factors are sent.
    positions: Index of each leaf in the whole gradient.
    spread: How many times the rung's rank a matrix may have while others
      have less; 1 if all have the same.
    code: Encoding of values on the wire; None is float32.
  """

  leaves: tuple[Leaf, ...]
  ladder: tuple[int, ...]
  min_ratio: float
  positions: tuple[int, ...]
  spread: int = 1
  code: Bfloat16 | NativeBfloat16 | None = None

  def columns(self, leaf: Leaf, rank: int) -> int:
    """Columns of a leaf's factors at this rank; 0 if it is sent dense.

    The one place where the rank of a rung becomes the rank of a matrix.
    """
    if leaf.view is None or rank == 0:
      return 0
    rows, cols = leaf.view.rows, leaf.view.cols
    return min(rank, rows, cols) if self.saves(rows, cols, rank) else 0

  def saves(self, rows: Any, cols: Any, rank: Any) -> Any:
    """Whether factors of a [rows, cols] matrix save at least `min_ratio`.

    Arguments are integers, or arrays that broadcast.
    """
    columns = np.minimum(rank, np.minimum(rows, cols))
    return rows * cols >= self.min_ratio * columns * (rows + cols)

  def is_compressed(self, leaf: Leaf) -> bool:
    """Whether a leaf is sent as factors at some rung."""
    return any(self.columns(leaf, rank) for rank in self.ladder)

  def sends_factors(self, rank: int) -> bool:
    """Whether some leaf is sent as factors at this rank."""
    return any(self.columns(leaf, rank) for leaf in self.leaves)

  @functools.cached_property
  def compressible(self) -> tuple[int, ...]:
    """Indices of the leaves that are sent as factors at some rung."""
    leaves = enumerate(self.leaves)
    return tuple(i for i, leaf in leaves if self.is_compressed(leaf))

  @functools.cached_property
  def leaf_sizes(self) -> tuple[int, ...]:
    """Entries of each leaf."""
    return tuple([math.prod(leaf.shape) for leaf in self.leaves])

  @functools.cached_property
  def slots(self) -> dict[int, int]:
    """Position of each compressible leaf among them, by its index."""
    return {leaf: slot for slot, leaf in enumerate(self.compressible)}

  @functools.cached_property
  def matrices(self) -> tuple[Leaf, ...]:
    """The leaf of every matrix that is sent as factors at some rung.

    K matrices, in the order of leaves, then along their stacks: the order of
    every array over matrices.
    """
    leaves = (self.leaves[i] for i in self.compressible)
    return tuple(leaf for leaf in leaves for _ in range(leaf.view.count))

  @functools.cached_property
  def sides(self) -> np.ndarray:
    """Heights of P and Q of each of `matrices`; int64 [K, 2]."""
    sides = [(leaf.view.rows, leaf.view.cols) for leaf in self.matrices]
    return np.array(sides, np.int64).reshape(-1, 2)

  @functools.cached_property
  def sizes(self) -> np.ndarray:
    """Entries of each of `matrices`; float32 [K]."""
    return np.prod(self.sides, axis=1).astype(np.float32)

  @functools.cached_property
  def uniform_ranks(self) -> np.ndarray:
    """Columns of each matrix if all have the rung's rank; int32 [rungs, K]."""
    return self._by_rung_and_matrix(self.columns)

  @functools.cached_property
  def most_ranks(self) -> np.ndarray:
    """Most columns that each matrix may have; int32 [rungs, K]."""
    return self._by_rung_and_matrix(self.limit)

  def limit(self, leaf: Leaf, rank: int) -> int:
    """Most columns that a matrix may have at this rank; 0 if dense."""
    columns = self.columns(leaf, rank)
    if columns == 0 or self.spread == 1:
      return columns
    most = min(self.spread * columns, max(_WIDE, 2 * columns))
    if self.min_ratio:
      rows, cols = leaf.view.rows, leaf.view.cols
      most = min(most, int(rows * cols / (self.min_ratio * (rows + cols))))
    return min(max(most, columns), leaf.view.rows, leaf.view.cols)

  @functools.cached_property
  def factor_shapes(self) -> tuple[tuple[int, int, int], ...]:
    """Shapes [k, n, columns] of Q in the state: columns of the widest rung."""
    leaves = (self.leaves[i] for i in self.compressible)
    return tuple(
      (
        leaf.view.count,
        leaf.view.cols,
        max(self.limit(leaf, rank) for rank in self.ladder),
      )
      for leaf in leaves
    )

  @functools.cached_property
  def layouts(self) -> tuple[Layout, ...]:
    """The layout of every rung; equal ones at rungs that send the same."""
    layouts: dict[Any, Layout] = {}
    own = [self._layout(rank) for rank in self.ladder]
    for layout in own:
      layouts.setdefault((layout.factored, layout.columns), layout)
    return tuple(layouts[layout.factored, layout.columns] for layout in own)

  def by_leaf(self, values: jax.Array) -> list[jax.Array]:
    """Splits an array over matrices [K, ...] into one for each leaf."""
    counts = [self.leaves[i].view.count for i in self.compressible]
    return jnp.split(values, np.cumsum(counts)[:-1]) if counts else []

  def without_idle_ranks(self) -> "Plan":
    """Returns the plan without ranks that compress nothing.

    The least rank stays.
    """
    least = min((rank for rank in self.ladder if rank), default=0)
    kept = [
      rank
      for rank in self.ladder
      if rank in (0, least) or self.sends_factors(rank)
    ]
    return dataclasses.replace(self, ladder=tuple(kept))

  @property
  def dense_bytes(self) -> int:
    """Bytes of a dense float32 all-reduce of the whole gradient."""
    return BYTES_PER_VALUE * sum(self.leaf_sizes)

  @property
  def has_factors(self) -> bool:
    """Whether matrices are sent as factors, which the state keeps."""
    return True

  @property
  def has_residual(self) -> bool:
    """Whether there is error feedback."""
    return True

  def is_encoded(self, leaf: Leaf) -> bool:
    """Whether a leaf is encoded where it is sent dense.

    Vectors are not; and if some leaf is sent as factors, only leaves with a
    residual are.
    """
    if self.code is None or leaf.view is None:
      return False
    return not any(self.ladder) or self.is_compressed(leaf)

  @property
  def averages_in_parts(self) -> bool:
    """Whether encoded values are averaged by all-to-all and all-gather."""
    return not isinstance(self.code, NativeBfloat16 | None)

  def all_reduces(self, rank: int) -> int:
    """How many all-reduces follow each other in one exchange.

    An all-to-all and the all-gather after it count as one.
    """
    # Sketches and vectors are reduced apart from encoded values.
    exact = 1 if self.averages_in_parts else 0
    return (2 if self.sends_factors(rank) else 1) + exact

  def wire_bytes(self, rank: int, replicas: int = 1) -> int:
    """Predicts the bytes that one exchange sends at this rank.

    Args:
      rank: Columns of the factors, 0 for dense.
      replicas: Encoded values are padded to as many equal parts.

    Returns:
      k r (m + n) values for each leaf sent as factors, the size of each dense
      leaf, and 17 values a matrix to measure its error; 4 bytes each, or as
      many as the code has.
    """
    return self._bytes_of([self._layout(rank)], replicas)[0]

  def wire_bytes_by_rung(self, replicas: int) -> np.ndarray:
    """Predicts the bytes of one exchange at each rung; float32 [rungs]."""
    return np.array(self._bytes_of(self.layouts, replicas), np.float32)

  def _bytes_of(self, layouts: Sequence[Layout], replicas: int) -> list[int]:
    encoded, exact = [], []
    for layout in layouts:
      views = [self.leaves[i].view for i in layout.factored]
      columns = [
        view.count * own
        for view, own in zip(views, layout.columns, strict=True)
      ]
      encoded += [
        [view.rows * own for view, own in zip(views, columns, strict=True)],
        [view.cols * own for view, own in zip(views, columns, strict=True)]
        + [self.leaf_sizes[i] for i in layout.encoded],
      ]
      errors = _ERROR_VALUES * sum([view.count for view in views])
      exact.append(errors + sum([self.leaf_sizes[i] for i in layout.exact]))
    sent = averages.average_bytes(encoded, self.code, replicas)
    return [
      p + q + BYTES_PER_VALUE * own
      for p, q, own in zip(sent[::2], sent[1::2], exact, strict=True)
    ]

  def _layout(self, rank: int) -> Layout:
    columns = [self.columns(leaf, rank) for leaf in self.leaves]
    factored = [i for i, own in enumerate(columns) if own]
    dense = [i for i, own in enumerate(columns) if not own]
    return Layout(
      rank,
      tuple(factored),
      tuple(columns[i] for i in factored),
      tuple(self.limit(self.leaves[i], rank) for i in factored),
      tuple(i for i in dense if self.is_encoded(self.leaves[i])),
      tuple(i for i in dense if not self.is_encoded(self.leaves[i])),
    )

  def _by_rung_and_matrix(
    self, count: Callable[[Leaf, int], int]
  ) -> np.ndarray:
    ranks = [
      [count(leaf, rank) for leaf in self.matrices] for rank in self.ladder
    ]
    return np.array(ranks, np.int32).reshape(len(self.ladder), -1)


def make_plan(
  tree: Any,
  ladder: tuple[int, ...],
  min_ratio: float = 2.0,
  matrix_view: ViewFn = trailing_matrix,
  placement: PlacementFn = own_placement,
  kind: Callable[..., Plan] = Plan,
  **options: Any,
) -> Plan:
  """The plan for a tree of parameters or gradients (or their shapes).

  Ranks at which no leaf would be compressed are dropped from the ladder: they
  would send dense gradients under another name. The least rank stays.
  """
  leaves = tuple(describe(tree, matrix_view, placement))
  everything = tuple(range(len(leaves)))
  plan = kind(leaves, ladder, min_ratio, everything, **options)
  return plan.without_idle_ranks()


def require_ratio(min_ratio: float) -> None:
  """Raises unless `min_ratio` is a number of at least 0."""
  validation.require_number("min_ratio", min_ratio)
  validation.require(
    min_ratio >= 0, "min_ratio", min_ratio, "at least 0", "use 2 or more"
  )


def by_exchange(plan: Plan) -> tuple[Plan, ...]:
  """The plans of the leaves that are exchanged together, earliest first.

  What is a stage's own travels when the stage is done; the rest waits for
  stage 0, and travels at its rung. One ladder for both, so that a rung means
  the same rank: that of the first.

  Args:
    plan: The plan of all leaves.

  Returns:
    The plan of the own leaves and, if there are others, that of the rest.
  """
  is_own = [leaf.placement == "own" for leaf in plan.leaves]
  own = _part(plan, [i for i, own in enumerate(is_own) if own])
  own = own.without_idle_ranks()
  rest = _part(plan, [i for i, own in enumerate(is_own) if not own])
  if not rest.leaves:
    return (own,)
  return own, dataclasses.replace(rest, ladder=own.ladder, spread=1)


def _part(plan: Plan, members: Sequence[int]) -> Plan:
  return dataclasses.replace(
    plan,
    leaves=tuple(plan.leaves[i] for i in members),
    positions=tuple(plan.positions[i] for i in members),
  )


def as_tree(
  plans: Sequence[Plan], tree: Any, values: Sequence[Sequence]
) -> Any:
  """Arranges one value for each compressible leaf in a tree like `tree`.

  Args:
    plans: The plans of some or all leaves.
    tree: Parameters or gradients.
    values: For each plan, one value for each compressible leaf.

  Returns:
    The tree, with `optax.MaskedNode` where a leaf has no value.
  """
  structure = jax.tree.structure(tree)
  slots: list[Any] = [optax.MaskedNode()] * structure.num_leaves
  for plan, own in zip(plans, values, strict=True):
    for i, value in zip(plan.compressible, own, strict=True):
      slots[plan.positions[i]] = value
  return jax.tree.unflatten(structure, slots)


def from_tree(plans: Sequence[Plan], tree: Any) -> list[list[Any]]:
  """Returns the values that `as_tree` arranged; none from an empty tree."""
  values = jax.tree.leaves(tree)
  if not values:
    return [[] for _ in plans]
  places = sorted(p.positions[i] for p in plans for i in p.compressible)
  by_place = dict(zip(places, values, strict=True))
  return [[by_place[p.positions[i]] for i in p.compressible] for p in plans]
