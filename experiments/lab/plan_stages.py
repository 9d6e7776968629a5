"""Prints the ranks of aligned pipeline stages for several link speeds.

  python experiments/lab/plan_stages.py --config=configs/gpt2_tiny_pipeline.py

Trains nothing. For every link and every possible rank of stage 0, it prints
the ranks of all stages and when their exchanges end, in milliseconds after the
end of stage 0's backward pass.
"""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import optax
from absl import flags
from ml_collections import ConfigDict

import edgc_jax
from edgc_jax.budget import alignment
from edgc_jax.measure.description import reviewed
from experiments.trainer.parallel import meshes
from experiments.trainer.runtime import command_line
from experiments.trainer.runtime.refusals import refusals
from experiments.trainer.training import checks, optimizer, times

_MBITS = flags.DEFINE_list(
  "mbits", ["50", "100", "1000"], "Links to plan for, in Mbit/s."
)


def main(config: ConfigDict) -> None:
  """Prints a table for each link speed."""
  with refusals():
    checks.check_keys(config)
    config.mesh.backend = "jit"
    task = checks.task_of(config)
    speeds = _positive(_MBITS.value)
  mesh = meshes.of_config(config)
  given = times.options_of(config, task, mesh)
  if "backward_seconds" not in given:
    sys.exit(
      "error: `mesh.stage` must be above 1 and `pipeline.align` slack, with the"
      f" reducer edgc, got {config.mesh.stage}, {config.pipeline.align!r} and"
      f" {config.reducer!r}; other configurations do not align stages."
    )
  params = task.layout(mesh.shape).of_one_device(mesh.shape)
  for mbits in speeds:
    uplink = edgc_jax.LinkModel.of_uplink(
      mbits, 0.0, max(2, config.mesh.data), config.mesh.tensor
    )
    link = dataclasses.replace(given["link"], bandwidth=uplink.bandwidth)
    tx = optimizer.make_reducer(config, task, given | {"link": link})
    print(f"{mbits:g} Mbit/s, {_table(config, params, tx, given)}")


def _positive(texts: Sequence[str]) -> list[float]:
  """Returns the speeds that a flag lists."""
  try:
    speeds = [float(text) for text in texts]
  except ValueError:
    speeds = []
  if not speeds or not all(0 < speed < math.inf for speed in speeds):
    raise ValueError(
      f"`--mbits` must be positive numbers, got {texts}; 1000 is 1 Gbit/s"
      " Ethernet."
    )
  return speeds


def _table(
  config: ConfigDict,
  params: Any,
  tx: optax.GradientTransformation,
  given: dict[str, Any],
) -> str:
  """Returns a table with a line for each rank of stage 0 on a link."""
  backward = given["backward_seconds"]
  (found,) = reviewed(tx, params)
  ranks, seconds = found.budget.ladder, getattr(found.budget, "seconds", None)
  if seconds is None:
    return "no rank is faster than dense; use allreduce or quantize"
  table = alignment.aligned_levels(seconds, config.mesh.stage, backward)
  lines = [
    f"dense {seconds[0] * 1e3:.1f} ms, a microbatch's backward pass"
    f" {backward * 1e3:.1f} ms",
    f"  {'stage 0 on':<12}{'ranks':<28}end of exchange, ms",
  ]
  for levels in table.T[1:]:
    names = [str(ranks[level] or "dense") for level in levels]
    ends = alignment.finish_seconds(seconds, levels, backward)
    ends = " ".join(f"{1e3 * end:8.1f}" for end in np.asarray(ends))
    lines.append(f"  {names[0]:<12}{' / '.join(names):<28}{ends}")
  return "\n".join(lines)


if __name__ == "__main__":
  command_line.run(main)
