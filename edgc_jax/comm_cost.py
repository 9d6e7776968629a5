"""What each rank sends, in bytes, before anything is compiled.

A rank-r exchange of a matrix [m, n] sends P [m, r] and Q [n, r] instead of
m n values. Bytes are the payload of an all-reduce per replica, float32. Rank
0 means dense. `tests/wire_bytes_test.py` holds these numbers against the
collectives of the compiled program.
"""

import dataclasses
import functools
from typing import Any

from edgc_jax.matrices import Leaf, ViewFn, describe, trailing_matrix

BYTES_PER_VALUE = 4
# Sums of |M_i|^2 and of |Q_i|^2, which travel with the factors.
_ENERGY_SCALARS = 2


@dataclasses.dataclass(frozen=True)
class Plan:
  """Which leaves travel as factors at which rank.

  Attributes:
    leaves: The gradient's leaves, in tree order.
    ladder: The ranks that may be used, 0 for dense, one collective shape each.
    min_ratio: Least m n / (r (m + n)) at which factors are sent.
  """

  leaves: tuple[Leaf, ...]
  ladder: tuple[int, ...]
  min_ratio: float

  def sends_factors(self, leaf: Leaf, rank: int) -> bool:
    """Whether a leaf is sent as factors at this rank, or else dense."""
    if leaf.view is None or rank == 0:
      return False
    return self.pays(leaf.view.rows, leaf.view.cols, rank)

  def pays(self, rows: int, cols: int, rank: int) -> bool:
    """Whether factors of a [rows, cols] matrix save at least `min_ratio`."""
    columns = min(rank, rows, cols)
    return rows * cols >= self.min_ratio * columns * (rows + cols)

  @functools.cached_property
  def compressible(self) -> tuple[int, ...]:
    """Indices of the leaves that are sent as factors at some rung."""
    return tuple(
      i
      for i, leaf in enumerate(self.leaves)
      if any(self.sends_factors(leaf, rank) for rank in self.ladder)
    )

  @functools.cached_property
  def matrix_shapes(self) -> tuple[tuple[int, int], ...]:
    """The distinct (rows, cols) of the compressible leaves."""
    views = (self.leaves[i].view for i in self.compressible)
    return tuple(dict.fromkeys((v.rows, v.cols) for v in views))

  def shape_index(self, leaf: Leaf) -> int:
    """Position of a compressible leaf's shape in `matrix_shapes`."""
    return self.matrix_shapes.index((leaf.view.rows, leaf.view.cols))

  def factor_columns(self, leaf: Leaf) -> int:
    """Columns of Q held in the state: the largest rank, clipped by shape."""
    return min(max(self.ladder), leaf.view.rows, leaf.view.cols)

  @property
  def dense_bytes(self) -> int:
    """Bytes of a dense float32 all-reduce of the whole gradient."""
    return BYTES_PER_VALUE * sum(leaf.size for leaf in self.leaves)

  def wire_bytes(self, rank: int) -> int:
    """Bytes sent by the exchange of one step at this rank.

    Args:
      rank: Columns of the factors, 0 for dense.

    Returns:
      sum over factor leaves of 4 k r (m + n), over dense leaves of 4 size,
      and the two scalars that give the relative error.
    """
    values = 0
    for leaf in self.leaves:
      if self.sends_factors(leaf, rank):
        count, rows, cols = leaf.view
        values += count * min(rank, rows, cols) * (rows + cols)
      else:
        values += leaf.size
    if any(self.sends_factors(leaf, rank) for leaf in self.leaves):
      values += _ENERGY_SCALARS
    return BYTES_PER_VALUE * values


def make_plan(
  tree: Any,
  ladder: tuple[int, ...],
  min_ratio: float = 2.0,
  matrix_view: ViewFn = trailing_matrix,
) -> Plan:
  """The plan for a tree of parameters or gradients (or their shapes).

  Ranks at which no leaf would be compressed are dropped from the ladder: they
  would send dense gradients under another name. The least rank stays.
  """
  plan = Plan(tuple(describe(tree, matrix_view)), tuple(ladder), min_ratio)
  least = min((rank for rank in ladder if rank), default=0)
  kept = [
    rank
    for rank in plan.ladder
    if rank in (0, least)
    or any(plan.sends_factors(leaf, rank) for leaf in plan.leaves)
  ]
  return dataclasses.replace(plan, ladder=tuple(kept))


def wire_bytes(
  params: Any,
  rank: int,
  *,
  min_ratio: float = 2.0,
  matrix_view: ViewFn = trailing_matrix,
) -> int:
  """Bytes one step's exchange sends per replica at a rank (0 is dense).

  Args:
    params: Parameters, gradients, or their `jax.ShapeDtypeStruct`s.
    rank: Columns of the factors, 0 for dense.
    min_ratio: As for `edgc`.
    matrix_view: As for `edgc`.

  Returns:
    The bytes, without those of entropy samples.

  >>> import jax
  >>> weights = jax.ShapeDtypeStruct((768, 3072), "float32")
  >>> wire_bytes(weights, 0), wire_bytes(weights, 32)
  (9437184, 491528)
  """
  return make_plan(params, (rank,), min_ratio, matrix_view).wire_bytes(rank)
