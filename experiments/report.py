"""One picture and one page from the folders that training runs wrote.

  python experiments/report.py RUN [RUN ...]

writes `report.png` and `report.html` into the run's folder, or into the
current directory for several runs. It may be called while a run goes on.
"""

import base64
import dataclasses
import html
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from absl import app
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import (
  FuncFormatter,
  LogLocator,
  MaxNLocator,
  NullLocator,
)

_COLORS = ("#0072b2", "#d55e00", "#009e73", "#aa4499", "#e69f00", "#7f4f24")
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


@dataclasses.dataclass(frozen=True)
class _Run:
  """What a run folder holds; columns are [lines, stages], NaN for nothing."""

  name: str
  config: dict[str, Any]
  summary: dict[str, Any]  # Empty until the run has ended.
  columns: dict[str, np.ndarray]

  @property
  def reducer(self) -> str:
    settings = self.config | self.summary
    return str(settings.get("reducer", "unknown reducer"))

  @property
  def label(self) -> str:
    return f"{self.reducer} ({self.name})"


def write_report(
  run_dirs: Sequence[Path | str], out_dir: Path | str | None = None
) -> tuple[Path, Path]:
  """Draws runs side by side and writes a page with their key numbers.

  Args:
    run_dirs: Folders of runs, ended or going on.
    out_dir: Where to write. By default the run's own folder for one run, the
      current directory for several.

  Returns:
    The paths of `report.png` and `report.html`.

  Raises:
    FileNotFoundError: A run folder or its `metrics.jsonl` is missing.
    ValueError: There is no run, or one of its files is broken.
  """
  if not run_dirs:
    raise ValueError(f"run_dirs is {run_dirs!r}: give at least one run folder")
  runs = [_load(Path(run_dir)) for run_dir in run_dirs]
  if out_dir is None:
    out_dir = run_dirs[0] if len(runs) == 1 else "."
  picture, page = Path(out_dir, "report.png"), Path(out_dir, "report.html")
  picture.parent.mkdir(parents=True, exist_ok=True)
  _figure(runs).savefig(picture, dpi=100)
  page.write_text(_page(runs, picture.read_bytes()), encoding="utf-8")
  return picture, page


def summary_table(summary: dict[str, Any]) -> str:
  """A run's key numbers for a terminal.

  Args:
    summary: What `summary.json` holds; what it lacks is left out.

  Returns:
    Lines of at most 78 columns.
  """
  lines = []
  for name, text in _rows(summary, width=60).items():
    for part in text.splitlines() if text != _UNKNOWN else ():
      lines.append(f"{name:<18}{part[:60]}")
      name = ""
  return "\n".join(lines)


def downsample(values: np.ndarray, limit: int = 2000) -> np.ndarray:
  """Picks the points of a curve to draw.

  Args:
    values: [points], NaN for a gap.
    limit: The most points to keep, at least 4.

  Returns:
    Increasing indices: both ends, and the least and the greatest value of
    each of equal stretches, so that no spike is lost.
  """
  if len(values) <= limit:
    return np.arange(len(values))
  kept = [0, len(values) - 1]
  for part in np.array_split(np.arange(len(values)), limit // 2 - 1):
    kept += [part[values[part].argmin()], part[values[part].argmax()]]
  return np.unique(kept)


def _load(folder: Path) -> _Run:
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
  broken = None
  # Bytes, since a half-written character would end a text file's iteration.
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
  return _Run(
    name=folder.resolve().name,
    config=_read_object(folder / "config.json"),
    summary=_read_object(folder / "summary.json"),
    columns={key: _matrix(values) for key, values in rows.items()},
  )


def _read_object(path: Path) -> dict[str, Any]:
  try:
    return dict(json.loads(path.read_bytes()))
  except FileNotFoundError:
    return {}
  except (ValueError, TypeError) as error:
    raise ValueError(
      f"{path} must be a JSON object ({error}); repair or remove it"
    ) from error


def _matrix(values: list) -> np.ndarray:
  rows = [v if isinstance(v, list) else [v] for v in values]
  width = max(map(len, rows), default=1)
  padded = [row + [None] * (width - len(row)) for row in rows]
  return np.array(padded, float).reshape(len(rows), width)


def _byte_unit(count: float) -> tuple[float, str]:
  power = 0
  while power < 4 and count / 1000**power >= 999.5:
    power += 1
  return 1000.0**power, ("B", "kB", "MB", "GB", "TB")[power]


def _human_bytes(count: float) -> str:
  scale, unit = _byte_unit(count)
  return f"{count / scale:.3g} {unit}"


def _numbers(run: _Run) -> dict[str, Any]:
  """The summary, or as much of it as the lines so far tell."""

  def last(key: str) -> float | None:
    values = run.columns[key][:, 0]
    values = values[np.isfinite(values)]
    return values[-1].item() if values.size else None

  steps, rank = run.columns["step"][:, 0], run.columns["rank"]
  changed = np.ones(len(rank), bool)
  changed[1:] = (rank[1:] != rank[:-1]).any(axis=1)
  changed &= np.isfinite(rank).all(axis=1)
  dense, ratio = last("dense_bytes"), last("compression_ratio")
  return {
    "reducer": run.reducer,
    "steps": last("step"),
    "stages": run.columns["wire_bytes"].shape[1] if steps.size else None,
    "train_loss": last("loss"),
    "val_loss": last("val_loss"),
    "dense_bytes_per_step": dense,
    "wire_bytes_per_step": dense / ratio if dense and ratio else None,
    "compression_ratio": ratio,
    "rank_history": list(zip(steps[changed], rank[changed], strict=True)),
    "seconds": last("seconds"),
    "tokens_per_second": last("tokens_per_second"),
    "skipped_steps": last("skipped_steps"),
    **run.summary,
  }


def _rows(numbers: dict[str, Any], width: int) -> dict[str, str]:
  """The key numbers as text by name, "-" for what is not known."""
  sent = numbers.get("wire_bytes_per_step")
  dense = numbers.get("dense_bytes_per_step")
  if sent is not None and dense is not None:
    sent = f"{_human_bytes(np.sum(sent))} (dense {_human_bytes(np.sum(dense))})"
  history, steps = numbers.get("rank_history"), numbers.get("steps")
  rows = {
    "reducer": (numbers.get("reducer"), ""),
    "steps": (steps, ",.0f"),
    "parameters": (numbers.get("params"), ",.0f"),
    "replicas": (numbers.get("replicas"), ".0f"),
    "stages": (numbers.get("stages"), ".0f"),
    "held-out loss": (numbers.get("val_loss"), ".4f"),
    "training loss": (numbers.get("train_loss"), ".4f"),
    "bytes a step": (sent, ""),
    "compression ratio": (numbers.get("compression_ratio"), ".2f"),
    "rank over time": (_rank_text(history, steps, width), ""),
    "tokens a second": (numbers.get("tokens_per_second"), ",.0f"),
    "seconds": (numbers.get("seconds"), ",.1f"),
    "skipped steps": (numbers.get("skipped_steps"), ",.0f"),
  }
  return {
    name: _UNKNOWN if value is None else format(value, spec)
    for name, (value, spec) in rows.items()
  }


def _rank_text(
  history: Sequence | None, steps: float | None, width: int
) -> str | None:
  """Each rank and its last step, "dense ->40, 32 ->60", a line per stage."""
  if not history:
    return None
  lines = []
  starts, ranks = zip(*history, strict=True)
  ends = [*(start - 1 for start in starts[1:]), steps or starts[-1]]
  for stage, values in enumerate(zip(*ranks, strict=True)):
    spans = []
    for i, (value, end) in enumerate(zip(values, ends, strict=True)):
      if i and value == values[i - 1]:
        spans.pop()  # Only another stage's rank changed.
      spans.append(f"{f'{value:.0f}' if value else 'dense'} ->{end:.0f}")
    name = f"stage {stage}: " if len(ranks[0]) > 1 else ""
    # As many as fit beside an ellipsis, half from either end.
    room = (width - len(name) - 5) // (max(map(len, spans)) + 2)
    if room < len(spans):
      spans[room - room // 2 : len(spans) - room // 2] = ["..."]
    lines.append(name + ", ".join(spans))
  return "\n".join(lines)


def _page(runs: Sequence[_Run], picture: bytes) -> str:
  tables = [
    {
      "run": run.name,
      "state": "finished" if run.summary else "not finished",
      **_rows(_numbers(run), width=100),
    }
    for run in runs
  ]
  text = [_HEAD, "<table>"]
  for name in tables[0]:
    cells = [html.escape(table[name].replace(" ->", _TO)) for table in tables]
    text.append(f"<tr><th>{name}<td>" + "<td>".join(cells))
  text.append(
    '</table>\n<img alt="Loss, bytes, entropy, rank and error by step" '
    f'src="data:image/png;base64,{base64.b64encode(picture).decode()}">'
  )
  for run in runs:
    config = json.dumps(run.config, indent=2) if run.config else "not recorded"
    text.append(
      f"<details><summary>Configuration of {html.escape(run.label)}</summary>"
      f"<pre>{html.escape(config)}</pre></details>"
    )
  return "\n".join([*text, "</html>\n"])


def _figure(runs: Sequence[_Run]) -> Figure:
  figure = Figure(figsize=(14, 9), layout="constrained")
  figure.get_layout_engine().set(w_pad=0.12, h_pad=0.1)
  FigureCanvasAgg(figure)
  (loss, spent, entropy), (rank, wire, error) = figure.subplots(2, 3)
  columns = [run.columns for run in runs]
  # The ratio is of the whole run so far, so this is exact on every line.
  sent = [
    c["dense_bytes"] * c["step"] / c["compression_ratio"] for c in columns
  ]
  scale, unit = _byte_unit(max(np.nanmax(s, initial=0) for s in sent))
  top = max(np.nanmax(c["rank"], initial=0.5) for c in columns)
  handles, losses = [], set()
  for i, (run, c) in enumerate(zip(runs, columns, strict=True)):
    color, steps, dense = _COLORS[i % len(_COLORS)], c["step"], c["rank"] == 0
    handles.append(Line2D([], [], color=color, linewidth=3, label=run.label))
    _curves(loss, steps, c["loss"], color, linewidth=0.6, alpha=0.6)
    _curves(loss, steps, c["val_loss"], color, marker="o")
    # One evaluation makes no curve.
    is_curve = np.isfinite(c["val_loss"]).sum() > 1
    known = c["val_loss"] if is_curve else c["loss"]
    _curves(spent, sent[i] / scale, known, color)
    if np.isfinite(known).any():
      losses.add("held-out" if is_curve else "training")
    _curves(entropy, steps, c["entropy"], color, linewidth=0.9)
    # Dense is not a rank of zero: it has a band above all ranks, and in it
    # every run has its own height.
    height = top * (1.08 + 0.16 * (i + 1) / (len(runs) + 1))
    shown = np.where(dense, height, c["rank"])
    _curves(rank, steps, shown, color, drawstyle="steps-post")
    total = c["wire_bytes"].sum(axis=1, keepdims=True)
    _curves(wire, steps, total, color, drawstyle="steps-post")
    measured = np.where(dense, np.nan, c["relative_error"])
    _curves(error, steps, measured, color, gaps=True, linewidth=0.8, alpha=0.5)
    # Zero stands for no prediction.
    unknown = dense | (c["predicted_error"] == 0)
    predicted = np.where(unknown, np.nan, c["predicted_error"])
    _curves(error, steps, predicted, color, gaps=True, linestyle="--", zorder=3)

  absent = "not measured by this reducer"
  loss_name = " or ".join(sorted(losses)) or "held-out"
  panels = (
    (loss, "Loss: training (thin), held-out (points)", "loss (nats)", ""),
    (spent, "Loss by bytes sent", f"{loss_name} loss (nats)", ""),
    (entropy, "Entropy of the gradient", "entropy (nats)", absent),
    (rank, "Rank", "rank", absent),
    (wire, "Bytes of a step, dense dashed", "sent per replica", absent),
    (error, "Error: measured, predicted dashed", "energy lost (fraction)",
     "nothing was compressed"),
  )  # fmt: skip
  for axes, title, y_label, reason in panels:
    axes.set_title(title, loc="left", fontsize=11, fontweight="bold")
    axes.set(xlabel="step", ylabel=y_label)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color="#dddddd", linewidth=0.6)
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=axes is not spent))
    axes.set_xlim(0, (axes if axes is spent else loss).get_xlim()[1])
    if not axes.lines:
      axes.set(xticks=[], yticks=[])
      reason = reason if loss.lines else "nothing logged yet"
      center = {"transform": axes.transAxes, "ha": "center", "va": "center"}
      axes.text(0.5, 0.5, reason, color="#666666", **center)
  spent.set_xlabel(f"sent so far ({unit} per replica)")
  if rank.lines:
    _dress_rank(rank, top, any((c["rank"] == 0).any() for c in columns))
  if wire.lines:
    _dress_wire(wire, {d for c in columns for d in c["dense_bytes"][-1:, 0]})
  if error.lines:
    error.set_ylim(0, error.get_ylim()[1] * 1.02)
  stages = max(c["wire_bytes"].shape[1] for c in columns)
  for stage in sorted({0, stages - 1}) if stages > 1 else ():
    key = {"color": _shade("#000000", stage, stages), "linewidth": 3}
    handles.append(Line2D([], [], label=f"stage {stage}", **key))
  # About 180 letters fit across, the line beside a label takes up to ten.
  fitting = 180 // (max(len(run.label) for run in runs) + 10)
  place = {"loc": "outside upper left", "frameon": False}
  place["ncols"] = min(max(fitting, 1), 4)
  for text in figure.legend(handles=handles, **place).get_texts():
    text.set_parse_math(False)  # A folder's name may hold a dollar sign.
  return figure


def _dress_rank(axes: Axes, top: float, dense: bool) -> None:
  ticks = MaxNLocator(5, integer=True).tick_values(0, top)
  ticks = [tick for tick in ticks if 1 <= tick <= top]
  labels = [f"{tick:.0f}" for tick in ticks]
  if dense:
    axes.axhspan(top * 1.08, top * 1.24, color="#eeeeee", zorder=0)
    ticks, labels = [*ticks, top * 1.16], [*labels, "dense"]
  axes.set_yticks(ticks, labels)
  axes.set_ylim(0, top * (1.24 if dense else 1.05))


def _dress_wire(axes: Axes, dense: set[float]) -> None:
  values = np.concatenate(
    [*(line.get_ydata() for line in axes.lines), [*dense]]
  )
  values = values[values > 0]
  for count in dense:
    axes.axhline(count, color="#444444", linestyle="--", linewidth=1)
  axes.set_yscale("log")
  # Room on both sides, so that at least one of 1, 2, 5 has its tick.
  axes.set_ylim(values.min() / 2, values.max() * 2)
  axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
  axes.yaxis.set_major_formatter(FuncFormatter(lambda v, _: _human_bytes(v)))
  axes.yaxis.set_minor_locator(NullLocator())


def _shade(color: str, stage: int, stages: int) -> np.ndarray:
  """The colour for stage 0, lighter for every further stage."""
  light = 0.65 * stage / max(stages - 1, 1)
  return (1 - light) * np.array(to_rgb(color)) + light


def _curves(
  axes: Axes,
  x: np.ndarray,
  y: np.ndarray,
  color: str,
  gaps: bool = False,
  **style: Any,
) -> None:
  """Draws every stage of y [lines, stages] over x [lines, 1].

  Without `gaps` a curve goes on through lines that lack a value.
  """
  stages = y.shape[1]
  for stage in range(stages):
    known = np.isfinite(y[:, stage])
    if not known.any():
      continue
    lines = np.flatnonzero(known | gaps)
    lines = lines[downsample(y[lines, stage])]
    shade = _shade(color, stage, stages)
    # Later stages are thinner, so that equal curves all show.
    own = {"linewidth": 1.8 - stage / stages, "markersize": 3}
    own["marker"] = "o" if len(lines) < 20 else ""
    axes.plot(x[lines, 0], y[lines, stage], color=shade, **(own | style))


def main(argv: Sequence[str]) -> None:
  """Writes the report of the runs that the command line names.

  Args:
    argv: The program's name and the run folders.

  Raises:
    app.UsageError: No run is named.
  """
  if len(argv) < 2:
    raise app.UsageError("give at least one run folder")
  print(*write_report(argv[1:]), sep="\n")


if __name__ == "__main__":
  app.run(main)
