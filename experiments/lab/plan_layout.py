"""Compiles a configuration for its own mesh, and prints what a device needs.

  python experiments/lab/plan_layout.py --config=configs/paper/gpt2_12b.py

Trains nothing and allocates nothing: the devices are virtual, and all arrays
are shapes. Prints the bytes that a device sends over the replicas at each rank,
predicted and read from the compiled program, and its memory. Compiling takes
minutes. --output adds the result to a JSON file.
"""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

import json
from typing import Any

import jax
from absl import flags
from ml_collections import ConfigDict

from experiments.lab.planning import layouts
from experiments.trainer.runs.run_folder import write
from experiments.trainer.runtime import command_line
from experiments.trainer.runtime.json_files import read_json
from experiments.trainer.runtime.refusals import refusals
from experiments.trainer.training import checks

_OUTPUT = flags.DEFINE_string("output", "", "JSON file that gets the result.")


def main(config: ConfigDict) -> None:
  """Compiles, and prints a table."""
  with refusals():
    checks.check_keys(config)
    if config.mesh.backend != "jit":
      raise ValueError(
        f"`mesh.backend` must be jit, got {config.mesh.backend!r}: others have"
        " no mesh to plan; set --config.mesh.backend=jit."
      )
    checks.task_of(config)
    _kept()
  found = layouts.compile_step(config)
  print(_table(config.name, found))
  if _OUTPUT.value:
    kept = _kept() | {config.name: found._asdict()}
    write(pathlib.Path(_OUTPUT.value), json.dumps(kept, indent=2) + "\n")


def _kept() -> dict[str, Any]:
  """Reads the results that --output has so far.

  Raises:
    ValueError: if the file is damaged, or cannot be made.
  """
  output = pathlib.Path(_OUTPUT.value)
  if not output.parent.is_dir():
    raise ValueError(
      f"`--output` must be a file in an existing folder, got {output}; make the"
      " folder."
    )
  if not _OUTPUT.value or not output.exists():
    return {}
  return read_json(output, "--output", "give another file")


def _table(name: str, found: layouts.Compiled) -> str:
  """Formats a compiled step."""
  mesh = " x ".join(f"{size} {axis}" for axis, size in found.mesh.items())
  memory = found.argument_bytes + found.temporary_bytes
  lines = [
    f"{name}: {found.params:,} parameters on {mesh}",
    f"a device: {found.device_params:,} parameters, {memory / 2**30:.2f} GiB"
    f" ({found.argument_bytes / 2**30:.2f} of them state and batch)",
    f"compiled in {found.seconds:.0f} s",
    f"{'rank':>6}{'predicted':>16}{'in the program':>16}  bytes of a device",
  ]
  for rank, predicted, sent in zip(
    found.ranks, found.predicted_bytes, found.program_bytes, strict=True
  ):
    lines.append(f"{rank or 'dense':>6}{predicted:16,}{sent:16,}")
  return "\n".join(lines)


if __name__ == "__main__":
  jax.config.update("jax_platforms", "cpu")  # no device is needed
  command_line.run(main)
