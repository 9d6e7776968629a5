"""Sampled differential entropy of the gradient, in nats.

Each sample reads one entry in `1 / entry_rate` of every matrix, from an offset
that moves by one per sample. The scale of a matrix is the standard deviation
of a Gaussian with the same mean |x|, which a few outliers hardly change.
Entries beyond 8 scales are clipped; exact zeros (rows of an embedding that no
token used) and non-finite entries are left out. The replicas sum their counts
and moments, so the estimate is the entropy of their pooled entries, equal on
all replicas.

  gaussian:   H = 1/2 ln(2 pi e s^2)
  histogram:  H = - sum_b p_b ln p_b + ln(bin width)

The logarithm of the bin width makes the histogram's entropy differential:
without it, H would not change when all gradients shrink. Source: the sampling
of arXiv:2511.10333. Differences: that term, the clipping, bins with fixed edges
around zero instead of min and max, moving offsets, pooling over replicas.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from edgc_jax import validation
from edgc_jax.wire.channel import Channel

_CLIP = 8.0  # in scales
Stacks = Sequence[jax.Array]
_GAUSSIAN_SCALE = math.sqrt(math.pi / 2)  # std over mean |x| of a Gaussian


@dataclasses.dataclass(frozen=True)
class Sampling:
  """Options of the entropy estimate.

  Attributes:
    step_rate: Share of steps whose entropy is sampled, in (0, 1].
    entry_rate: Share of entries read in such a step, in (0, 1]: every n-th,
      with n = 1 / entry_rate. One sample reads all columns of a matrix only if
      n is coprime to its width, as 5 (0.2) is to most.
    estimator: "gaussian" or "histogram".
    bins: Number of bins of the histogram.

  Raises:
    TypeError: if an attribute is not a Python number.
    ValueError: if an attribute is out of range.
  """

  step_rate: float = 0.1
  entry_rate: float = 0.25
  estimator: str = "gaussian"
  bins: int = 1000

  def __post_init__(self) -> None:
    validation.require_share("step_rate", self.step_rate)
    validation.require_share("entry_rate", self.entry_rate)
    validation.require_one_of("estimator", self.estimator, tuple(ESTIMATORS))
    validation.require_int("bins", self.bins, 1)

  @property
  def period(self) -> int:
    """Steps from one sample to the next."""
    return round(1 / self.step_rate)

  @classmethod
  def for_window(cls, window: int) -> "Sampling":
    """Returns the default sampling, adapted to windows of `window` steps.

    Takes at least ten samples per window, or one per step in shorter windows,
    and lowers `entry_rate` so that as many entries are read in a window.

    >>> Sampling.for_window(20)
    Sampling(step_rate=0.5, entry_rate=0.05, estimator='gaussian', bins=1000)
    """
    validation.require_int("window", window, 1)
    period = min(round(1 / cls.step_rate), max(1, window // 10))
    entry_rate = cls.entry_rate * cls.step_rate * period
    return cls(1 / period, round(entry_rate, 3))


class EntropySample(NamedTuple):
  """One estimate, equal on all replicas."""

  entropy: jax.Array  # float32 [], nats
  variance: jax.Array  # float32 [K], mean square of each matrix's entries
  entropies: jax.Array  # float32 [K], of each matrix as if Gaussian, nats
  weight: jax.Array  # float32 [], 1 for a usable estimate, else 0


def estimate(
  gradients: Sequence[jax.Array],
  index: jax.Array,
  channel: Channel,
  sampling: Sampling,
) -> EntropySample:
  """Estimates the entropy of the local gradients, pooled over the replicas.

  Wire: two all-reduces of float32, counts and magnitudes of K matrices, then K
  squares and either K sums or the counts of all bins.

  Args:
    gradients: The compressible leaves as stacks [k, ...] of matrices, local,
      floating.
    index: int32 [], index of the sample; selects the entries to read.
    channel: To the other replicas.
    sampling: The entries to read, and the estimator.

  Returns:
    The sample; its weight is 0 if no matrix had a finite non-zero entry, or if
    the estimate is not finite.
  """
  stride = max(1, round(1.0 / sampling.entry_rate))
  samples, place = _joined([_subsample(g, stride, index) for g in gradients])
  sizes = jnp.array(
    [x.shape[1] for x in samples for _ in range(len(x))], jnp.float32
  )
  sizes = sizes * channel.num_devices
  usable = [jnp.isfinite(x) & (x != 0) for x in samples]
  samples = [jnp.where(u, x, 0.0) for x, u in zip(samples, usable, strict=True)]
  count, magnitude = channel.total(
    (_sums(usable), _sums([jnp.abs(x) for x in samples]))
  )
  # scale = sqrt(pi / 2) mean |x|
  scale = _GAUSSIAN_SCALE * magnitude / jnp.maximum(count, 1.0)
  top = jnp.max(scale)
  top = jnp.where((top > 0) & jnp.isfinite(top), top, 1.0)
  # Clip, and divide by the largest scale, so that squares stay in range.
  clipped, start = [], 0
  for x in samples:
    limit = _CLIP * scale[start : start + len(x), None] / top
    clipped.append(jnp.clip(x / top, -limit, limit))
    start += len(x)
  squares = _sums([jnp.square(x) for x in clipped])
  collect, entropy_of = ESTIMATORS[sampling.estimator]
  local = collect(clipped, usable, sampling.bins)
  squares, pooled = channel.total((squares, local))
  entropy = entropy_of(pooled, squares, count)

  variance = squares / sizes * jnp.square(top)
  is_usable = jnp.isfinite(entropy) & jnp.all(jnp.isfinite(variance))
  is_usable &= jnp.sum(count) > 0
  entropies = _gaussian_entropy(squares / jnp.maximum(count, 1.0))
  # H(top x) = H(x) + ln top
  return EntropySample(
    jnp.where(is_usable, entropy + jnp.log(top), 0.0),
    jnp.where(is_usable, variance, 0.0)[place],
    jnp.where(is_usable, entropies + jnp.log(top), 0.0)[place],
    is_usable.astype(jnp.float32),
  )


def _subsample(x: jax.Array, stride: int, index: jax.Array) -> jax.Array:
  """Returns every stride-th entry of each matrix [k, ...]; float32 [k, n].

  The offset is `index` modulo `stride`. Matrices of fewer entries than the
  stride are read whole.
  """
  flat = x.reshape(len(x), -1)
  whole = flat.shape[1] // stride
  if whole == 0:
    return flat.astype(jnp.float32)
  table = flat[:, : whole * stride].reshape(len(x), whole, stride)
  picked = jax.lax.dynamic_index_in_dim(table, index % stride, 2, False)
  return picked.astype(jnp.float32)


def _joined(samples: Stacks) -> tuple[list[jax.Array], np.ndarray]:
  """Joins samples of equal length, so that they are compiled once.

  Returns:
    Stacks [k, n] of different n, and the place of each of K matrices in them.
  """
  kinds: dict[int, list[int]] = {}
  for i, x in enumerate(samples):
    kinds.setdefault(x.shape[1], []).append(i)
  ends = np.cumsum([0, *(len(x) for x in samples)])
  before = [
    np.arange(ends[i], ends[i + 1]) for own in kinds.values() for i in own
  ]
  stacks = [
    jnp.concatenate([samples[i] for i in own]) for own in kinds.values()
  ]
  return stacks, np.argsort(np.concatenate(before))


def _sums(stacks: Sequence[jax.Array]) -> jax.Array:
  """Sums each row of all stacks [k, n]; float32 [K]."""
  return jnp.concatenate([jnp.sum(x, 1, dtype=jnp.float32) for x in stacks])


def _gaussian_entropy(variance: jax.Array) -> jax.Array:
  """Returns 1/2 ln(2 pi e variance), finite for a variance of 0."""
  smallest = float(jnp.finfo(jnp.float32).tiny)
  return 0.5 * jnp.log(2 * math.pi * math.e * jnp.maximum(variance, smallest))


def _moments(samples: Stacks, usable: Stacks, bins: int) -> jax.Array:
  """Sums the entries of each matrix; float32 [K]."""
  del usable, bins
  return _sums(samples)


def _entropy_of_moments(
  sums: jax.Array, squares: jax.Array, count: jax.Array
) -> jax.Array:
  """Returns the entropy of a Gaussian of the pooled variance."""
  # H = 1/2 ln(2 pi e s^2)
  num = jnp.maximum(jnp.sum(count), 1.0)
  variance = jnp.sum(squares) / num - jnp.square(jnp.sum(sums) / num)
  return _gaussian_entropy(variance)


def _histogram(samples: Stacks, usable: Stacks, bins: int) -> jax.Array:
  """Counts the usable entries in equal bins over [-8, 8]; float32 [bins]."""
  counts = jnp.zeros(bins, jnp.int32)  # float32 does not count above 2^24
  for x, u in zip(samples, usable, strict=True):
    place = (x + _CLIP) * (bins / (2.0 * _CLIP))
    place = jnp.clip(place.astype(jnp.int32), 0, bins - 1)
    # Unusable entries get an index out of range, and are dropped.
    counts = counts.at[jnp.where(u, place, bins)].add(1, mode="drop")
  return counts.astype(jnp.float32)


def _entropy_of_histogram(
  counts: jax.Array, squares: jax.Array, count: jax.Array
) -> jax.Array:
  """Returns the differential entropy of a histogram over [-8, 8]."""
  del squares, count
  # H = - sum_b p_b ln p_b + ln(bin width)
  p = counts / jnp.maximum(jnp.sum(counts), 1.0)
  entropy = -jnp.sum(p * jnp.log(jnp.where(p > 0, p, 1.0)))
  return entropy + math.log(2.0 * _CLIP / len(counts))


# By name: what replicas collect of their samples, and add up, and the entropy
# of these sums. Both estimators have one signature.
ESTIMATORS = {
  "gaussian": (_moments, _entropy_of_moments),
  "histogram": (_histogram, _entropy_of_histogram),
}
