"""Decides how each leaf is sent, and predicts the bytes, before compilation.

A rank-r exchange of a matrix [m, n] sends P [m, r] and Q [n, r] instead of
m n values; rank 0 means dense. Bytes are the payload of an all-reduce per
replica; `tests/wire_bytes_test.py` compares them with compiled programs.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from edgc_jax.comm import averages
from edgc_jax.comm.codes import Code, NativeBfloat16
from edgc_jax.plan.leaves import (
  Leaf,
  MatrixView,
  PlacementFn,
  ShardsFn,
  ViewFn,
  layer_matrix,
  leaves_in,
  own_placement,
)

BYTES_PER_VALUE = 4
# Sketch of each matrix's residual, see `compression.linear_algebra`.
SKETCH_VALUES = 16
# Sent in float32 with the factors of each matrix: the sketch and a norm.
_ERROR_VALUES = SKETCH_VALUES + 1
# More columns take more products; whether they are worth it is not measured.
_WIDE = 64


class Layout(NamedTuple):
  """How the leaves of a plan are sent at one rank, as indices of leaves."""

  factored: tuple[int, ...]  # leaves sent as factors
  columns: tuple[int, ...]  # columns of the factors of each `factored` leaf
  encoded: tuple[int, ...]  # leaves sent dense, in the plan's code
  exact: tuple[int, ...]  # leaves sent dense in float32


class Group(NamedTuple):
  """Rungs at which the same leaves are sent as factors.

  They share all computation, and differ in the length of what is sent.
  """

  factored: tuple[int, ...]  # leaves sent as factors
  widths: tuple[int, ...]  # most columns of one matrix of each such leaf
  encoded: tuple[int, ...]  # leaves sent dense, in the plan's code
  exact: tuple[int, ...]  # leaves sent dense in float32
  layouts: tuple[Layout, ...]  # different ones, by rising rung
  by_rung: tuple[int, ...]  # index into `layouts`; -1 for rungs of other groups


@dataclasses.dataclass(frozen=True)
class Plan:
  """Decides which leaves are sent as factors, at which rank.

  Attributes:
    leaves: The leaves exchanged together, in tree order.
    ladder: The ranks that may be used, 0 for dense.
    min_ratio: Least m n / (r (m + n)) at which factors are sent.
    positions: Index of each leaf in the whole gradient.
    spread: Largest ratio of a matrix's rank to the rung's; 1 if all are equal.
    code: Encoding of values on the wire; None is float32.
    first_rung: The first rung in use; those before it are not compiled.
  """

  leaves: tuple[Leaf, ...]
  ladder: tuple[int, ...]
  min_ratio: float
  positions: tuple[int, ...]
  spread: int = 1
  code: Code | NativeBfloat16 | None = None
  first_rung: int = 0
  has_factors: ClassVar[bool] = True  # whether the state keeps factors Q
  has_residual: ClassVar[bool] = True  # and residuals of what are factors

  def columns(self, leaf: Leaf, rank: int) -> int:
    """Returns the columns of a leaf's factors at a rung's rank; 0 if dense.

    Only here does the rank of a rung become the rank of a matrix.
    """
    if leaf.view is None or rank == 0:
      return 0
    rows, cols = leaf.view.rows, leaf.view.cols
    return min(rank, rows, cols) if self.saves(rows, cols, rank) else 0

  def saves(self, rows: Any, cols: Any, rank: Any) -> Any:
    """Returns whether factors save at least `min_ratio`; arrays broadcast."""
    columns = np.minimum(rank, np.minimum(rows, cols))
    # m n / (r (m + n)) >= min_ratio
    return rows * cols >= self.min_ratio * columns * (rows + cols)

  def is_compressed(self, leaf: Leaf) -> bool:
    """Returns whether a leaf is sent as factors at some rung."""
    return any(self.columns(leaf, rank) for rank in self.ladder)

  def sends_factors(self, rank: int) -> bool:
    """Returns whether some leaf is sent as factors at this rank."""
    return any(self.columns(leaf, rank) for leaf in self.leaves)

  @functools.cached_property
  def compressible(self) -> tuple[int, ...]:
    """Indices of the leaves that are sent as factors at some rung."""
    leaves = enumerate(self.leaves)
    return tuple(i for i, leaf in leaves if self.is_compressed(leaf))

  @functools.cached_property
  def shards(self) -> tuple[str, ...]:
    """Axes over which any leaf is sharded, sorted."""
    return tuple(sorted(set().union(*[leaf.shards for leaf in self.leaves])))

  @functools.cached_property
  def leaf_sizes(self) -> tuple[int, ...]:
    """Entries of each leaf."""
    return tuple([math.prod(leaf.shape) for leaf in self.leaves])

  def places(self, members: Sequence[int]) -> tuple[int, ...]:
    """Returns the indices in the whole gradient of the leaves `members`."""
    return tuple(self.positions[i] for i in members)

  @functools.cached_property
  def with_residual(self) -> tuple[int, ...]:
    """Indices of the leaves whose errors are fed back."""
    kept = set(self.compressible if self.has_residual else ())
    if self.code and self.code.needs_feedback:
      kept |= {i for i, x in enumerate(self.leaves) if self.is_encoded(x)}
    return tuple(sorted(kept))

  @functools.cached_property
  def matrices(self) -> tuple[Leaf, ...]:
    """The leaf of each of the K matrices that are factors at some rung.

    Ordered by leaf, then along the stack, as all arrays over matrices.
    """
    leaves = (self.leaves[i] for i in self.compressible)
    return tuple(leaf for leaf in leaves for _ in range(leaf.view.count))

  @functools.cached_property
  def sides(self) -> np.ndarray:
    """Heights of P and Q of each of `matrices`; int64 [K, 2]."""
    sides = [_heights(leaf.view) for leaf in self.matrices]
    return np.array(sides, np.int64).reshape(-1, 2)

  @functools.cached_property
  def sizes(self) -> np.ndarray:
    """Entries of each of `matrices`; float32 [K]."""
    return np.prod(self.sides, axis=1).astype(np.float32)

  @functools.cached_property
  def uniform_ranks(self) -> np.ndarray:
    """Columns of each matrix at the rung's rank; int32 [rungs, K]."""
    return self._by_rung_and_matrix(self.columns)

  @functools.cached_property
  def most_ranks(self) -> np.ndarray:
    """Largest number of columns of each matrix; int32 [rungs, K]."""
    return self._by_rung_and_matrix(self.limit)

  def limit(self, leaf: Leaf, rank: int) -> int:
    """Returns the most columns of a leaf's matrices at a rank; 0 if dense."""
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
    """Shapes [k, n, columns] of Q in the state, for the widest rung."""
    leaves = (self.leaves[i] for i in self.compressible)
    return tuple(
      (
        leaf.view.count,
        _heights(leaf.view)[1],
        max(self.limit(leaf, rank) for rank in self.ladder),
      )
      for leaf in leaves
    )

  @functools.cached_property
  def layouts(self) -> tuple[Layout, ...]:
    """The layout of every rung; rungs that send the same have equal ones."""
    return tuple(self._layout(rank) for rank in self.ladder)

  @functools.cached_property
  def groups(self) -> tuple[Group, ...]:
    """The groups of the rungs that can be in use, each compiled once."""
    members: dict[tuple[int, ...], list[int]] = {}
    for rung in range(self.first_rung, len(self.ladder)):
      members.setdefault(self.layouts[rung].factored, []).append(rung)
    return tuple(
      self._group(factored, rungs) for factored, rungs in members.items()
    )

  def by_leaf(self, values: jax.Array) -> list[jax.Array]:
    """Splits an array over matrices [K, ...] into one array per leaf."""
    counts = [self.leaves[i].view.count for i in self.compressible]
    return jnp.split(values, np.cumsum(counts)[:-1]) if counts else []

  def without_idle_ranks(self) -> "Plan":
    """Drops ranks that compress nothing from the ladder, except the least."""
    least = min((rank for rank in self.ladder if rank), default=0)
    kept = [
      rank
      for rank in self.ladder
      if rank in (0, least) or self.sends_factors(rank)
    ]
    # A fixed schedule of ranks is dense where it names a rank that is dropped.
    first = self.first_rung if len(kept) == len(self.ladder) else 0
    return dataclasses.replace(self, ladder=tuple(kept), first_rung=first)

  @property
  def dense_bytes(self) -> int:
    """Bytes of a dense float32 all-reduce of all leaves."""
    return BYTES_PER_VALUE * sum(self.leaf_sizes)

  def is_encoded(self, leaf: Leaf) -> bool:
    """Returns whether a leaf is encoded when it is sent dense.

    If the code needs error feedback, all that get smaller are: they have a
    residual. Otherwise vectors are not, and if the ladder has ranks, only
    leaves that are factors at some rung are, which have a residual anyway.
    """
    if self.code is None or leaf.placement == "shared":
      return False
    if self.code.needs_feedback:
      (sent,) = averages.average_bytes([[leaf.size]], self.code)
      return self.is_compressed(leaf) or sent < BYTES_PER_VALUE * leaf.size
    if leaf.view is None:
      return False
    return not any(self.ladder) or self.is_compressed(leaf)

  @property
  def averages_in_parts(self) -> bool:
    """Whether encoded values are averaged by all-to-all and all-gather."""
    return not isinstance(self.code, NativeBfloat16 | None)

  def all_reduces(self, rank: int) -> int:
    """Counts consecutive all-reduces; an all-to-all and all-gather are one."""
    # Sketches and vectors are reduced separately from encoded values.
    exact = 1 if self.averages_in_parts else 0
    return (2 if self.sends_factors(rank) else 1) + exact

  def wire_bytes(self, rank: int, replicas: int = 1) -> int:
    """Predicts the bytes that one exchange sends at this rank.

    Counts k r (m + n) values for each leaf sent as factors, each dense leaf,
    and 17 values per matrix for its error. A value has 4 bytes, or its code's.

    Args:
      rank: Columns of the factors; 0 for dense.
      replicas: Encoded values are padded to as many equal parts.
    """
    return self._bytes_of([self._layout(rank)], replicas)[0]

  def wire_bytes_by_rung(self, replicas: int) -> np.ndarray:
    """Predicts the bytes of one exchange at each rung; float32 [rungs]."""
    return np.array(self._bytes_of(self.layouts, replicas), np.float32)

  def _bytes_of(self, layouts: Sequence[Layout], replicas: int) -> list[int]:
    encoded, exact = [], []
    for layout in layouts:
      views = [self.leaves[i].view for i in layout.factored]
      sizes = [
        np.multiply(_heights(view), view.count * width).tolist()
        for view, width in zip(views, layout.columns, strict=True)
      ]
      # All P in one exchange, all Q and the encoded dense leaves in another.
      encoded += [
        [p for p, _ in sizes],
        [q for _, q in sizes] + [self.leaf_sizes[i] for i in layout.encoded],
      ]
      errors = _ERROR_VALUES * sum([view.count for view in views])
      exact.append(errors + sum([self.leaf_sizes[i] for i in layout.exact]))
    sent = averages.average_bytes(encoded, self.code, replicas)
    return [
      p + q + BYTES_PER_VALUE * values
      for p, q, values in zip(sent[::2], sent[1::2], exact, strict=True)
    ]

  def _layout(self, rank: int) -> Layout:
    columns = [self.columns(leaf, rank) for leaf in self.leaves]
    factored = [i for i, width in enumerate(columns) if width]
    dense = [i for i, width in enumerate(columns) if not width]
    return Layout(
      tuple(factored),
      tuple(columns[i] for i in factored),
      tuple(i for i in dense if self.is_encoded(self.leaves[i])),
      tuple(i for i in dense if not self.is_encoded(self.leaves[i])),
    )

  def _group(self, factored: tuple[int, ...], rungs: Sequence[int]) -> Group:
    layouts = list(dict.fromkeys(self.layouts[rung] for rung in rungs))
    ranks = [self.ladder[rung] for rung in rungs]
    by_rung = [
      layouts.index(layout) if rung in rungs else -1
      for rung, layout in enumerate(self.layouts)
    ]
    return Group(
      factored,
      tuple(
        max(self.limit(self.leaves[i], r) for r in ranks) for i in factored
      ),
      layouts[0].encoded,
      layouts[0].exact,
      tuple(layouts),
      tuple(by_rung),
    )

  def _by_rung_and_matrix(
    self, count: Callable[[Leaf, int], int]
  ) -> np.ndarray:
    ranks = [
      [count(leaf, rank) for leaf in self.matrices] for rank in self.ladder
    ]
    return np.array(ranks, np.int32).reshape(len(self.ladder), -1)


def _heights(view: MatrixView) -> list[int]:
  """Returns the heights of P, which is on the smaller side, and of Q."""
  return sorted([view.rows, view.cols])


def make_plan(
  tree: Any,
  ladder: tuple[int, ...],
  min_ratio: float = 2.0,
  matrix_view: ViewFn = layer_matrix,
  placement: PlacementFn = own_placement,
  shards: ShardsFn | None = None,
  kind: Callable[..., Plan] = Plan,
  **options: Any,
) -> Plan:
  """Makes the plan for a tree of parameters or gradients, or their shapes.

  Drops ranks that compress no leaf from the ladder, except for the least: they
  would only be another name for dense.

  Args:
    tree: Arrays or `jax.ShapeDtypeStruct`s.
    ladder: The ranks, 0 for dense.
    min_ratio: Least m n / (r (m + n)) at which factors are sent.
    matrix_view: Returns the view of a leaf.
    placement: Returns the placement of a leaf.
    shards: Returns the axes over which each leaf is sharded.
    kind: The class of the plan.
    **options: Its other attributes.
  """
  leaves = leaves_in(tree, matrix_view, placement, shards and shards(tree))
  plan = kind(leaves, ladder, min_ratio, tuple(range(len(leaves))), **options)
  return plan.without_idle_ranks()


def by_exchange(plan: Plan) -> tuple[Plan, ...]:
  """Splits a plan into one for each exchange, in their order.

  A stage sends its own leaves once its backward pass is done. The other leaves
  wait for stage 0, and are sent at its rung. On shards each combination of axes
  that shards leaves has an exchange, the largest first: factors must not depend
  on what differs over further axes. All plans have the ladder of the first.
  """
  first, late, groups = [], [], {}
  for i, leaf in enumerate(plan.leaves):
    if leaf.placement != "own":
      late.append(i)
    elif plan.is_compressed(leaf) or plan.is_encoded(leaf):
      groups.setdefault(leaf.shards, []).append(i)
    else:
      first.append(i)
  if groups:
    most = max(groups, key=lambda a: sum(plan.leaf_sizes[i] for i in groups[a]))
    first += groups.pop(most)
    if most != plan.shards:  # ranks by matrix differ over all axes
      plan = dataclasses.replace(plan, spread=1)
  own = subset(plan, sorted(first)).without_idle_ranks()
  rest = [subset(plan, x) for x in (*groups.values(), late) if x]
  how = {"ladder": own.ladder, "first_rung": own.first_rung, "spread": 1}
  return own, *[dataclasses.replace(part, **how) for part in rest]


def subset(plan: Plan, members: Sequence[int]) -> Plan:
  """Returns the plan of the leaves at the indices `members`."""
  return dataclasses.replace(
    plan,
    leaves=tuple(plan.leaves[i] for i in members),
    positions=tuple(plan.positions[i] for i in members),
  )
