"""Clusters with known devices, and curves of entropy to plan with.

Peaks and bandwidths of memory are those of the vendors' data sheets. All else
is an assumption; docs/paper.md shows what each is worth.
"""

import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from experiments.planning.cluster import Hardware

HARDWARE = {
  # float32 without tensor cores: the scripts name no other precision.
  "v100": Hardware(
    peak=15.7e12, share=0.45, memory=900e9, inside=120e9, megabits=10_000,
    round_trip=1e-4,
  ),
  # TF32 on tensor cores, PyTorch's usual precision of float32 layers there.
  "h100": Hardware(
    peak=495e12, share=0.35, memory=3350e9, inside=400e9, megabits=100_000,
    round_trip=5e-5,
  ),
}  # fmt: skip


def falling(nats: float) -> Callable[[float], float]:
  """Returns a curve that falls throughout, half of it in the first tenth.

    H(x) = -1.1 nats x / (x + 0.1),   x from 0 to 1

  Raises:
    ValueError: if `nats` is not finite.
  """
  _require_finite(nats)
  return lambda x: -1.1 * nats * x / (x + 0.1)


def early(nats: float) -> Callable[[float], float]:
  """Returns a curve that falls in the first twentieth, and then stays.

    H(x) = -nats min(1, 20 x)

  So did the entropy of the protocol's runs, by 1.7 nats (docs/entropy.md).

  Raises:
    ValueError: if `nats` is not finite.
  """
  _require_finite(nats)
  return lambda x: -nats * min(1.0, 20 * x)


def interpolated(
  shares: npt.ArrayLike, entropy: npt.ArrayLike
) -> Callable[[float], float]:
  """Returns a curve through measured entropies, straight between them.

  Args:
    shares: Rising shares of the run, from 0 to 1.
    entropy: The entropy at each of them, in nats.

  >>> interpolated([0.0, 0.2, 1.0], [-4.0, -6.0, -5.0])(0.6)
  -5.5
  """
  return lambda x: float(np.interp(x, shares, entropy))


CURVES = {"falling": falling, "early": early}


def _require_finite(nats: float) -> None:
  if not math.isfinite(nats):
    raise ValueError(
      f"`fall` must be finite, got {nats}; 1.7 nats are the protocol's."
    )
