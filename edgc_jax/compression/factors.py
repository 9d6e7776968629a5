"""Factors whose ranks change while their shapes are static.

Factors are stacks of rows [k, width, height], one row for each column of P or Q
(`linear_algebra`). A matrix uses the first r_i rows, which are live; the others
are zero. The ranks are numbers in the graph, so

  all columns are computed at a static width. On CPUs that is the narrowest of
    a few classes of width that holds the rank; each has a compiled branch. P
    and Q are computed one matrix after the other, updates in the class of the
    widest matrix of a stack. Accelerators compute a batch at the full width: a
    product with so few columns takes them as long as reading the gradient.
  only live columns are sent, packed end to end in a buffer of static length:

  | matrix 0: r_0 columns | matrix 1: r_1 columns | ... | zeros |

One buffer holds any ranks with sum_i r_i height_i <= length. Each matrix is
written at its full width where its first column belongs, and the next matrix
overwrites the columns beyond its rank: copies of static size, and no index per
value. Only the collective has the length of a rung, so only the collective is
in the branches of a switch over rungs.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from edgc_jax.comm import averages, dataflow
from edgc_jax.compression.error_feedback import added
from edgc_jax.plan.plan import Group, Plan


class Stack(NamedTuple):
  """The matrices M = gradient + residual of a leaf that is sent as factors."""

  leaf: int  # index in the plan
  gradient: jax.Array  # [k, m, n], local
  residual: jax.Array  # float32 [k, m, n], local
  factor: jax.Array  # Q in the state, float32 [k, n, columns]
  ranks: jax.Array  # int32 [k]
  classes: tuple[int, ...]  # of width, rising; the last is the width of P and Q

  @property
  def is_tall(self) -> bool:
    """Whether M has more rows than columns: then P is a basis of its rows."""
    return self.gradient.shape[1] > self.gradient.shape[2]

  def in_class(
    self, rank: jax.Array, branches: Sequence[Callable], *args: Any
  ) -> Any:
    """Runs the branch of the narrowest class that holds a rank."""
    index = jnp.sum(rank > jnp.array(self.classes[:-1], jnp.int32))
    return jax.lax.switch(index, branches, *args)


def map_rows(
  stacks: Sequence[Stack],
  factors: Sequence[jax.Array],
  factorise: Callable[[jax.Array], Any],
  multiply: Callable[..., Any],
  others: Sequence[tuple] | None = None,
) -> list[Any]:
  """Maps the factor of each matrix, and the matrix, to other factors.

    multiply(is_tall, factorise(rows), M, *other)

  Args:
    stacks: The matrices.
    factors: Rows of one factor of each, [k, width, n].
    factorise: Maps rows [w, n]; it may factorise a matrix. On CPUs that is not
      batched: a batched factorisation splits its work and waits for threads,
      and several at once may occupy all threads of XLA's pool.
    multiply: Returns a tree of scalars and of arrays with w rows, or a constant
      more.
    others: More arrays [k, ...] for each stack.

  Returns:
    For each stack the factors, [k, width or a constant more, ...], and scalars
    [k]; rows beyond the class of a matrix are zero.
  """
  others = others or [()] * len(stacks)
  is_cpu = jax.default_backend() == "cpu"
  each = jax.lax.map if is_cpu else lambda f, x: jax.vmap(f)(x)
  fixed = [j for j, stack in enumerate(stacks) if len(stack.classes) == 1]
  # All calls of one function before the next: few changes of file to a reader.
  new = {j: each(factorise, factors[j]) for j in fixed}
  m = {j: added(stacks[j].gradient, stacks[j].residual) for j in fixed}
  times = [functools.partial(multiply, stack.is_tall) for stack in stacks]
  new = {j: jax.vmap(times[j])(new[j], m[j], *others[j]) for j in fixed}
  for j, stack in enumerate(stacks):
    if j not in new:
      new[j] = _in_classes(stack, factors[j], factorise, times[j], others[j])
  return [new[j] for j in range(len(stacks))]


def _in_classes(
  stack: Stack,
  factors: jax.Array,
  factorise: Callable[[jax.Array], Any],
  multiply: Callable[..., Any],
  other: tuple,
) -> Any:
  """Maps the factors of a stack with several classes, as `map_rows`."""
  width = stack.classes[-1]

  def at(size: int) -> Callable[..., Any]:
    def run(rows: jax.Array, *args: Any) -> Any:
      new = multiply(factorise(rows[:size]), *args)
      return jax.tree.map(lambda x: _with_rows(x, width - size), new)

    return run

  branches = [at(size) for size in stack.classes]

  def one(x: tuple) -> Any:
    i, rows, gradient, residual, more = x
    # In memory once, whatever the number of classes.
    m = added(gradient, residual)
    return stack.in_class(stack.ranks[i], branches, rows, m, *more)

  index = jnp.arange(len(factors))
  arrays = (index, factors, stack.gradient, stack.residual, other)
  if len(factors) == 1:  # XLA's CPU backend has more threads outside of loops
    new = one(jax.tree.map(lambda x: x[0], arrays))
    return jax.tree.map(lambda x: x[None], new)
  return jax.lax.map(one, arrays)


def _with_rows(x: jax.Array, more: int) -> jax.Array:
  """Adds rows of zeros; a scalar has none."""
  return jnp.pad(x, [(0, more), *[(0, 0)] * (x.ndim - 1)]) if x.ndim else x


def map_matrices(
  stacks: Sequence[Stack],
  factors: Sequence[tuple[jax.Array, ...]],
  multiply: Callable[..., Any],
  finish: Callable[..., tuple[jax.Array, jax.Array]],
) -> list[tuple[jax.Array, jax.Array]]:
  """Maps the factors of each stack to its new gradient and residual.

    mean, sent = multiply(is_tall, *factors)
    finish(mean, M - sent, gradient, residual)

  A stack is one batch, in the class of its widest matrix: a loop over matrices
  would write its results with one thread.

  Args:
    stacks: The matrices.
    factors: Rows of several factors of each, [k, width, ...]; the last is
      local.
    multiply: Maps the first rows of a matrix's factors to the mean update and
      to this replica's part of it, [m, n] each.
    finish: Returns the new gradients and residuals of a stack.

  Returns:
    The new gradients and residuals of each stack, [k, m, n].
  """
  fixed = [j for j, stack in enumerate(stacks) if len(stack.classes) == 1]
  times = [functools.partial(multiply, stack.is_tall) for stack in stacks]
  products = {j: jax.vmap(times[j])(*factors[j]) for j in fixed}
  new, before = [], ()
  for j, (stack, (*rows, last)) in enumerate(zip(stacks, factors, strict=True)):
    if j not in products:
      branches = [
        lambda rows, size=size, times=times[j]: jax.vmap(times)(
          *[x[:, :size] for x in rows]
        )
        for size in stack.classes
      ]
      # One large stack after the other, so one product is in memory at a time.
      rows = [*rows, dataflow.in_turn(last, before)]
      products[j] = stack.in_class(jnp.max(stack.ranks), branches, rows)
    (mean, sent), g, e = products[j], stack.gradient, stack.residual
    new.append(finish(mean, added(g, e) - sent, g, e))
    before = new[-1][1]
  return new


def pack(
  factors: Sequence[jax.Array], ranks: Sequence[jax.Array], length: int
) -> jax.Array:
  """Packs the live columns of all matrices end to end.

  Args:
    factors: Stacks of factors, float32 [k, width, height] each; columns that
      are not live are zero.
    ranks: int32 [k] for each stack, at most its width.
    length: Values in the buffer, at least the sum of rank times height.

  Returns:
    float32 [length]; zeros after the last column.
  """
  all_starts = _starts(factors, ranks)
  # Room for the columns of the last matrix that are not live.
  spare = max(f.shape[1] * f.shape[2] for f in factors)
  buffer = jnp.zeros_like(factors[0], shape=(length + spare,))
  for factor, starts in zip(factors, all_starts, strict=True):

    def write(i: Any, buffer: jax.Array, x: tuple = (factor, starts)) -> Any:
      return jax.lax.dynamic_update_slice(buffer, x[0][i].ravel(), (x[1][i],))

    buffer = jax.lax.fori_loop(0, len(factor), write, buffer)
  return buffer[:length]


def unpack(
  buffer: jax.Array, factors: Sequence[jax.Array], ranks: Sequence[jax.Array]
) -> list[jax.Array]:
  """Restores the stacks of factors from a buffer: the reverse of `pack`.

  Args:
    buffer: float32 [length], from `pack` with the same shapes and ranks.
    factors: Arrays of the shapes to return.
    ranks: int32 [k] for each stack.

  Returns:
    float32 [k, width, height] each; columns that are not live are zero.
  """
  all_starts = _starts(factors, ranks)
  spare = max(f.shape[1] * f.shape[2] for f in factors)
  buffer = jnp.pad(buffer, (0, spare))
  stacks = []
  for factor, own_ranks, starts in zip(factors, ranks, all_starts, strict=True):
    _, width, height = factor.shape

    def read(x: tuple, shape: tuple[int, int] = (width, height)) -> jax.Array:
      start, rank = x
      size = shape[0] * shape[1]
      rows = jax.lax.dynamic_slice(buffer, (start,), (size,)).reshape(shape)
      return jnp.where(jnp.arange(shape[0])[:, None] < rank, rows, 0.0)

    stacks.append(jax.lax.map(read, (starts, own_ranks)))
  return stacks


def _starts(
  factors: Sequence[jax.Array], ranks: Sequence[jax.Array]
) -> list[jax.Array]:
  """Returns the position of each matrix in the buffer, int32 [k] per stack."""
  sizes = [r * f.shape[2] for f, r in zip(factors, ranks, strict=True)]
  starts = jnp.cumsum(jnp.concatenate([jnp.zeros_like(sizes[0][:1]), *sizes]))
  split = []
  for size in sizes:
    own, starts = starts[: len(size)], starts[len(size) :]
    split.append(own)
  return split


class Received(NamedTuple):
  """Means over replicas, and this replica's part of them (`Averaged`)."""

  factors: list[jax.Array]
  sent_factors: list[jax.Array]
  dense: list[jax.Array]
  sent_dense: list[jax.Array]
  exact: Any  # the mean of a tree sent in float32


class FactorBuffers:
  """Averages the factors of one group of rungs, packed if ranks differ.

  Attributes:
    ranks: int32 [k] for each leaf; None if the width is the rank.
  """

  def __init__(
    self, plan: Plan, group: Group, index: jax.Array, stacks: Sequence[Stack]
  ):
    """Sends nothing.

    Args:
      plan: Static: leaves and encoding.
      group: The leaves sent as factors, and their columns at each rung.
      index: int32 [], the rung in use, as an index into the group's layouts.
      stacks: The matrices of these leaves.
    """
    self._index, self._code, self._stacks = index, plan.code, stacks
    # If each matrix always has the full width, nothing is packed or masked.
    is_fixed = plan.spread == 1 and len(group.layouts) == 1
    self.ranks = None if is_fixed else [stack.ranks for stack in stacks]
    # Columns summed over the matrices of each leaf; int [layouts, leaves].
    columns = np.array([layout.columns for layout in group.layouts], int)
    self._columns = columns * np.array([len(s.factor) for s in stacks], int)

  def rows(self) -> list[jax.Array]:
    """Returns Q of the state as rows, zero where not live."""
    cut = [s.factor[..., : s.classes[-1]] for s in self._stacks]
    cut = [jnp.swapaxes(q, 1, 2) for q in cut]
    return [self._if_live(j, q, 0.0) for j, q in enumerate(cut)]

  def live_shares(self, shares: Sequence[jax.Array]) -> list[jax.Array]:
    """Returns shares [k, width] with ones for columns that are not live."""
    wide = [self._if_live(j, t[..., None], 1.0) for j, t in enumerate(shares)]
    return [t[..., 0] for t in wide]

  def merge(self, new: Sequence[jax.Array]) -> list[jax.Array]:
    """Returns Q for the state; columns that are not live keep their old values.

    Args:
      new: float32 [k, width, n], Q of this step for each stack.
    """
    merged = []
    for j, (own, stack) in enumerate(zip(new, self._stacks, strict=True)):
      width, kept = own.shape[1], stack.factor
      own = self._if_live(j, own, jnp.swapaxes(kept[..., :width], 1, 2))
      own = jnp.swapaxes(own, 1, 2)
      merged.append(jnp.concatenate([own, kept[..., width:]], axis=-1))
    return merged

  def average(
    self,
    factors: list[jax.Array],
    key: jax.Array,
    axis_name: str,
    *,
    dense: Sequence[jax.Array] = (),
    exact: Any = None,
  ) -> Received:
    """Averages factors over replicas, together with other arrays.

    Args:
      factors: float32 [k, width, height] each, local; zero where not live.
      key: Source of the encoding's random draws.
      axis_name: The bound axis of the replicas.
      dense: float32 arrays, encoded as the factors are.
      exact: A tree that is sent in float32.

    Returns:
      The means, and what this replica contributed to them.
    """
    count = len(factors)
    if self.ranks is None or not factors:
      found = averages.average(
        [*factors, *dense], axis_name, self._code, key, exact
      )
      mean, sent = found.mean[:count], found.sent[:count]
    else:
      found = self._average_packed(factors, key, axis_name, dense, exact)
      count = 1
      mean = unpack(found.mean[0], factors, self.ranks)
      sent = factors
      if self._code is not None:
        sent = unpack(found.sent[0], factors, self.ranks)
    return Received(
      mean, sent, found.mean[count:], found.sent[count:], found.exact
    )

  def _if_live(self, j: int, rows: jax.Array, other: Any) -> jax.Array:
    """Returns the live rows of leaf j, and `other` in place of the rest."""
    if self.ranks is None:
      return rows
    is_live = jnp.arange(rows.shape[1]) < self.ranks[j][:, None]
    return jnp.where(is_live[:, :, None], rows, other)

  def _average_packed(
    self,
    factors: list[jax.Array],
    key: jax.Array,
    axis_name: str,
    dense: Sequence[jax.Array],
    exact: Any,
  ) -> averages.Averaged:
    """Averages one buffer; its length is that of the rung in use."""
    heights = np.array([f.shape[2] for f in factors])
    lengths = [int(n) for n in self._columns @ heights]
    most = max(lengths)
    buffer = pack(factors, self.ranks, most)

    def send(length: int, buffer: jax.Array, rest: Any) -> averages.Averaged:
      dense, exact = rest
      found = averages.average(
        [buffer[:length], *dense], axis_name, self._code, key, exact
      )
      fill = lambda x: jnp.pad(x, (0, most - length))  # noqa: E731
      first, *others = found.mean
      sent = []
      if self._code is not None:
        sent = [fill(found.sent[0]), *found.sent[1:]]
      return averages.Averaged([fill(first), *others], sent, found.exact)

    branches = [
      lambda *args, length=length: send(length, *args) for length in lengths
    ]
    rest = (list(dense), exact)
    if len(branches) == 1:
      return branches[0](buffer, rest)
    return jax.lax.switch(self._index, branches, buffer, rest)
