"""A run as its folder tells it, finished or not."""

import dataclasses
import json
import pathlib
from typing import Any

import numpy as np
import pandas as pd

from experiments.trainer.runs.run_folder import read_file, stopped

_MOST_COLUMNS = 400  # of a heat map


@dataclasses.dataclass(frozen=True)
class Run:
  """The files of a run folder; `lines` has a row for each logged step."""

  name: str
  config: dict[str, Any]
  summary: dict[str, Any]  # Empty until the run has ended.
  lines: pd.DataFrame
  leaves: str  # how each leaf of the gradient is sent
  stopped: str = ""  # why the run could not continue

  def table(self, key: str) -> pd.DataFrame:
    """Returns a metric by step, with a column for each stage or matrix.

    Bytes are those of all stages. NaN stands for dense in place of rank 0, and
    for the error if nothing was lost or predicted.
    """
    known = self.lines.get(key, pd.Series(dtype=object)).dropna()
    table = pd.DataFrame(map(_columns, known), known.index).astype(float)
    if key == "wire_bytes":
      return table.sum(axis=1).to_frame(0)
    return table.where(table != 0) if key.endswith(("rank", "error")) else table

  def numbers(self) -> dict[str, Any]:
    """Returns the summary, or as much of it as the lines so far provide."""
    newest = self.lines.tail(1)
    if not self.summary:  # of the newest evaluation
      newest = newest.combine_first(
        self.lines.filter(like="val_").ffill().tail(1)
      )
    last, *_ = [*newest.dropna(axis=1).to_dict("records"), {}]
    rank = self.lines.get("rank", pd.Series(dtype=object)).dropna()
    return {
      **last,
      "reducer": self.config.get("reducer"),
      "steps": last.get("step"),
      "stages": len(last["rank"]) if "rank" in last else None,
      "train_loss": last.get("loss"),
      "dense_bytes_per_step": last.get("dense_bytes"),
      "wire_bytes_per_step": (
        last["bytes"] / last["step"] if "bytes" in last else None
      ),
      "rank_history": list(rank[rank != rank.shift()].items()),
      **self.summary,
    }


def load(folder: pathlib.Path) -> Run:
  """Reads a run folder; a half-written last line is left out.

  Raises:
    FileNotFoundError: if there is no metrics.jsonl.
    ValueError: if a file is broken.
  """
  path, leaves = folder / "metrics.jsonl", folder / "leaves.txt"
  if not path.is_file():
    raise FileNotFoundError(
      f"`run_dirs` must be folders of runs that have started, got {folder},"
      " which has no metrics.jsonl; give the folder of a run"
    )
  lines = []
  with path.open("rb") as file:
    stride = 1 + sum(1 for _ in file) // _MOST_COLUMNS
    file.seek(0)
    for number, text in enumerate(file):
      if not text.endswith(b"\n"):
        break
      try:
        line = json.loads(text)
        float(line["step"])
      except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise ValueError(
          f"{path}, line {number + 1}, must be a JSON object with a number"
          f" 'step', got {text[:40]}; repair or remove it"
        ) from error
      if number % stride:  # metrics of matrices would fill the memory
        line = {k: v for k, v in line.items() if not k.startswith("matrix_")}
      lines.append(line)
  config, summary = (
    read_file(file) if file.exists() else {}
    for file in (folder / "config.json", folder / "summary.json")
  )
  frame = pd.DataFrame(lines, [line["step"] for line in lines])
  if lines:
    try:  # lines of earlier runs have only the ratio, over all steps so far
      sent = frame["dense_bytes"] * frame["step"] / frame["compression_ratio"]
      sent = frame.get("total_wire_bytes", sent).fillna(sent)
    except (KeyError, TypeError, ZeroDivisionError) as error:
      raise ValueError(
        f"{path} must have lines of a training run with the numbers dense_bytes"
        f" and compression_ratio, got {list(frame)} ({error}); give another"
        " folder"
      ) from error
    if "site_sent" in frame and config.get("mesh", {}).get("data") == 1:
      # Within such a site nothing is sent.
      sent = frame["site_sent"].fillna(0)
      frame = frame.drop(columns=["wire_bytes", "dense_bytes"])
    frame["bytes"] = sent
  text = "not recorded"
  if leaves.is_file():
    text = leaves.read_text(errors="replace")
  name = folder.resolve().name
  return Run(name, config, summary, frame, text, stopped(folder))


def _columns(value: Any) -> dict[Any, float]:
  """Returns the numbers by stage, or by the names of matrices."""
  if not isinstance(value, dict):
    return dict(enumerate(np.atleast_1d(value)))
  return {
    (f"stage {stage} " if len(stages) > 1 else "")
    + path.removesuffix("/kernel")
    + (f" {i}" if len(numbers) > 1 else ""): number
    for path, stages in value.items()
    for stage, numbers in enumerate(stages)
    for i, number in enumerate(numbers)
  }
