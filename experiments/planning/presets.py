"""Clusters with known devices, and the curves of entropy to plan with.

Peaks are those of the vendors' data sheets, dense, at the precision named. What
is not on a data sheet is an assumption, and a table of docs/paper.md shows what
each is worth.
"""

from collections.abc import Callable

from experiments.planning.cluster import Hardware

HARDWARE = {
  # float32 without tensor cores: the scripts name no other precision.
  "v100": Hardware(
    peak=15.7e12, share=0.45, memory=800e9, inside=120e9, megabits=10_000,
    round_trip=1e-4,
  ),
  # TF32 on tensor cores, PyTorch's usual precision of float32 layers there.
  "h100": Hardware(
    peak=495e12, share=0.35, memory=3000e9, inside=400e9, megabits=100_000,
    round_trip=5e-5,
  ),
}  # fmt: skip


def falling(nats: float) -> Callable[[float], float]:
  """Returns a curve that falls by so many nats, half of it in a tenth.

    H(x) = -nats (x / (x + 0.1)) (1 + 0.1),   x from 0 to 1

  Gradients of language models lose entropy fast at first, and slowly later.
  """
  return lambda x: -nats * 1.1 * x / (x + 0.1)
