"""Prints modelled times of a configuration on a cluster that is not at hand.

  python experiments/lab/plan_cluster.py --config=configs/paper/gpt2_2b5.py \
      --hardware=v100 --megabits=10000

Trains nothing. Compares the reducer of the configuration with dense float32:
seconds of a step, of stage 0's exchanges, what all exchanges add to a step, and
megabytes of a device, as means over the whole run; and the ranks of the stages.
`--fall` is how many nats the gradients' entropy loses over the run; or
`--curve` is a run of `edgc`, its metrics.jsonl or record, whose entropy it
takes. All numbers are modelled (`experiments/lab/planning/cluster.py` has the
formulas); none is measured.
"""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

import dataclasses
import math

import jax
from absl import flags
from ml_collections import ConfigDict

from experiments.lab.planning import cluster, presets
from experiments.lab.planning.cluster import Run
from experiments.trainer.runtime import command_line
from experiments.trainer.runtime.refusals import refusals
from experiments.trainer.training import checks

_HARDWARE = flags.DEFINE_enum(
  "hardware", "v100", list(presets.HARDWARE), "The devices."
)
_GIVEN = [
  *(
    flags.DEFINE_float(name, None, f"Replaces `{name}` of --hardware.")
    for name in ("peak", "share", "memory", "inside", "megabits", "round_trip")
  ),
  flags.DEFINE_bool("recomputes", None, "Whether activations are recomputed."),
]
_CURVE = flags.DEFINE_string(
  "curve",
  "falling",
  f"How the entropy falls: {', '.join(presets.CURVES)}, or a run's file.",
)
_FALL = flags.DEFINE_float(
  "fall", 3.0, "Nats that the entropy loses; not read of a run's file."
)


def main(config: ConfigDict) -> None:
  """Prints the assumptions, the times and the ranks."""
  given = {flag.name: flag.value for flag in _GIVEN if flag.value is not None}
  dense = config.copy_and_resolve_references()
  dense.reducer, dense.allreduce.wire_dtype = "allreduce", "float32"
  with refusals():
    checks.task_of(config)
    cluster.require_planned(config)
    hardware = dataclasses.replace(presets.HARDWARE[_HARDWARE.value], **given)
    curve = _curve(_CURVE.value, _FALL.value)
    runs = {
      "dense": cluster.run_of(dense, hardware),
      config.reducer: cluster.run_of(config, hardware, curve),
    }
  print(f"{config.name}, modelled on {hardware}")
  print(_table(runs, cluster.compute_of(config, hardware).step))
  chosen = runs[config.reducer].ranks
  for first, ranks in chosen if any(any(own) for _, own in chosen) else ():
    text = " / ".join(str(rank or "dense") for rank in ranks)
    print(f"from step {first:,}: {text}")


def _curve(name: str, fall: float) -> presets.Curve:
  """Returns the entropy over the run."""
  if name not in presets.CURVES:
    return presets.measured(name)
  if not math.isfinite(fall):
    raise ValueError(
      f"`fall` must be finite, got {fall}; 1.7 nats are the protocol's."
    )
  return presets.CURVES[name](fall)


def _table(runs: dict[str, Run], compute: float) -> str:
  """Formats runs, the first of which the others are compared with."""
  first = next(iter(runs.values()))
  head = f"{'':12}{'step, s':>10}{'stage 0, s':>12}{'added, s':>10}{'MB':>10}"
  lines = [f"computing takes {compute:.3f} s of a step", head]
  for name, run in runs.items():
    less = ""
    if run is not first:
      less = (
        f"  stage 0 {run.communication / first.communication - 1:+.1%},"
        f" step {run.step / first.step - 1:+.1%},"
        f" MB {run.megabytes / first.megabytes - 1:+.1%}"
      )
    lines.append(
      f"{name:12}{run.step:10.3f}{run.communication:12.3f}"
      f"{run.exposed:10.3f}{run.megabytes:10.1f}{less}"
    )
  return "\n".join(lines)


if __name__ == "__main__":
  jax.config.update("jax_platforms", "cpu")  # no device is needed
  command_line.run(main)
