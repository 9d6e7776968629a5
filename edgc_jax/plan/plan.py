"""Which leaves travel how, and what that sends, before anything is compiled.

A rank-r exchange of a matrix [m, n] sends P [m, r] and Q [n, r] instead of
m n values. Bytes are the payload of an all-reduce per replica. Rank 0 means
dense. `tests/wire_bytes_test.py` holds these numbers against the collectives
of the compiled program.
"""

import dataclasses
import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from edgc_jax import validation
from edgc_jax.comm import averages
from edgc_jax.comm.codes import Bfloat16, NativeBfloat16, code_of
from edgc_jax.plan.leaves import (
  Leaf,
  PlacementFn,
  ViewFn,
  describe,
  own_placement,
  trailing_matrix,
)

BYTES_PER_VALUE = 4
# Of each matrix, with its factors: what was not sent, sketched, and its norm.
SKETCH_VALUES = 16  # of each matrix on the wire, see `compression.sketch`
_ERROR_VALUES = SKETCH_VALUES + 1
# More columns cost products; whether they would be worth it is not measured.
_WIDE = 64


@dataclasses.dataclass(frozen=True)
class Plan:
  """Which leaves travel as factors at which rank.

  Attributes:
    leaves: The leaves exchanged together, in tree order.
    ladder: The ranks that may be used, 0 for dense, one collective shape each.
    min_ratio: Least m n / (r (m + n)) at which factors are sent.
    positions: Where the leaves stand in the whole gradient.
    spread: How many times the rung's rank a matrix may have while others
      have less; 1 where all have the same.
    code: How values travel; None is float32.
    alternating: Whether P travels in one step and Q in the next.
    refresh_every: Steps from one dense exchange that makes the factors anew to
      the next; 0 for never.
  """

  leaves: tuple[Leaf, ...]
  ladder: tuple[int, ...]
  min_ratio: float
  positions: tuple[int, ...]
  spread: int = 1
  code: Bfloat16 | NativeBfloat16 | None = None
  alternating: bool = False
  refresh_every: int = 0

  def columns(self, leaf: Leaf, rank: int) -> int:
    """Columns that a leaf's factors have at this rank; 0 if it goes dense.

    The one place where the rank of a rung becomes that of a matrix.
    """
    if leaf.view is None or rank == 0:
      return 0
    rows, cols = leaf.view.rows, leaf.view.cols
    return min(rank, rows, cols) if self.pays(rows, cols, rank) else 0

  def pays(self, rows: int, cols: int, rank: int) -> bool:
    """Whether factors of a [rows, cols] matrix save at least `min_ratio`."""
    columns = min(rank, rows, cols)
    return rows * cols >= self.min_ratio * columns * (rows + cols)

  @functools.cached_property
  def compressible(self) -> tuple[int, ...]:
    """Indices of the leaves that are sent as factors at some rung."""
    return tuple(i for i, leaf in enumerate(self.leaves) if self.takes(leaf))

  def sends_factors(self, rank: int) -> bool:
    """Whether some leaf is sent as factors at this rank."""
    return any(self.columns(leaf, rank) for leaf in self.leaves)

  def takes(self, leaf: Leaf) -> bool:
    """Whether a leaf is sent as factors at some rung."""
    return any(self.columns(leaf, rank) for rank in self.ladder)

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
    """Columns of each matrix where all have the rung's; int32 [rungs, K]."""
    ranks = [
      [self.columns(leaf, rank) for leaf in self.matrices]
      for rank in self.ladder
    ]
    return np.array(ranks, np.int32).reshape(len(self.ladder), -1)

  def by_leaf(self, values: jax.Array) -> list[jax.Array]:
    """An array over matrices [K, ...], cut into one for each leaf."""
    counts = [self.leaves[i].view.count for i in self.compressible]
    return jnp.split(values, np.cumsum(counts)[:-1]) if counts else []

  def limit(self, leaf: Leaf, rank: int) -> int:
    """The most columns that a matrix may have at this rank; 0 if dense."""
    columns = self.columns(leaf, rank)
    if columns == 0 or self.spread == 1:
      return columns
    most = min(self.spread * columns, max(_WIDE, 2 * columns))
    if self.min_ratio:
      rows, cols = leaf.view.rows, leaf.view.cols
      most = min(most, int(rows * cols / (self.min_ratio * (rows + cols))))
    return min(max(most, columns), leaf.view.rows, leaf.view.cols)

  def factor_columns(self, leaf: Leaf) -> int:
    """Columns of Q held in the state: as many as any rung may use."""
    return max(self.limit(leaf, rank) for rank in self.ladder)

  def without_idle_ranks(self) -> "Plan":
    """The plan without ranks that compress nothing; the least one stays."""
    least = min((rank for rank in self.ladder if rank), default=0)
    kept = [
      rank
      for rank in self.ladder
      if rank in (0, least)
      or any(self.columns(leaf, rank) for leaf in self.leaves)
    ]
    return dataclasses.replace(self, ladder=tuple(kept))

  @property
  def dense_bytes(self) -> int:
    """Bytes of a dense float32 all-reduce of the whole gradient."""
    return BYTES_PER_VALUE * sum(leaf.size for leaf in self.leaves)

  @property
  def has_factors(self) -> bool:
    """Whether matrices travel as factors, which are kept."""
    return True

  @property
  def has_residual(self) -> bool:
    """Whether there is error feedback."""
    return True

  def is_coded(self, leaf: Leaf) -> bool:
    """Whether a leaf travels coded where it is sent dense.

    Vectors do not; and beside factors only what has a residual does.
    """
    if self.code is None or leaf.view is None:
      return False
    return not any(self.ladder) or self.takes(leaf)

  def refreshes(self, count: jax.Array) -> jax.Array:
    """Whether step `count` makes the factors anew; bool []."""
    if not self.refresh_every:
      return jnp.array(False)
    return (count > 0) & (count % self.refresh_every == 0)

  @property
  def exchanges_parts(self) -> bool:
    """Whether what is coded is not reduced on its way (`averages`)."""
    return not isinstance(self.code, NativeBfloat16 | None)

  def all_reduces(self, rank: int) -> int:
    """How many there are one after the other; the two halves of one are one."""
    # Errors and vectors travel beside what is coded.
    beside = 1 if self.exchanges_parts else 0
    return (
      2 if self.sends_factors(rank) and not self.alternating else 1
    ) + beside

  def wire_bytes(self, rank: int, replicas: int = 1) -> int:
    """Bytes sent by the exchange of one step at this rank.

    Args:
      rank: Columns of the factors, 0 for dense.
      replicas: What is coded is padded to as many equal parts.

    Returns:
      sum over factor leaves of k r (m + n) values, over dense leaves of their
      sizes, and 17 values a matrix that tell its error, 4 bytes each or those
      of the code. Where factors alternate, the mean of two steps.
    """
    sides = self.wire_bytes_of_sides(rank, replicas)
    return sum(sides) // len(sides)

  def wire_bytes_of_sides(
    self, rank: int, replicas: int = 1
  ) -> tuple[int, ...]:
    """The same of a step that sends P and of one that sends Q, if they do."""
    factor_p, factor_q, dense, exact = [], [], [], 0
    for leaf in self.leaves:
      columns = self.columns(leaf, rank)
      if columns:
        count, rows, cols = leaf.view
        factor_p.append(count * columns * rows)
        factor_q.append(count * columns * cols)
        exact += count * _ERROR_VALUES
      elif self.is_coded(leaf):
        dense.append(leaf.size)
      else:
        exact += leaf.size
    groups = [(factor_p, factor_q + dense)]
    if self.alternating:
      groups = [(factor_p + dense,), (factor_q + dense,)]
    return tuple(
      sum(averages.average_bytes(group, self.code, replicas) for group in own)
      + BYTES_PER_VALUE * exact
      for own in groups
    )


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


def wire_bytes(
  params: Any,
  rank: int,
  *,
  min_ratio: float = 2.0,
  matrix_view: ViewFn = trailing_matrix,
  placement: PlacementFn = own_placement,
  lead_rank: int | None = None,
  rank_min: int | None = None,
  wire_dtype: Any = "float32",
  alternating: bool = False,
  replicas: int = 1,
) -> int:
  """Bytes one step's exchange sends per replica at a rank (0 is dense).

  Of `edgc`, `powersgd` and `allreduce`; what others send is in their `metrics`.

  Args:
    params: Parameters, gradients, or their `jax.ShapeDtypeStruct`s; on
      pipeline stages those of one stage.
    rank: Columns of the factors, 0 for dense.
    min_ratio: As for `edgc`.
    matrix_view: As for `edgc`.
    placement: As for `edgc`.
    lead_rank: On pipeline stages the rank of stage 0, at which all stages
      send what is not their own; None if it is the same.
    rank_min: The smallest rank of `edgc`, None if there is `rank` only: coded
      is what travels as factors at some rank, and at rank 0 alone everything.
    wire_dtype: As for `edgc`.
    alternating: As for `edgc`; the bytes are then the mean of two steps.
    replicas: What is coded is cut into so many equal parts, padded.

  Returns:
    The bytes, without those of entropy samples and of agreeing.

  Raises:
    TypeError: if a rank or `replicas` is not an integer.
    ValueError: if one of them is too small, or `wire_dtype` is none of those
      that there are.

  >>> import jax
  >>> weights = jax.ShapeDtypeStruct((768, 3072), "float32")
  >>> wire_bytes(weights, 0), wire_bytes(weights, 32)
  (9437184, 491588)
  """
  lead_rank = rank if lead_rank is None else lead_rank
  rank_min = rank if rank_min is None else rank_min
  for name, value, least in (
    ("rank", rank, 0), ("lead_rank", lead_rank, 0), ("rank_min", rank_min, 0),
    ("replicas", replicas, 1),
  ):  # fmt: skip
    validation.require_int(name, value, least)
  ladder = (rank, lead_rank, rank_min)
  plan = make_plan(
    params,
    ladder,
    min_ratio,
    matrix_view,
    placement,
    code=code_of(wire_dtype),
    alternating=alternating,
  )
  own, *rest = by_exchange(plan)
  return own.wire_bytes(rank, replicas) + sum(
    part.wire_bytes(lead_rank, replicas) for part in rest
  )


def ring_bytes(payload: float, replicas: int) -> float:
  """Bytes that every uplink moves where N replicas send a payload in a ring.

    2 (N - 1) / N payload

  >>> ring_bytes(1000, 4)
  1500.0
  """
  return payload * 2 * (replicas - 1) / replicas


def warn_if_nothing_pays(plan: Plan) -> None:
  """Warns where a ladder of ranks compresses no leaf at all.

  Warns:
    RuntimeWarning: if every leaf travels dense at every rung.
  """
  ranks = [rank for rank in plan.ladder if rank]
  if ranks and plan.leaves and not plan.compressible:
    warnings.warn(
      f"No leaf saves `min_ratio` ({plan.min_ratio:g}) at rank {min(ranks)} or"
      " above, so all gradients travel dense. Lower the rank, or give a"
      " `matrix_view` that folds the leaves into larger matrices.",
      RuntimeWarning,
      stacklevel=4,
    )
