"""Packs factors of different ranks into one buffer, and averages factors.

A collective has a static length, but the ranks of matrices are chosen during
training. So all factors are computed at a static width, of which the first r_i
columns are live, and only live columns are packed end to end:

  | matrix 0: r_0 columns | matrix 1: r_1 columns | ... | zeros |

One buffer holds any ranks with sum_i r_i height_i <= length. Each matrix is
written at its full width where its first column belongs, and the next matrix
overwrites the columns beyond its rank. This takes copies of static size, and
no index per value.

`FactorBuffers` sends the factors of one layout, packed or not, encoded or not.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from edgc_jax.comm import averages
from edgc_jax.plan.plan import Layout, Plan


def live_columns(ranks: jax.Array, width: int) -> jax.Array:
  """Returns a mask of the columns below the rank, bool [k, 1, width].

  Args:
    ranks: int32 [k].
    width: Columns of the factors.
  """
  return (jnp.arange(width) < ranks[:, None])[:, None, :]


def pack(
  factors: Sequence[jax.Array], ranks: Sequence[jax.Array], length: int
) -> jax.Array:
  """Packs the live columns of all matrices end to end.

  Args:
    factors: Stacks of matrices, float32 [k, height, width] each.
    ranks: int32 [k] for each stack, at most its width.
    length: Values in the buffer, at least the sum of rank times height.

  Returns:
    float32 [length]; zeros after the last column.
  """
  all_starts = _starts(factors, ranks)
  # Room for the columns of the last matrix that are not live.
  spare = max(f.shape[1] * f.shape[2] for f in factors)
  buffer = jnp.zeros_like(factors[0], shape=(length + spare,))
  for factor, own_ranks, starts in zip(factors, ranks, all_starts, strict=True):
    live = live_columns(own_ranks, factor.shape[2])
    blocks = jnp.swapaxes(jnp.where(live, factor, 0.0), 1, 2)
    buffer = _write(buffer, blocks.reshape(len(factor), -1), starts)
  return buffer[:length]


def unpack(
  buffer: jax.Array, factors: Sequence[jax.Array], ranks: Sequence[jax.Array]
) -> list[jax.Array]:
  """Restores the stacks of matrices from a buffer: the reverse of `pack`.

  Args:
    buffer: float32 [length], from `pack` with the same shapes and ranks.
    factors: Arrays of the shapes to return.
    ranks: int32 [k] for each stack.

  Returns:
    float32 [k, height, width] each; columns that are not live are zero.
  """
  all_starts = _starts(factors, ranks)
  spare = max(f.shape[1] * f.shape[2] for f in factors)
  buffer = jnp.pad(buffer, (0, spare))
  stacks = []
  for factor, own_ranks, starts in zip(factors, ranks, all_starts, strict=True):
    _, height, width = factor.shape
    blocks = jax.lax.map(
      lambda start, size=height * width: jax.lax.dynamic_slice(
        buffer, (start,), (size,)
      ),
      starts,
    )
    columns = jnp.swapaxes(blocks.reshape(-1, width, height), 1, 2)
    live = live_columns(own_ranks, width)
    # Without a barrier, products would read the factor along its columns, which
    # is slow (`linear_algebra.transposed_product`).
    stacks.append(jax.lax.optimization_barrier(jnp.where(live, columns, 0.0)))
  return stacks


def _write(
  buffer: jax.Array, blocks: jax.Array, starts: jax.Array
) -> jax.Array:
  """Writes each block at its start, in order; later ones overwrite."""

  def write(i: int, buffer: jax.Array) -> jax.Array:
    return jax.lax.dynamic_update_slice(buffer, blocks[i], (starts[i],))

  return jax.lax.fori_loop(0, len(blocks), write, buffer)


def _starts(
  factors: Sequence[jax.Array], ranks: Sequence[jax.Array]
) -> list[jax.Array]:
  """Returns the position of each matrix in the buffer, int32 [k] per stack."""
  sizes = [r * f.shape[1] for f, r in zip(factors, ranks, strict=True)]
  starts = jnp.cumsum(jnp.concatenate([jnp.zeros_like(sizes[0][:1]), *sizes]))
  split = []
  for size in sizes:
    own, starts = starts[: len(size)], starts[len(size) :]
    split.append(own)
  return split


class Received(NamedTuple):
  """Means over replicas, and this replica's contributions to them.

  The contributions include the encoding errors: their mean over replicas is the
  mean that all received.
  """

  factors: list[jax.Array]
  sent_factors: list[jax.Array]  # live columns only
  dense: list[jax.Array]
  sent_dense: list[jax.Array]
  exact: Any  # the mean of a tree sent in float32


class FactorBuffers:
  """Averages the factors of one layout, packed if ranks differ.

  Attributes:
    live: bool [k, 1, width] for each leaf, the columns within the ranks of
      its matrices; None if all have the rank of the rung.
  """

  def __init__(
    self,
    plan: Plan,
    layout: Layout,
    ranks: Sequence[jax.Array | None],
  ):
    """Computes `live`; sends nothing.

    Args:
      plan: Static: leaves, spread and encoding.
      layout: The leaves sent as factors, with their columns.
      ranks: int32 [k] for each of these leaves, if the plan has a spread.
    """
    self._widths = layout.widths
    # Columns at the rung's rank, summed over the matrices of each leaf.
    self._columns = [
      plan.leaves[i].view.count * columns
      for i, columns in zip(layout.factored, layout.columns, strict=True)
    ]
    self._ranks, self._code = ranks, plan.code
    self._is_packed = plan.spread > 1 and bool(layout.factored)
    self.live = None
    if self._is_packed:
      self.live = [
        live_columns(r, w) for r, w in zip(ranks, self._widths, strict=True)
      ]

  def slices(self, factors: Sequence[jax.Array]) -> list[jax.Array]:
    """Returns the columns that this layout uses; columns not live are zero."""
    sliced = [
      q[..., :width] for q, width in zip(factors, self._widths, strict=True)
    ]
    if self.live is None:
      return sliced
    return [
      jnp.where(live, q, 0.0) for q, live in zip(sliced, self.live, strict=True)
    ]

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
      factors: float32 [k, height, width] each, local.
      key: Source of the encoding's random draws.
      axis_name: The bound axis of the replicas.
      dense: float32 arrays, encoded as the factors are.
      exact: A tree that is sent in float32.

    Returns:
      The means and this replica's contributions.
    """
    buffers = self._pack(factors)
    received = averages.average(
      [*buffers, *dense], axis_name, self._code, key, exact
    )
    count = len(buffers)
    sent = factors
    if self._code is not None:
      sent = self._unpack(received.sent[:count], factors)
    return Received(
      self._unpack(received.mean[:count], factors),
      sent,
      received.mean[count:],
      received.sent[count:],
      received.exact,
    )

  def merge(
    self, new: Sequence[jax.Array], old: Sequence[jax.Array]
  ) -> list[jax.Array]:
    """Returns factors for the state; columns not in use keep their old values.

    Args:
      new: float32 [k, n, width], Q of this step for each leaf of the layout.
      old: float32 [k, n, columns], Q in the state, as wide or wider.
    """
    merged = []
    for j, (own, kept) in enumerate(zip(new, old, strict=True)):
      width = own.shape[-1]
      if self.live is not None:
        own = jnp.where(self.live[j], own, kept[..., :width])
      merged.append(jnp.concatenate([own, kept[..., width:]], axis=-1))
    return merged

  def _pack(self, factors: list[jax.Array]) -> list[jax.Array]:
    if not self._is_packed:
      return factors
    length = sum(
      n * f.shape[1] for n, f in zip(self._columns, factors, strict=True)
    )
    return [pack(factors, self._ranks, length)]

  def _unpack(
    self, buffers: list[jax.Array], like: list[jax.Array]
  ) -> list[jax.Array]:
    if not self._is_packed:
      return buffers
    return unpack(buffers[0], like, self._ranks)
