"""Exchanges that treat a gradient as entries, not as matrices.

What all of them share: which leaves are compressed, error feedback, and the
measured error. How entries travel is a `Compressor`.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from edgc_jax import sketch
from edgc_jax.comm import agreement, averages, collectives, dataflow
from edgc_jax.comm.averages import Averaged
from edgc_jax.comm.codes import Code
from edgc_jax.exchange import Exchange, unit_of, zeros_unless
from edgc_jax.exchange_state import Factors
from edgc_jax.plan.leaves import Leaf
from edgc_jax.plan.plan import BYTES_PER_VALUE, SKETCH_VALUES, Plan

# Of each matrix: it and what was not sent of it, sketched, and a norm.
_ERROR_VALUES = 2 * SKETCH_VALUES + 1


class Compressor(Protocol):
  """How entries travel."""

  def average(
    self, values: Sequence[jax.Array], key: jax.Array, axis_name: str
  ) -> Averaged:
    """The mean of flat float32 arrays, and what each replica put in."""

  def num_bytes(self, sizes: Sequence[int], replicas: int) -> int:
    """Bytes on the wire, all-reduce-equivalent."""


@dataclasses.dataclass(frozen=True)
class Coded:
  """Every entry, in fewer bits."""

  code: Code

  def average(
    self, values: Sequence[jax.Array], key: jax.Array, axis_name: str
  ) -> Averaged:
    return averages.average(values, axis_name, self.code, key)

  def num_bytes(self, sizes: Sequence[int], replicas: int) -> int:
    return averages.average_bytes(sizes, self.code, replicas)


@dataclasses.dataclass(frozen=True, kw_only=True)
class EntrywisePlan(Plan):
  """A plan without ranks.

  Attributes:
    compressor: How the entries of compressible leaves travel.
    min_size: Entries below which a leaf is sent dense.
    error_feedback: Whether there is a residual.
  """

  compressor: Compressor
  min_size: int
  error_feedback: bool

  @property
  def has_factors(self) -> bool:
    return False

  @property
  def has_residual(self) -> bool:
    return self.error_feedback

  def takes(self, leaf: Leaf) -> bool:
    """Whether a leaf is compressed: matrices that are not small."""
    return leaf.view is not None and leaf.size >= self.min_size

  def all_reduces(self, rank: int) -> int:
    del rank
    return 2

  def wire_bytes_of_sides(
    self, rank: int, replicas: int = 1
  ) -> tuple[int, ...]:
    del rank
    compressed = [self.leaves[i] for i in self.compressible]
    dense = sum(leaf.size for leaf in self.leaves if not self.takes(leaf))
    errors = _ERROR_VALUES * sum(leaf.view.count for leaf in compressed)
    sent = 0
    if compressed:
      sizes = [leaf.size for leaf in compressed]
      sent = self.compressor.num_bytes(sizes, replicas)
    return (sent + BYTES_PER_VALUE * (dense + errors),)


def exchange(
  plan: EntrywisePlan,
  rung: jax.Array,
  matrices: list[jax.Array],
  factors: Factors,
  key: jax.Array,
  axis_name: str,
  *,
  count: jax.Array,
  ranks: jax.Array | None = None,
) -> Exchange:
  """Averages over replicas through the plan's compressor; an `ExchangeFn`."""
  del rung, count, ranks
  own_key, sketch_key = jax.random.split(key)
  low = plan.compressible
  dense = [i for i in range(len(matrices)) if i not in set(low)]
  averaged: list[Any] = [None] * len(matrices)
  values = [matrices[i].ravel() for i in low]
  received = Averaged([], [], None)
  if values:
    received = plan.compressor.average(values, own_key, axis_name)
  views = [plan.leaves[i].view for i in low]
  stacks = [v.reshape(view) for v, view in zip(values, views, strict=True)]
  rest = [
    (v - sent).reshape(view)
    for v, sent, view in zip(values, received.sent, views, strict=True)
  ]
  signs = sketch.draw_signs(sketch_key, stacks)
  # TF32 or bf16 products would be errors of their own.
  with jax.default_matmul_precision("highest"):
    sketched = [
      [sketch.sketch(x, s) for x, s in zip(xs, signs, strict=True)]
      for xs in (stacks, rest)
    ]
  unit = unit_of(received.mean) if values else jnp.ones((), jnp.float32)
  own = [jnp.sum(jnp.square(r / unit), axis=(1, 2)) for r in rest]
  exact = ([matrices[i] for i in dense], sketched, own)
  exact = dataflow.in_turn(exact, received.mean)
  whole, (of_all, of_rest), own = collectives.mean(exact, axis_name)
  for i, value in zip(dense, whole, strict=True):
    averaged[i] = value
  for i, value in zip(low, received.mean, strict=True):
    averaged[i] = value.reshape(plan.leaves[i].shape)
  energy = lambda z: jnp.sum(jnp.square(z / unit), axis=1)  # noqa: E731
  lost = [energy(z) for z in of_rest]
  # The share lost is lost / (kept + lost); a sketch's noise is in both.
  kept = [
    jnp.maximum(energy(z) - gone, 0.0)
    for z, gone in zip(of_all, lost, strict=True)
  ]
  # An entry that is not finite may not have been sent; sums with signs tell.
  is_finite = agreement.all_finite((averaged, of_all))
  return Exchange(
    averaged=[zeros_unless(is_finite, x) for x in averaged],
    residual=[
      r.reshape(plan.leaves[i].shape) for i, r in zip(low, rest, strict=True)
    ],
    factors=factors,
    columns=[k[:, None] for k in kept],
    lost=lost,
    residual_energy=own,
    unit=unit,
    is_finite=is_finite,
  )
