"""Clusters with known devices, and curves of entropy to plan with.

Peaks and bandwidths of memory are those of the vendors' data sheets. All else
is an assumption; docs/paper.md shows what each is worth.
"""

from collections.abc import Callable

from experiments.planning.cluster import Hardware

HARDWARE = {
  # float32 without tensor cores: the scripts name no other precision.
  "v100": Hardware(
    peak=15.7e12, share=0.45, memory=900e9, inside=120e9, megabits=10_000,
    round_trip=1e-4,
  ),
  # TF32 on tensor cores, as in NVIDIA's containers. PyTorch alone has it off,
  # and then the peak is 67e12.
  "h100": Hardware(
    peak=495e12, share=0.35, memory=3350e9, inside=400e9, megabits=100_000,
    round_trip=5e-5,
  ),
}  # fmt: skip


def falling(nats: float) -> Callable[[float], float]:
  """Returns a curve that falls throughout, half of it in the first tenth.

    H(x) = -1.1 nats x / (x + 0.1)

  with x from 0 to 1, the share of the run.
  """
  return lambda x: -1.1 * nats * x / (x + 0.1)


def early(nats: float) -> Callable[[float], float]:
  """Returns a curve that falls in the first twentieth, and then stays.

    H(x) = -nats min(1, 20 x)

  So did the entropy of the protocol's runs, by 1.7 nats (docs/entropy.md).
  """
  return lambda x: -nats * min(1.0, 20 * x)


CURVES = {"falling": falling, "early": early}
