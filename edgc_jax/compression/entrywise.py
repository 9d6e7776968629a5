"""Exchanges that compress a gradient entry by entry, not as matrices.

With M_i the gradient of replica i plus its residual:

  update = mean_i sent_i,    residual_i = M_i - sent_i

`exchange` is common to all methods: it selects the leaves to compress, sends
the others dense, and measures the error. A `Compressor` decides which entries
are sent, and how:

  Encoded   every entry, in fewer bits
  TopK      the largest entries of each replica
  RandomK   random entries, the same on all replicas
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from edgc_jax.comm import averages, collectives, dataflow
from edgc_jax.comm.averages import Averaged
from edgc_jax.comm.codes import Code
from edgc_jax.compression import error_feedback, linear_algebra
from edgc_jax.compression.base import Exchange
from edgc_jax.plan.leaves import Leaf
from edgc_jax.plan.plan import BYTES_PER_VALUE, SKETCH_VALUES, Layout, Plan

# Sent in float32 with each matrix to measure its error: sketches of M and of
# the residual, and the residual's energy.
_ERROR_VALUES = 2 * SKETCH_VALUES + 1
_LEAST_SAMPLE = 256  # entries; a smaller tensor is sampled whole
_MOST_ENTRIES = 2**31 - 1  # the largest size that int32 indices cover


class Compressor(Protocol):
  """A method of sending the entries of the compressed leaves."""

  def average(
    self, values: Sequence[jax.Array], key: jax.Array, axis_name: str
  ) -> Averaged:
    """Averages arrays over replicas.

    Args:
      values: Local float32 arrays [n], one for each leaf.
      key: Source of all random draws; equal on all replicas.
      axis_name: The bound axis of the replicas.

    Returns:
      The means, and the part of each array that this replica sent.
    """

  def num_bytes(self, sizes: Sequence[int], replicas: int) -> int:
    """Predicts the bytes on the wire, counted as for an all-reduce.

    Args:
      sizes: Number of entries of each array.
      replicas: Number of replicas.
    """


@dataclasses.dataclass(frozen=True)
class Encoded:
  """Sends every entry, in fewer bits."""

  code: Code

  def average(
    self, values: Sequence[jax.Array], key: jax.Array, axis_name: str
  ) -> Averaged:
    """Averages encoded arrays, by an all-to-all and an all-gather."""
    return averages.average(values, axis_name, self.code, key)

  def num_bytes(self, sizes: Sequence[int], replicas: int) -> int:
    """Predicts the bytes, with padding to as many parts as replicas."""
    return averages.average_bytes([sizes], self.code, replicas)[0]


@dataclasses.dataclass(frozen=True, kw_only=True)
class EntrywisePlan(Plan):
  """A plan without ranks.

  Attributes:
    compressor: Sends the entries of the compressible leaves.
    min_size: Leaves of fewer entries are sent dense.
    error_feedback: Whether replicas keep a residual.
  """

  compressor: Compressor
  min_size: int
  error_feedback: bool
  has_factors: ClassVar[bool] = False

  @property
  def has_residual(self) -> bool:
    return self.error_feedback

  def is_compressed(self, leaf: Leaf) -> bool:
    """Returns whether a leaf has matrices, and at least `min_size` entries."""
    return leaf.view is not None and leaf.size >= self.min_size

  def all_reduces(self, rank: int) -> int:
    del rank
    return 2  # of the compressor's values, and of float32 values after them

  def _bytes_of(self, layouts: Sequence[Layout], replicas: int) -> list[int]:
    sizes = [self.leaf_sizes[i] for i in self.compressible]
    dense = sum(self.leaf_sizes) - sum(sizes)
    sent = self.compressor.num_bytes(sizes, replicas) if sizes else 0
    sent += BYTES_PER_VALUE * (dense + _ERROR_VALUES * len(self.matrices))
    return [sent] * len(layouts)


def exchange(
  plan: EntrywisePlan,
  rung: jax.Array,
  gradients: list[jax.Array],
  residuals: list[jax.Array],
  factors: list[jax.Array],
  key: jax.Array,
  axis_name: str,
  ranks: jax.Array | None = None,
  earlier: Any = (),
) -> Exchange:
  """Averages all leaves over replicas through the plan's compressor.

  Wire: the compressor's bytes, 4 bytes for each entry of the dense leaves, and
  33 float32 values a matrix to measure its error.

  Args:
    plan: Static: leaves and compressor.
    rung: Not used, as there are no ranks.
    gradients: All leaves in order, local.
    residuals: Residuals of the compressible leaves, none without error
      feedback.
    factors: Empty.
    key: Source of all random draws; equal on all replicas, new at each step.
    axis_name: The bound axis of the replicas.
    ranks: Not used.
    earlier: Results of the collectives before, which this exchange follows.

  Returns:
    The exchange.
  """
  del rung, ranks
  own_key, sketch_key = jax.random.split(key)
  matrices = error_feedback.all_added(plan, gradients, residuals)
  matrices = dataflow.in_turn(matrices, earlier)
  members = plan.compressible
  dense = [i for i in range(len(matrices)) if i not in plan.compressible]
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
  signs = linear_algebra.draw_signs(sketch_key, [x.shape for x in stacks])
  sketched = [linear_algebra.sketches(x, signs) for x in (stacks, residual)]
  unit = jnp.ones((), jnp.float32)
  if values:
    unit = linear_algebra.unit_of(received.mean)
  # |residual_i|^2
  residual_energy = [linear_algebra.energy(r, unit) for r in residual]
  exact = ([matrices[i] for i in dense], sketched, residual_energy)
  exact = dataflow.in_turn(exact, received.mean)
  dense_means, (z_all, z_residual), residual_energy = collectives.mean(
    exact, axis_name
  )
  averaged: list[Any] = [None] * len(matrices)
  for i, value in zip(dense, dense_means, strict=True):
    averaged[i] = value
  # update = mean_i sent_i
  for i, value in zip(members, received.mean, strict=True):
    averaged[i] = value.reshape(plan.leaves[i].shape)
  energy = lambda z: jnp.sum(jnp.square(z / unit), axis=1)  # noqa: E731
  # |mean_i residual_i|^2
  lost = [energy(z) for z in z_residual]
  # |mean_i M_i|^2 - |mean_i residual_i|^2, from sketches with the same signs;
  # the lost share is lost / (kept + lost).
  kept = [
    jnp.maximum(energy(z) - missing, 0.0)
    for z, missing in zip(z_all, lost, strict=True)
  ]
  # A non-finite entry may not have been sent, but it makes the sketch of M
  # non-finite.
  is_finite = dataflow.all_finite((averaged, z_all))
  averaged = dataflow.zeros_unless(is_finite, averaged)
  left = dict(zip(members, residual, strict=True))
  old = dict(zip(members, residuals, strict=bool(residuals)))
  settled = [
    error_feedback.settled(
      mean,
      left[i].reshape(mean.shape) if i in left else None,
      gradients[i],
      old.get(i),
      is_finite,
    )
    for i, mean in enumerate(averaged)
  ]
  return Exchange(
    averaged=[mean for mean, _ in settled],
    residual=[settled[i][1] for i in old],
    factors=factors,
    columns=[k[:, None] for k in kept],
    lost=lost,
    residual_energy=residual_energy,
    unit=unit,
    is_finite=is_finite,
  )


@dataclasses.dataclass(frozen=True)
class TopK:
  """Sends the entries of largest magnitude on each replica.

  Replicas gather values and indices, and each adds up all of them:

    k = max(1, round(density n)),   sent_i = the k largest |x_i|,
    mean = sum_i sent_i / N

  Wire: N (4 + 4) k / 2 bytes, an all-gather, which grow with the replicas.

  Attributes:
    density: Share of the entries that is sent.
    sample_rate: If given, a random sample of this share of the entries
      estimates a threshold, instead of a selection from all (Deep Gradient
      Compression, Lin et al. 2018, arXiv:1712.01887). Shapes are static, so
      at most k entries are sent: the first ones above the threshold, counted
      from a random position. More entries wait in the residual; if fewer pass,
      the remaining places stay empty.
  """

  density: float
  sample_rate: float | None = None

  def average(
    self, values: Sequence[jax.Array], key: jax.Array, axis_name: str
  ) -> Averaged:
    """Averages flat float32 arrays at the entries that each replica picks."""
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
    entries, places = (jnp.split(x, ends, axis=1) for x in gathered)
    mean, sent = [], []
    for j, value in enumerate(values):
      zeros = jnp.zeros_like(value)
      sent.append(zeros.at[indices[j]].set(picked[j], mode="drop"))
      # mean = sum_i sent_i / N
      mean.append(_total(entries[j], places[j], value.size) / replicas)
    return Averaged(mean, sent, None)

  def num_bytes(self, sizes: Sequence[int], replicas: int) -> int:
    """Predicts the bytes: half of the gathered values and indices."""
    return sum(replicas * 4 * _count(self.density, size) for size in sizes)

  def _largest(self, value: jax.Array, key: jax.Array) -> jax.Array:
    """Returns the k indices to send, int32; `size` in places left empty."""
    count, size = _count(self.density, value.size), value.size
    # Non-finite entries are sent, so that all replicas detect them.
    magnitude = jnp.where(jnp.isfinite(value), jnp.abs(value), jnp.inf)
    if self.sample_rate is None:
      return jax.lax.top_k(magnitude, count)[1]
    sample_size = max(_LEAST_SAMPLE, round(self.sample_rate * size))
    places = _one_of_each_run(size, min(sample_size, size), key)[0]
    # The threshold is the same quantile of the sample as of all entries.
    in_sample = max(1, round(self.density * len(places)))
    threshold = jax.lax.top_k(magnitude[places], in_sample)[0][-1]
    start = jax.random.randint(jax.random.fold_in(key, 1), (), 0, size)
    # Zeros are not worth sending, even if the threshold is zero.
    passes = jnp.roll((magnitude >= threshold) & (magnitude > 0), -start)
    (found,) = jnp.nonzero(passes, size=count, fill_value=size)
    found = found.astype(jnp.int32)
    shifted = jnp.where(
      found < size - start, found + start, found + start - size
    )
    return jnp.where(found < size, shifted, size)


@dataclasses.dataclass(frozen=True)
class RandomK:
  """Sends random entries, the same on all replicas.

  A tensor of n entries is cut into k = max(1, round(density n)) runs of equal
  length, up to one entry, and one entry of each run is drawn. No indices are
  sent.

  Wire: 4 k bytes, in one all-reduce.

  Attributes:
    density: Share of the entries that is sent.
    is_scaled: Whether an entry is multiplied by the length of its run, which
      makes the mean unbiased. Use it without error feedback only.
  """

  density: float
  is_scaled: bool

  def average(
    self, values: Sequence[jax.Array], key: jax.Array, axis_name: str
  ) -> Averaged:
    """Averages flat float32 arrays at entries drawn from the key."""
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
    """Predicts the bytes of one all-reduce of float32."""
    del replicas
    return 4 * sum(_count(self.density, size) for size in sizes)


def _count(density: float, size: int) -> int:
  """Returns k, the number of entries sent of a tensor.

  Raises:
    ValueError: if the tensor is too large for int32 indices.
  """
  if size > _MOST_ENTRIES:
    raise ValueError(
      f"`updates` must have leaves of at most {_MOST_ENTRIES:,} entries, the"
      f" range of int32 indices, got one of {size:,}; split it, or send it"
      " dense with a `matrix_view` that returns None for it."
    )
  return max(1, round(density * size))


def _one_of_each_run(
  size: int, count: int, key: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """Draws one position from each of `count` runs.

  Returns:
    The positions and the lengths of the runs, int32 [count] each.
  """
  shorter, longer = divmod(size, count)
  i = jnp.arange(count, dtype=jnp.int32)
  lengths = shorter + (i < longer).astype(jnp.int32)
  starts = i * shorter + jnp.minimum(i, longer)
  # Integer arithmetic only: it gives the same result on every platform.
  return starts + jax.random.randint(key, (count,), 0, lengths), lengths


def _total(values: jax.Array, places: jax.Array, size: int) -> jax.Array:
  """Adds up the values [N, k] of N replicas at their places; float32 [size].

  Replicas are added one after the other. The places of one replica differ, so
  every entry is summed in the same order on all devices, even if a device
  scatters with atomics.
  """

  def add(j: int, total: jax.Array) -> jax.Array:
    return total.at[places[j]].add(values[j], mode="drop")

  zeros = jnp.zeros_like(values, shape=(size,))
  return jax.lax.fori_loop(0, len(values), add, zeros)
