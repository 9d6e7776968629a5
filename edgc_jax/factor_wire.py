"""How the factors of one rung travel: as they are, packed, or coded."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from edgc_jax import packing
from edgc_jax.comm import averages
from edgc_jax.plan.plan import Plan


class Received(NamedTuple):
  """Means over replicas, and what this one put into them."""

  factors: list[jax.Array]
  sent_factors: list[jax.Array]  # live columns
  dense: list[jax.Array]
  sent_dense: list[jax.Array]
  exact: Any


class FactorWire:
  """The factors of the leaves in `low` at the rank of one rung.

  Attributes:
    live: bool [k, 1, width] for each leaf, the columns within the ranks of
      its matrices; None where all have that of the rung.
  """

  def __init__(
    self,
    plan: Plan,
    rank: int,
    low: Sequence[int],
    ranks: Sequence[jax.Array | None],
  ):
    """Computes nothing but `live`.

    Args:
      plan: Static.
      rank: That of the rung.
      low: The leaves that are sent as factors.
      ranks: int32 [k] for each of them, where the plan has a spread.
    """
    leaves = [plan.leaves[i] for i in low]
    self._widths = [plan.limit(leaf, rank) for leaf in leaves]
    # Columns that all matrices of a leaf have together.
    self._columns = [
      leaf.view.count * plan.columns(leaf, rank) for leaf in leaves
    ]
    self._ranks, self._code = ranks, plan.code
    self._is_packed = plan.spread > 1 and bool(low)
    self.live = None
    if self._is_packed:
      self.live = [
        packing.live_columns(r, w)
        for r, w in zip(ranks, self._widths, strict=True)
      ]

  def slices(self, factors: Sequence[jax.Array]) -> list[jax.Array]:
    """The columns that this rung uses, zero where not live."""
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
    """Averages factors and, beside them, what travels dense or exact.

    Args:
      factors: float32 [k, height, width] each, local.
      key: For codes.
      axis_name: The bound axis of the replicas.
      dense: float32, coded as the factors are.
      exact: A tree that is not.

    Returns:
      The means.
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

  def merged(self, j: int, new: jax.Array, old: jax.Array) -> jax.Array:
    """A factor for the state: columns not in use stay as they were."""
    width = new.shape[-1]
    if self.live is not None:
      new = jnp.where(self.live[j], new, old[..., :width])
    return jnp.concatenate([new, old[..., width:]], axis=-1)

  def _pack(self, factors: list[jax.Array]) -> list[jax.Array]:
    if not self._is_packed:
      return factors
    length = sum(
      n * f.shape[1] for n, f in zip(self._columns, factors, strict=True)
    )
    return [packing.pack(factors, self._ranks, length)]

  def _unpack(
    self, buffers: list[jax.Array], like: list[jax.Array]
  ) -> list[jax.Array]:
    if not self._is_packed:
      return buffers
    return packing.unpack(buffers[0], like, self._ranks)
