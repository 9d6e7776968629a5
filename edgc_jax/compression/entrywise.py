"""Exchanges that treat a gradient as entries, not as matrices.

What all of them share: which leaves are compressed, error feedback, and the
measured error. How entries travel is a `Compressor`.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from edgc_jax.comm import averages, collectives, dataflow
from edgc_jax.comm.averages import Averaged
from edgc_jax.comm.codes import Code
from edgc_jax.compression import linear_algebra
from edgc_jax.compression.base import Exchange
from edgc_jax.plan.leaves import Leaf
from edgc_jax.plan.plan import BYTES_PER_VALUE, SKETCH_VALUES, Layout, Plan

# Of each matrix: it and what was not sent of it, sketched, and a norm.
_ERROR_VALUES = 2 * SKETCH_VALUES + 1
_LEAST_SAMPLE = 256  # entries, or all there are
_MOST_ENTRIES = 2**31 - 1  # that an int32 index reaches


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
    return averages.average_bytes([sizes], self.code, replicas)[0]


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

  def is_compressed(self, leaf: Leaf) -> bool:
    """Whether a leaf is compressed: matrices that are not small."""
    return leaf.view is not None and leaf.size >= self.min_size

  def all_reduces(self, rank: int) -> int:
    del rank
    return 2

  def _bytes_of(self, layouts: Sequence[Layout], replicas: int) -> list[int]:
    sizes = [self.leaf_sizes[i] for i in self.compressible]
    dense = sum(self.leaf_sizes) - sum(sizes)
    sent = self.compressor.num_bytes(sizes, replicas) if sizes else 0
    sent += BYTES_PER_VALUE * (dense + _ERROR_VALUES * len(self.matrices))
    return [sent] * len(layouts)


def exchange(
  plan: EntrywisePlan,
  rung: jax.Array,
  matrices: list[jax.Array],
  factors: list[jax.Array],
  key: jax.Array,
  axis_name: str,
  ranks: jax.Array | None = None,
) -> Exchange:
  """Averages over replicas through the plan's compressor; an `ExchangeFn`."""
  del rung, ranks
  own_key, sketch_key = jax.random.split(key)
  members = plan.compressible
  dense = [i for i in range(len(matrices)) if i not in plan.slots]
  values = [matrices[i].ravel() for i in members]
  received = Averaged([], [], None)
  if values:
    received = plan.compressor.average(values, own_key, axis_name)
  views = [plan.leaves[i].view for i in members]
  stacks = [v.reshape(view) for v, view in zip(values, views, strict=True)]
  # residual_i = M_i - sent_i
  residual = [
    (v - sent).reshape(view)
    for v, sent, view in zip(values, received.sent, views, strict=True)
  ]
  signs = linear_algebra.draw_signs(sketch_key, stacks)
  # TF32 or bf16 products would be errors of their own.
  with jax.default_matmul_precision("highest"):
    sketched = [linear_algebra.sketches(x, signs) for x in (stacks, residual)]
  unit = jnp.ones((), jnp.float32)
  if values:
    unit = linear_algebra.largest_magnitude(received.mean)
  own = linear_algebra.energies(residual, unit)
  exact = ([matrices[i] for i in dense], sketched, own)
  exact = dataflow.in_turn(exact, received.mean)
  whole, (of_all, of_rest), own = collectives.mean(exact, axis_name)
  averaged: list[Any] = [None] * len(matrices)
  for i, value in zip(dense, whole, strict=True):
    averaged[i] = value
  for i, value in zip(members, received.mean, strict=True):
    averaged[i] = value.reshape(plan.leaves[i].shape)
  energy = lambda z: jnp.sum(jnp.square(z / unit), axis=1)  # noqa: E731
  lost = [energy(z) for z in of_rest]
  # The share lost is lost / (kept + lost); a sketch's noise is in both.
  kept = [
    jnp.maximum(energy(z) - gone, 0.0)
    for z, gone in zip(of_all, lost, strict=True)
  ]
  # A non-finite entry may not have been sent; the sketches' sums show it.
  is_finite = dataflow.all_finite((averaged, of_all))
  return Exchange(
    averaged=dataflow.zeros_unless(is_finite, averaged),
    residual=[
      r.reshape(plan.leaves[i].shape)
      for i, r in zip(members, residual, strict=True)
    ],
    factors=factors,
    columns=[k[:, None] for k in kept],
    lost=lost,
    residual_energy=own,
    unit=unit,
    is_finite=is_finite,
  )


@dataclasses.dataclass(frozen=True)
class TopK:
  """The entries of largest magnitude, each replica's own.

  Values and indices are gathered, and every replica adds up those of all:

    k = max(1, round(density n)),   sent_i = the k largest of x_i,
    mean = sum_i sent_i / N

  Bytes: N (4 + 4) k / 2, an all-gather: they grow with the replicas.

  Attributes:
    density: Share of the entries.
    sample_rate: Where given, the threshold is that of a random sample of so
      many entries instead of a selection from all (Deep Gradient Compression,
      Lin et al. 2018, arXiv:1712.01887). As shapes are static no more than k
      entries are sent, the first that pass it, counted from a place that
      changes; what more there are wait in the residual, and where there are
      fewer, nothing fills up.
  """

  density: float
  sample_rate: float | None = None

  def average(
    self, values: Sequence[jax.Array], key: jax.Array, axis_name: str
  ) -> Averaged:
    """Averages flat float32 arrays."""
    replicas = collectives.num_devices(axis_name)
    indices = [
      self._largest(value, jax.random.fold_in(key, i))
      for i, value in enumerate(values)
    ]
    picked = [
      value.at[index].get(mode="fill", fill_value=0.0)
      for value, index in zip(values, indices, strict=True)
    ]
    gathered = collectives.gather(
      (jnp.concatenate(picked), jnp.concatenate(indices)), axis_name
    )
    ends = np.cumsum([len(index) for index in indices])[:-1]
    theirs, places = (jnp.split(x, ends, axis=1) for x in gathered)
    mean, sent = [], []
    for j, value in enumerate(values):
      own = jnp.zeros_like(value)
      sent.append(own.at[indices[j]].set(picked[j], mode="drop"))
      mean.append(_total(theirs[j], places[j], value.size) / replicas)
    return Averaged(mean, sent, None)

  def num_bytes(self, sizes: Sequence[int], replicas: int) -> int:
    """Half of what is gathered."""
    return sum(replicas * 4 * _count(self.density, size) for size in sizes)

  def _largest(self, value: jax.Array, key: jax.Array) -> jax.Array:
    """Indices int32 [k]; the size, which is none, where there are fewer."""
    count, size = _count(self.density, value.size), value.size
    # A non-finite entry is sent, so that all replicas see it.
    magnitude = jnp.where(jnp.isfinite(value), jnp.abs(value), jnp.inf)
    if self.sample_rate is None:
      return jax.lax.top_k(magnitude, count)[1]
    sample_size = max(_LEAST_SAMPLE, round(self.sample_rate * size))
    places = _one_of_each_run(size, min(sample_size, size), key)[0]
    in_sample = max(1, round(self.density * len(places)))
    threshold = jax.lax.top_k(magnitude[places], in_sample)[0][-1]
    start = jax.random.randint(jax.random.fold_in(key, 1), (), 0, size)
    # Zeros are not worth sending, whatever the threshold.
    passes = jnp.roll((magnitude >= threshold) & (magnitude > 0), -start)
    (found,) = jnp.nonzero(passes, size=count, fill_value=size)
    found = found.astype(jnp.int32)
    shifted = jnp.where(
      found < size - start, found + start, found + start - size
    )
    return jnp.where(found < size, shifted, size)


@dataclasses.dataclass(frozen=True)
class RandomK:
  """Random entries, the same on all replicas, so that values are all-reduced.

  A tensor of n entries is cut into k = max(1, round(density n)) equal runs,
  up to one entry, and of each one entry is drawn. Bytes: 4 k, one all-reduce.

  Attributes:
    density: Share of the entries.
    is_scaled: Whether an entry is multiplied by the length of its run, which
      makes the result unbiased: without error feedback.
  """

  density: float
  is_scaled: bool

  def average(
    self, values: Sequence[jax.Array], key: jax.Array, axis_name: str
  ) -> Averaged:
    """Averages flat float32 arrays at entries drawn by the key."""
    places, scales = [], []
    for i, value in enumerate(values):
      count = _count(self.density, value.size)
      own_key = jax.random.fold_in(key, i)
      place, lengths = _one_of_each_run(value.size, count, own_key)
      places.append(place)
      scales.append(lengths.astype(jnp.float32) if self.is_scaled else 1.0)
    picked = [value[place] for value, place in zip(values, places, strict=True)]
    averaged = collectives.mean(picked, axis_name)
    spread = lambda own: [  # noqa: E731
      jnp.zeros_like(p, shape=value.shape).at[place].set(p * scale)
      for value, p, place, scale in zip(
        values, own, places, scales, strict=True
      )
    ]
    return Averaged(spread(averaged), spread(picked), None)

  def num_bytes(self, sizes: Sequence[int], replicas: int) -> int:
    """One all-reduce of float32."""
    del replicas
    return 4 * sum(_count(self.density, size) for size in sizes)


def _count(density: float, size: int) -> int:
  """How many entries are sent of a tensor."""
  if size > _MOST_ENTRIES:
    raise ValueError(
      f"`updates` must have leaves of at most {_MOST_ENTRIES:,} entries, which"
      f" an index reaches, got one of {size:,}; split it, or send it dense with"
      " a `matrix_view` that returns None for it."
    )
  return max(1, round(density * size))


def _one_of_each_run(
  size: int, count: int, key: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """One place out of each of `count` runs, and the runs' lengths; int32."""
  shorter, longer = divmod(size, count)
  i = jnp.arange(count, dtype=jnp.int32)
  lengths = shorter + (i < longer).astype(jnp.int32)
  starts = i * shorter + jnp.minimum(i, longer)
  # Integers alone, in which no two platforms differ.
  return starts + jax.random.randint(key, (count,), 0, lengths), lengths


def _total(values: jax.Array, places: jax.Array, size: int) -> jax.Array:
  """Sum over replicas of values [N, k] at their places, [size].

  One replica after the other, whose places differ: sums of entries that meet
  are then made in the same order on all devices, atomics or not.
  """

  def add(j: int, total: jax.Array) -> jax.Array:
    return total.at[places[j]].add(values[j], mode="drop")

  zeros = jnp.zeros_like(values, shape=(size,))
  return jax.lax.fori_loop(0, len(values), add, zeros)
