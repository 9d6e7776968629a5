"""Sends matrices as two thin factors: one step of subspace iteration.

For every matrix M [m, n] = gradient + residual with m <= n, or for M^T if M has
more rows than columns, at rank r:

  P   = orth(mean_i M_i unit(Q))       a round of [m, r]
  Q_i = M_i^T P,  Q' = mean_i Q_i      a round of [n, r]
  update = P Q'^T,  residual_i = M_i - P Q_i^T

The search is warm-started by the last Q (Vogels et al. 2019, Algorithm 1,
arXiv:1905.13727). Departures from the paper:

- Factors are sent in 4 bits, unless `wire_dtype` says otherwise.
- A replica subtracts the approximation P Q_i^T of its own M_i; the paper
  subtracts the mean update. Both residuals have the same mean, so all updates
  are the same. But the paper's residual never sends the differences between
  replicas, which add up in it from step to step.
- P is on the smaller side of M, where r directions are a larger share of all.
- Q is made nearly orthonormal before use, and vanishing columns get new
  directions (`linear_algebra.revive`): a gradient of low rank leaves zero
  columns, and M^T 0 = 0 would keep them zero permanently.
- The basis is a Gram-Schmidt basis in the order of columns. That makes the
  step an orthogonal iteration, whose columns converge to the singular vectors,
  the strongest first: slicing Q to a smaller rank keeps the best ones. Columns
  beyond the rank in use stay in the state and are used again when the rank
  grows back. The residual does not depend on the rank and is kept.

Replicas on processors that round differently get the same update, to about
1e-6 of its norm, at every step. Each computes P by itself, but as a continuous
function of a factor that all have received. Numbers that are averaged later
may differ between replicas.

If values are encoded, the residual keeps the encoding error of Q. The encoding
error of P does not matter, since all replicas use the P that they received.

Factors are stacks of rows [k, width, height]: row c is a column of P or Q. If
ranks change, all rows are computed, and those beyond the rank are zero.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from edgc_jax import validation
from edgc_jax.budget.allocation import ErrorAllocation, ErrorAllocator
from edgc_jax.leaves.leaf import Leaf, LeafState, cap_of
from edgc_jax.methods import linear_algebra, sketches
from edgc_jax.reducer.reducer import (
  by_exchange,
  exchanges_of,
  matrices_of,
  shards_of,
)
from edgc_jax.reducer.rounds import (
  DENSE,
  Draws,
  Each,
  Energies,
  Method,
  Outcome,
  Rounds,
  added,
  each,
  is_encoded,
)
from edgc_jax.wire import packing
from edgc_jax.wire.codes import Code
from edgc_jax.wire.wire import Send


def low_rank(
  leaf: Leaf,
  terms: Sequence[tuple[jax.Array, ...]],
  state: LeafState,
  ranks: jax.Array,
  draws: Draws,
) -> Rounds:
  """Sends the k matrices of a stack of leaves as factors.

  Wire: r (m + n) + 17 values for each matrix.

  Args:
    leaf: The stack; its width is the width of both factors.
    terms: The arrays whose sum is M, of each leaf of the stack.
    state: Q.
    ranks: int32 [k], columns in use.
    draws: Signs of the sketch, and of new directions.
  """
  used = None if leaf.is_fixed else ranks
  ends = np.cumsum([len(own[0]) for own in terms])[:-1]

  def cut(x: jax.Array) -> list[jax.Array]:
    return jnp.split(x, ends) if len(ends) else [x]

  def of_leaves(function: Callable[..., Any], rows: jax.Array) -> Any:
    """Maps a function of the rows of a factor, and of M."""
    found = [
      each(lambda x, own: function(x, added(*own)), (x, own))
      for x, own in zip(cut(rows), terms, strict=True)
    ]
    return jax.tree.map(lambda *xs: jnp.concatenate(xs), *found)

  # P_i = M_i unit(Q)
  q = yield Each(linear_algebra.unit_columns, (state.factor_q,))
  search = functools.partial(linear_algebra.product, leaf.is_tall)
  p = yield Send(of_leaves(search, q), used)
  unit = linear_algebra.unit_of(p.mean)
  # P = orth(mean_i P_i)
  basis = yield Each(linear_algebra.orthonormalize, (p.mean,))

  def project(rows: jax.Array, m: jax.Array) -> tuple:
    rows = linear_algebra.product(not leaf.is_tall, rows, m)
    return rows, linear_algebra.energy(m, unit)

  # Q_i = M_i^T P, and u^T M_i, the rows of a sketch, in one pass
  rows, energy = of_leaves(
    project, jnp.concatenate([draws.short, basis.rows], axis=1)
  )
  own_q = rows[:, 1:]
  z = yield Each(
    sketches.residual_sketch,
    (rows[:, 0], basis.rows, own_q, draws.short[:, 0], draws.long),
  )
  # |M_i - P Q_i^T|^2 = |M_i|^2 - |Q_i|^2; the encoding error is much smaller.
  energy -= linear_algebra.energy(own_q, unit)
  q = yield Send(own_q, used, measured=(z, energy))

  # update = P Q'^T,  residual_i = M_i - P Q_i^T
  product = jax.vmap(
    functools.partial(linear_algebra.outer_product, leaf.is_tall)
  )
  update, left = [], []
  for p, mean, sent, own in zip(
    *map(cut, (basis.rows, q.mean, q.sent)), terms, strict=True
  ):
    update.append(product(p, mean))
    left.append(added(*own) - product(p, sent))
  z, energy = q.measured
  lost = sketches.squared(z, unit)
  units = jnp.full_like(lost, unit)
  new_q, kept = yield Each(
    linear_algebra.revive,
    (q.mean, _in_use(used, basis.shares, 1.0), draws.fresh, units),
  )
  total, energy = lost + kept, jnp.maximum(energy, 0.0)
  return Outcome(
    update,
    left,
    _in_use(used, new_q, state.factor_q),
    Energies(lost, total, energy, unit),
  )


_MOST_VALUES = 2**31 - 1  # of one factor of all matrices of an exchange
LOW_RANK = Method(low_rank, "as factors", measures=True, joins=True)


def with_factors(
  leaves: Sequence[Leaf],
  ranks: Sequence[int],
  min_ratio: float,
  code: Code | None,
  most: Callable[[int, int], int] | None = None,
) -> tuple[Leaf, ...]:
  """Gives leaves that save enough factors, and the others dense values.

  A rank that a matrix cannot use is capped, so the same leaves are factors at
  every rank. A leaf is dense if even the smallest rank saves too little.

  Args:
    leaves: Leaves without methods.
    ranks: The ranks that may be used, without dense.
    min_ratio: Least ratio of the values of a matrix and of its factors.
    code: Encoding of values; None is float32.
    most: Most columns of a matrix, from its columns at a rank and its cap, if
      ranks differ by matrix; None if all have the rank.
  """
  found = []
  for leaf in leaves:
    cap = cap_of(leaf.view, min_ratio, min(ranks)) if ranks else 0
    leaf = dataclasses.replace(leaf, method=LOW_RANK if cap else DENSE, cap=cap)
    encoded = is_encoded(leaf, code, bool(ranks))
    has_residual = bool(cap or (encoded and code and code.needs_feedback))
    found.append(
      dataclasses.replace(leaf, is_encoded=encoded, has_residual=has_residual)
    )
  found = by_exchange(found)
  # Ranks by matrix differ over all axes: only if the first exchange has them.
  shards = [leaf.shards for leaf in found if leaf.exchange == 0 and leaf.cap]
  by_error = most and all(axes == shards_of(found) for axes in shards)

  def with_width(leaf: Leaf) -> Leaf:
    columns = [leaf.columns(rank) for rank in ranks]
    has_own_rank = by_error and leaf.exchange == 0
    if most and has_own_rank:
      columns = [most(own, leaf.cap) for own in columns]
    return dataclasses.replace(
      leaf,
      width=max(columns, default=0),
      is_fixed=len(ranks) == 1 and not has_own_rank,
    )

  found = tuple(map(with_width, found))
  for members in exchanges_of(found):
    own = [found[i] for i in members if found[i].cap]
    values = sum(x.matrices.count * x.width * max(x.sides) for x in own)
    validation.require(
      values <= _MOST_VALUES,
      "rank",
      max(ranks, default=0),
      "small enough for factors of 2^31 - 1 values in an exchange, which int32"
      f" counts; {len(own)} leaves have up to {values:,}",
      "lower it, or shard the parameters",
    )
  return found


def allocator_for(
  leaves: Sequence[Leaf],
  ladder: Sequence[int],
  options: ErrorAllocation | None,
) -> ErrorAllocator | None:
  """Returns what shares a rank among matrices by error; None if nothing does.

  Args:
    leaves: From `with_factors`.
    ladder: The ranks that may be used; 0 is dense.
    options: How the matrices share the bytes; None for equal ranks.
  """
  matrices = matrices_of(leaves)
  if options is None or not matrices or not any(ladder):
    return None
  if matrices[0].shards != shards_of(leaves):
    return None
  return ErrorAllocator(matrices, tuple(ladder), options)


def _in_use(ranks: jax.Array | None, rows: jax.Array, other: Any) -> jax.Array:
  """Returns the rows in use, `other` beyond; None: all rows always are."""
  return rows if ranks is None else packing.in_use(rows, ranks, other)
