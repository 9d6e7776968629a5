"""Writes the report of training runs: a picture and an HTML page."""

import base64
import html
import json
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from experiments.reporting import heat_maps, panels
from experiments.training.optimizer import rank_name

# fmt: off
_KEYS = (
  "step", "loss", "val_loss", "entropy", "rank", "wire_bytes", "dense_bytes",
  "compression_ratio", "relative_error", "predicted_error", "skipped_steps",
  "seconds", "tokens_per_second",
)
# fmt: on
_UNKNOWN = "-"
_TO = "\N{NO-BREAK SPACE}\N{RIGHTWARDS ARROW}\N{NO-BREAK SPACE}"
_HEAD = """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>Gradient compression</title>
<style>
:root { color-scheme: light dark; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 88rem;
  margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; display: block; overflow-x: auto; }
th, td { padding: .3rem 1.5rem .3rem 0; text-align: left;
  vertical-align: top; border-bottom: 1px solid #8886; white-space: pre-line; }
th { white-space: nowrap; }
img { width: 100%; margin: 1.5rem 0; background: white; border-radius: 6px; }
pre { overflow-x: auto; padding: 1rem; background: #8882; }
</style>
<h1>Gradient compression</h1>
"""


def is_newest(run_dir: pathlib.Path) -> bool:
  """Returns whether a finished run's page is newer than its summary."""
  page, summary = (run_dir / name for name in ("report.html", "summary.json"))
  return page.exists() and page.stat().st_mtime >= summary.stat().st_mtime


def write_report(
  run_dirs: Sequence[pathlib.Path | str],
  out_dir: pathlib.Path | str | None = None,
) -> tuple[pathlib.Path, pathlib.Path]:
  """Draws runs in one picture and writes a page with their key numbers.

  Args:
    run_dirs: Folders of runs, finished or not.
    out_dir: The folder to write to. By default the run's folder for one run,
      and the current directory for several.

  Returns:
    The paths of `report.png` and `report.html`.

  Raises:
    FileNotFoundError: if a run folder or its `metrics.jsonl` is missing.
    ValueError: if there is no run, or one of its files is broken.
  """
  if not run_dirs:
    raise ValueError(f"run_dirs is {run_dirs!r}: give at least one run folder")
  runs = [_load(pathlib.Path(run_dir)) for run_dir in run_dirs]
  if out_dir is None:
    out_dir = run_dirs[0] if len(runs) == 1 else "."
  folder = pathlib.Path(out_dir)
  folder.mkdir(parents=True, exist_ok=True)
  picture, page = folder / "report.png", folder / "report.html"
  panels.draw(runs).savefig(picture, dpi=100)
  maps = []
  for number, run in enumerate(runs, 1):
    figure = heat_maps.draw(run.matrices, run.label)
    if figure is not None:
      name = "matrices.png"
      if len(runs) > 1:  # folders of different parents may share a name
        name = f"matrices-{number}-{run.name}.png"
      figure.savefig(folder / name, dpi=100)
      maps.append((folder / name).read_bytes())
  text = _page(runs, picture.read_bytes(), maps)
  page.write_text(text, encoding="utf-8")
  return picture, page


def summary_table(summary: dict[str, Any]) -> str:
  """Formats a run's key numbers for a terminal.

  Args:
    summary: The contents of `summary.json`; missing numbers are left out.

  Returns:
    Lines of at most 78 columns.
  """
  lines = []
  for name, text in _rows(summary, width=60).items():
    for part in text.splitlines() if text != _UNKNOWN else ():
      lines.append(f"{name:<18}{part[:60]}")
      name = ""
  return "\n".join(lines)


def _load(folder: pathlib.Path) -> panels.Run:
  path = folder / "metrics.jsonl"
  if not folder.is_dir():
    raise FileNotFoundError(
      f"run_dirs: {folder} is not a folder; give one that a run wrote"
    )
  if not path.is_file():
    raise FileNotFoundError(
      f"run_dirs: {folder} has no metrics.jsonl, which every run writes; "
      "give the folder of a run that has started"
    )
  rows: dict[str, list] = {key: [] for key in _KEYS}
  matrices = heat_maps.Matrices()
  broken = None
  # As bytes: a half-written character would end the iteration of a text file.
  with path.open("rb") as lines:
    for number, line in enumerate(lines, start=1):
      if broken:
        raise ValueError(
          f"{path}, line {broken}: every line but the last must be a JSON "
          "object with a number 'step'; repair or remove it"
        )
      try:
        record = json.loads(line)
        float(record["step"])
      except (ValueError, TypeError, KeyError):
        broken = number
        continue
      for key, values in rows.items():
        values.append(record.get(key))
      matrices.add(record)
  return panels.Run(
    name=folder.resolve().name,
    config=_read_object(folder / "config.json"),
    summary=_read_object(folder / "summary.json"),
    columns={key: _matrix(values) for key, values in rows.items()},
    matrices=matrices,
    leaves=_read_text(folder / "leaves.txt"),
  )


def _read_object(path: pathlib.Path) -> dict[str, Any]:
  try:
    return dict(json.loads(path.read_bytes()))
  except FileNotFoundError:
    return {}
  except (ValueError, TypeError) as error:
    raise ValueError(
      f"{path} must be a JSON object ({error}); repair or remove it"
    ) from error


def _read_text(path: pathlib.Path) -> str:
  return path.read_text() if path.exists() else "not recorded"


def _matrix(values: list) -> np.ndarray:
  rows = [v if isinstance(v, list) else [v] for v in values]
  width = max(map(len, rows), default=1)
  padded = [row + [None] * (width - len(row)) for row in rows]
  return np.array(padded, float).reshape(len(rows), width)


def _rows(numbers: dict[str, Any], width: int) -> dict[str, str]:
  """Returns the key numbers as text by name, "-" for an unknown one."""
  sent = numbers.get("wire_bytes_per_step")
  dense = numbers.get("dense_bytes_per_step")
  if sent is not None and dense is not None:
    parts = [panels.human_bytes(part) for part in np.atleast_1d(sent)]
    sent, dense = map(panels.human_bytes, (np.sum(sent), np.sum(dense)))
    sent = f"{sent} (dense {dense})"
    if len(parts) > 1:
      sent += "\nby stage " + ", ".join(parts)
  steps = numbers.get("steps")
  measured = {
    f"held-out {key.removeprefix('val_')}": (value, ".4f")
    for key, value in numbers.items()
    if key.startswith("val_")
  }
  speeds = {
    key.replace("_per_second", " a second"): (value, ",.0f")
    for key, value in numbers.items()
    if key.endswith("_per_second")
  }
  rows = {
    "reducer": (numbers.get("reducer"), ""),
    "steps": (steps, ",.0f"),
    "parameters": (numbers.get("params"), ",.0f"),
    "replicas": (numbers.get("replicas"), ".0f"),
    "stages": (numbers.get("stages"), ".0f"),
    "shards": (numbers.get("shards"), ".0f"),
    "held-out loss": (None, ""),
    **measured,
    "training loss": (numbers.get("train_loss"), ".4f"),
    "bytes a step": (sent, ""),
    "compression ratio": (numbers.get("compression_ratio"), ".2f"),
    "rank over time": (_rank_text(numbers, width), ""),
    **(speeds or {"tokens a second": (None, "")}),
    "seconds": (numbers.get("seconds"), ",.1f"),
    "skipped steps": (numbers.get("skipped_steps"), ",.0f"),
  }
  return {
    name: _UNKNOWN if value is None else format(value, spec)
    for name, (value, spec) in rows.items()
  }


def _rank_text(numbers: dict[str, Any], width: int) -> str | None:
  """Returns ranks and their last steps, "dense ->40, 32 ->60", per stage."""
  history, steps = numbers.get("rank_history"), numbers.get("steps")
  if not history:
    return None
  name = rank_name(numbers.get("reducer", ""), 0)
  if name == _UNKNOWN and not any(any(rank) for _, rank in history):
    return None
  lines = []
  starts, ranks = zip(*history, strict=True)
  ends = [*(start - 1 for start in starts[1:]), steps or starts[-1]]
  for stage, values in enumerate(zip(*ranks, strict=True)):
    spans = []
    for i, (value, end) in enumerate(zip(values, ends, strict=True)):
      if i and value == values[i - 1]:
        spans.pop()  # Only another stage's rank changed.
      spans.append(f"{rank_name('edgc', value)} ->{end:.0f}")
    name = f"stage {stage}: " if len(ranks[0]) > 1 else ""
    # As many as fit together with an ellipsis, half from each end.
    room = (width - len(name) - 5) // (max(map(len, spans)) + 2)
    if room < len(spans):
      spans[room - room // 2 : len(spans) - room // 2] = ["..."]
    lines.append(name + ", ".join(spans))
  return "\n".join(lines)


def _image(picture: bytes, text: str) -> str:
  data = base64.b64encode(picture).decode()
  return f'<img alt="{text}" src="data:image/png;base64,{data}">'


def _page(
  runs: Sequence[panels.Run], picture: bytes, maps: Sequence[bytes]
) -> str:
  tables = [
    {
      "run": run.name,
      "state": "finished" if run.summary else "not finished",
      **_rows(run.numbers(), width=100),
    }
    for run in runs
  ]
  text = [_HEAD, "<table>"]
  for name in tables[0]:
    cells = [html.escape(table[name].replace(" ->", _TO)) for table in tables]
    text.append(f"<tr><th>{name}<td>" + "<td>".join(cells))
  text.append("</table>")
  text.append(_image(picture, "Loss, bytes, entropy, rank and error by step"))
  text += [_image(m, "Rank, entropy and error by matrix") for m in maps]
  for run in runs:
    config = json.dumps(run.config, indent=2) if run.config else "not recorded"
    label = html.escape(run.label)
    for title, details in (
      ("How each leaf is sent", run.leaves), ("Configuration", config)
    ):  # fmt: skip
      text.append(
        f"<details><summary>{title}: {label}</summary>"
        f"<pre>{html.escape(details)}</pre></details>"
      )
  return "\n".join([*text, "</html>\n"])
