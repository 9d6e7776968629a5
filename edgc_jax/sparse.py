"""A few entries of every tensor: the largest, or random ones."""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from edgc_jax import collectives
from edgc_jax.averages import Averaged

_LEAST_SAMPLE = 256  # entries, or all there are


@dataclasses.dataclass(frozen=True)
class TopK:
  """The entries of largest magnitude, each replica's own.

  Values and indices are gathered, and every replica adds up those of all:

    k = max(1, round(density n)),   sent_i = the k largest of x_i,
    mean = sum_i sent_i / N

  Bytes: N (4 + 4) k / 2, an all-gather: they grow with the replicas.

  Attributes:
    density: Share of the entries.
    sample_rate: Where given, the threshold is that of a strided sample of so
      many entries instead of a selection from all (Deep Gradient Compression,
      Lin et al. 2018, arXiv:1712.01887). As shapes are static no more than k
      entries are sent, the first that pass it; what more there are wait in
      the residual, and where there are fewer, zeros fill up.
  """

  density: float
  sample_rate: float | None = None

  def average(
    self, values: Sequence[jax.Array], key: jax.Array, axis_name: str
  ) -> Averaged:
    """Averages flat float32 arrays; nothing is drawn."""
    del key
    replicas = collectives.num_devices(axis_name)
    chosen = [self._largest(value) for value in values]
    picked = [
      value[i] * kept for value, (i, kept) in zip(values, chosen, strict=True)
    ]
    indices = jnp.concatenate([i for i, _ in chosen])
    gathered, gathered_indices = collectives.gather(
      (jnp.concatenate(picked), indices), axis_name
    )
    mean, sent = [], []
    ends = np.cumsum([len(p) for p in picked])[:-1]
    columns = zip(
      jnp.split(gathered, ends, axis=1),
      jnp.split(gathered_indices, ends, axis=1),
      strict=True,
    )
    for value, own, (i, _), (theirs, their_i) in zip(
      values, picked, chosen, columns, strict=True
    ):
      sent.append(jnp.zeros_like(value).at[i].add(own))
      total = jnp.zeros(value.shape).at[their_i.ravel()].add(theirs.ravel())
      mean.append(total / replicas)
    return Averaged(mean, sent, None)

  def num_bytes(self, sizes: Sequence[int], replicas: int) -> int:
    """Half of what is gathered."""
    return sum(replicas * 4 * self._count(size) for size in sizes)

  def _count(self, size: int) -> int:
    return max(1, round(self.density * size))

  def _largest(self, value: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Indices int32 [k], and which of them count."""
    count, magnitude = self._count(value.size), jnp.abs(value)
    # A non-finite entry is sent, so that all replicas see it.
    magnitude = jnp.where(jnp.isfinite(value), magnitude, jnp.inf)
    if self.sample_rate is None:
      indices = jax.lax.top_k(magnitude, count)[1]
      return indices, jnp.ones_like(value, shape=count)
    size = max(_LEAST_SAMPLE, round(self.sample_rate * value.size))
    stride = max(1, value.size // size)
    sample = magnitude[::stride]
    in_sample = max(1, round(self.density * sample.size))
    threshold = jax.lax.top_k(sample, in_sample)[0][-1]
    (indices,) = jnp.nonzero(
      magnitude >= threshold, size=count, fill_value=value.size
    )
    kept = (indices < value.size).astype(jnp.float32)
    return jnp.minimum(indices, value.size - 1).astype(jnp.int32), kept


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
    picked, places, scales = [], [], []
    for position, value in enumerate(values):
      ends = self._ends(value.size)
      lengths = jnp.asarray(np.diff(ends, prepend=0), jnp.int32)
      own_key = jax.random.fold_in(key, position)
      draws = jax.random.uniform(own_key, lengths.shape)
      offsets = jnp.minimum((draws * lengths).astype(jnp.int32), lengths - 1)
      place = jnp.asarray(ends, jnp.int32) - lengths + offsets
      picked.append(value[place])
      places.append(place)
      scales.append(lengths.astype(jnp.float32) if self.is_scaled else 1.0)
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
    return 4 * sum(len(self._ends(size)) for size in sizes)

  def _ends(self, size: int) -> np.ndarray:
    """Where each run ends."""
    count = max(1, round(self.density * size))
    return np.arange(1, count + 1) * size // count
