"""Clusters with known devices, and curves of entropy to plan with.

Peaks and bandwidths of memory are those of the vendors' data sheets. All else
is an assumption; results/paper.md shows what each is worth.
"""

import json
import pathlib
from collections.abc import Callable, Sequence

import numpy as np
import pandas as pd

from experiments.lab.planning.cluster import Hardware

Curve = Callable[[float], float]  # entropy, in nats, at a share of the run

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


def falling(nats: float) -> Curve:
  """Returns a curve that falls throughout, half of it in the first tenth.

    H(x) = -1.1 nats x / (x + 0.1)

  with x from 0 to 1, the share of the run.
  """
  return lambda x: -1.1 * nats * x / (x + 0.1)


def early(nats: float) -> Curve:
  """Returns a curve that falls in the first twentieth, and then stays.

    H(x) = -nats min(1, 20 x)

  So did the entropy of the protocol's runs, by 1.7 nats (docs/results.md).
  """
  return lambda x: -nats * min(1.0, 20 * x)


def through(shares: Sequence[float], entropy: Sequence[float]) -> Curve:
  """Returns the curve through points, constant before and after them."""
  return lambda x: float(np.interp(x, shares, entropy))


def measured(file: str) -> Curve:
  """Returns the entropy that a run of `edgc` has measured.

  Args:
    file: `metrics.jsonl` of its run folder, whose last step counts as the end
      of the run, or its record in results/records.

  Raises:
    ValueError: if it is no such file, or has no entropy.
  """
  path, remedy = pathlib.Path(file), "give metrics.jsonl or a record of edgc"
  if not path.is_file():
    raise ValueError(
      f"`curve` must be one of {', '.join(CURVES)}, or a file of a run, got"
      f" {file!r}; {remedy}."
    )
  try:
    if path.suffix == ".jsonl":
      lines = pd.read_json(path, lines=True)
      last = lines["step"].max()
    else:
      record = json.loads(path.read_text())
      lines, last = pd.DataFrame(record["lines"]), record["config"]["steps"]
    found = lines[["step", "entropy"]].dropna().astype(float)
    if found.empty:
      raise ValueError("no entropy")
  except (ValueError, KeyError, TypeError, RecursionError) as error:
    raise ValueError(
      f"`curve` must be a run with steps and entropies, got {file}"
      f" ({type(error).__name__}: {error}); {remedy}."
    ) from error
  return through(found["step"] / last, found["entropy"])


CURVES = {"falling": falling, "early": early}
