"""Benchmarks; each writes what it has found to a JSON file of results/data/."""

import json
import pathlib
import shlex
import sys
from collections.abc import Sequence
from typing import Any

from experiments.trainer.runs import run_folder


def write(
  file: str | pathlib.Path, name: str, lines: Sequence[Any], **about: Any
) -> None:
  """Writes the lines that a benchmark has found.

  Args:
    file: The JSON file.
    name: Of the benchmark's module, below experiments.lab.
    lines: Of a table.
    **about: What the lines have in common, beside command and commit.
  """
  command = [
    "python",
    "-m",
    f"experiments.lab.{name}",
    *sys.argv[1:],
  ]
  commit = run_folder.environment()["commit"]
  about = {"command": shlex.join(command), "commit": commit, **about}
  text = json.dumps({"about": about, "lines": lines}, indent=1)
  path = pathlib.Path(file)
  path.parent.mkdir(parents=True, exist_ok=True)
  run_folder.write(path, f"{text}\n")
