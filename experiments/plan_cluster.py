"""Prints modelled times of a configuration on a cluster that is not at hand.

  python experiments/plan_cluster.py --config=configs/paper/gpt2_2b5.py \
      --hardware=v100 --megabits=10000

Trains nothing. Compares the reducer of the configuration with dense float32:
seconds of a step, of communication, and what exchanges add to a step, as means
over the whole run, and the ranks of the stages by window. `--fall` is how many
nats the gradients' entropy loses over the run. All numbers are modelled
(`experiments/planning/cluster.py` has the formulas); none is measured.
"""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

import dataclasses

from absl import flags
from ml_collections import ConfigDict

from experiments import tasks
from experiments.planning import cluster, presets
from experiments.planning.cluster import Run
from experiments.runtime import command_line

_HARDWARE = flags.DEFINE_enum(
  "hardware", "v100", list(presets.HARDWARE), "The devices."
)
_GIVEN = {
  name: flags.DEFINE_float(name, None, f"Replaces `{name}` of --hardware.")
  for name in ("peak", "share", "memory", "inside", "megabits", "round_trip")
}
_FALL = flags.DEFINE_float("fall", 3.0, "Nats that the entropy loses.")


def main(config: ConfigDict) -> None:
  """Prints the assumptions, the times and the ranks."""
  given = {name: flag.value for name, flag in _GIVEN.items() if flag.value}
  hardware = dataclasses.replace(presets.HARDWARE[_HARDWARE.value], **given)
  dense = config.copy_and_resolve_references()
  dense.reducer = "allreduce"
  try:
    tasks.make(config)
    curve = presets.falling(_FALL.value)
    runs = {
      "dense": cluster.run_of(dense, hardware),
      config.reducer: cluster.run_of(config, hardware, curve),
    }
  except ValueError as error:
    sys.exit(f"error: {error}")
  print(f"{config.name}, modelled on {hardware}")
  print(_table(runs, cluster.compute_of(config, hardware).step))
  for first, ranks in _changes(runs[config.reducer], config.edgc.window):
    text = " / ".join(str(rank or "dense") for rank in ranks)
    print(f"from step {first:,}: {text}")


def _table(runs: dict[str, Run], compute: float) -> str:
  """Formats runs, the first of which the others are compared with."""
  first = next(iter(runs.values()))
  head = f"{'':12}{'step, s':>10}{'communication':>15}{'exposed':>10}{'MB':>10}"
  lines = [f"computing takes {compute:.3f} s of a step", head]
  for name, run in runs.items():
    less = ""
    if run is not first:
      less = (
        f"  communication {run.communication / first.communication - 1:+.1%},"
        f" step {run.step / first.step - 1:+.1%}"
      )
    lines.append(
      f"{name:12}{run.step:10.3f}{run.communication:15.3f}"
      f"{run.exposed:10.3f}{run.megabytes:10.1f}{less}"
    )
  return "\n".join(lines)


def _changes(run: Run, window: int) -> list[tuple[int, tuple[int, ...]]]:
  """Returns the first step and the ranks of each window with new ranks."""
  found: list[tuple[int, tuple[int, ...]]] = []
  for i, ranks in enumerate(run.ranks):
    if not found or found[-1][1] != ranks:
      found.append((i * window, ranks))
  return found


if __name__ == "__main__":
  command_line.run(main)
