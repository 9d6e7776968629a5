"""Compiles a configuration for its own mesh, and prints what a device needs.

  python experiments/plan_layout.py --config=configs/paper/gpt2_12b.py

Trains nothing and allocates nothing: the devices are virtual, and all arrays
are shapes. Prints the bytes that a device sends over the replicas at each rank,
predicted and read from the compiled program, and its memory. Compiling takes
minutes. --output adds the result to a JSON file.
"""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

import json
from typing import Any

from absl import flags
from ml_collections import ConfigDict

from experiments.planning import layouts
from experiments.runs.run_folder import write
from experiments.runtime import command_line
from experiments.runtime.refusals import refusals
from experiments.training import checks

_OUTPUT = flags.DEFINE_string("output", "", "JSON file that gets the result.")


def main(config: ConfigDict) -> None:
  """Compiles, and prints a table."""
  with refusals():
    if config.mesh.backend != "jit":
      raise ValueError(
        f"`mesh.backend` must be jit, got {config.mesh.backend!r}: others have"
        " no mesh to plan; set --config.mesh.backend=jit."
      )
    checks.task_of(config)
    kept = _read(_OUTPUT.value)
    found = layouts.compile_step(config)
  print(_table(config.name, found))
  if _OUTPUT.value:
    kept[config.name] = found._asdict()
    write(pathlib.Path(_OUTPUT.value), json.dumps(kept, indent=2) + "\n")


def _read(output: str) -> dict[str, Any]:
  """Returns what the file has by now, or raises before anything is compiled."""
  path = pathlib.Path(output)
  if not output or not path.exists():
    return {}
  try:
    kept = json.loads(path.read_text())
    if isinstance(kept, dict):
      return kept
    text = f"a {type(kept).__name__}"
  except ValueError as error:
    text = str(error)
  raise ValueError(
    f"`--output` must be a new file or hold a JSON object, got {output!r}"
    f" ({text}); give another file."
  )


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
  lines.append(f"{found.other_bytes:,} of the program's are the loss")
  return "\n".join(lines)


if __name__ == "__main__":
  command_line.run(main)
