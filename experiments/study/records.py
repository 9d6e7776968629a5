"""Records of a study's runs: one file per run, small enough for git.

Run folders are large and stay on the machine that made them. A record holds
the settings, the summary and a thinned curve. Pages are made from records
only, and a recorded run is not repeated.
"""

import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from experiments.study.study import Run, Study

Record = Mapping[str, Any]
_POINTS = 60  # points of a curve, at most
_RANKS = 120  # changes of rank, at most


class Records:
  """The records of one study, in a folder named after it."""

  def __init__(self, folder: str | pathlib.Path, study: Study):
    """Reads and writes records in `folder`/<name of the study>."""
    self.folder = pathlib.Path(folder) / study.name
    self._study = study

  def find(self, run: Run) -> Record | None:
    """Returns the record of a finished or failed run with these settings."""
    file = self._file(run)
    if not file.exists():
      return None
    record = json.loads(file.read_text())
    # Through JSON, which turns tuples into lists.
    wanted = json.loads(json.dumps(self._about(run)))
    is_same = all(record.get(key) == value for key, value in wanted.items())
    return record if is_same else None

  def finished(self, run: Run) -> Record | None:
    """Returns the record of a finished run with these settings."""
    record = self.find(run)
    return record if record and "error" not in record else None

  def write(self, run: Run, numbers: Mapping[str, Any]) -> None:
    """Writes the record of a run.

    Args:
      run: The run.
      numbers: From `numbers_of`, or {"error": message} of a failed run.
    """
    lines = [
      f"  {json.dumps(key)}: {json.dumps(value)}"
      for key, value in {**self._about(run), **numbers}.items()
    ]
    self.folder.mkdir(parents=True, exist_ok=True)
    scratch = self._file(run).with_suffix(".tmp")
    scratch.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    scratch.replace(self._file(run))

  def remove(self, run: Run) -> None:
    """Deletes the record of a run, if there is one."""
    self._file(run).unlink(missing_ok=True)

  def _about(self, run: Run) -> Mapping[str, Any]:
    return {
      "row": run.row,
      "seed": run.seed,
      "config": self._study.config,
      "digest": self._study.digest(run),
      "settings": dict(run.settings),
    }

  def _file(self, run: Run) -> pathlib.Path:
    return self.folder / f"{run.name}.json"


def numbers_of(folder: str | pathlib.Path) -> dict[str, Any]:
  """Reads the numbers of a record from a finished run's folder.

  Args:
    folder: A folder with summary.json and metrics.jsonl.

  Returns:
    The summary, with very many ranks thinned out, and in addition "curve":
    {"step", "loss", "wire_bytes"} over equal parts of the run (mean loss of
    the part, and bytes sent up to its end), and "evaluations": [[step,
    held-out loss]].

  Raises:
    ValueError: if the held-out loss is not finite.
  """
  folder = pathlib.Path(folder)
  summary = json.loads((folder / "summary.json").read_text())
  if "val_loss" not in summary:
    raise ValueError("the held-out loss is not finite")
  text = (folder / "metrics.jsonl").read_text()
  lines = [json.loads(line) for line in text.splitlines()]
  lines = [line for line in lines if "loss" in line]  # missing if not finite
  parts = [p for p in np.array_split(np.array(lines), _POINTS) if len(p)]
  ends = [part[-1] for part in parts]
  curve = {
    "step": [end["step"] for end in ends],
    "loss": [_short(np.mean([x["loss"] for x in part])) for part in parts],
    # The ratio covers all steps so far.
    "wire_bytes": [
      round(end["dense_bytes"] * end["step"] / end["compression_ratio"])
      for end in ends
    ],
  }
  evaluations = [
    [line["step"], _short(line["val_loss"])]
    for line in lines
    if "val_loss" in line
  ]
  summary.pop("times", None)
  summary["rank_history"] = _thin(summary["rank_history"], _RANKS)
  thin = _thin(evaluations, _POINTS)
  return {**summary, "curve": curve, "evaluations": thin}


def _short(number: float) -> float:
  return float(f"{number:.5g}")


def _thin(values: Sequence[Any], limit: int) -> list[Any]:
  """Returns at most `limit` of the values, including the first and last."""
  if len(values) <= limit:
    return list(values)
  kept = np.linspace(0, len(values) - 1, limit).round().astype(int)
  return [values[i] for i in kept]
