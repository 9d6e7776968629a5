"""Draws the pictures of a study: loss by step, by bytes, and the frontier."""

import io
import itertools
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image

from experiments.reporting.style import (
  COLORS,
  DENSE,
  DPI,
  WIDTH,
  dress,
  scale_bytes,
)
from experiments.study import frontier
from experiments.study.comparison import Comparison, Row

_DASHES = ("-", (0, (1, 1)), (0, (3, 1, 1, 1)))


def write(found: Comparison, folder: pathlib.Path) -> dict[str, pathlib.Path]:
  """Draws <study>-steps.png, <study>-bytes.png and <study>-frontier.png.

  Args:
    found: The comparison, with at least one finished run.
    folder: The folder to write to.

  Returns:
    {title: file}; the frontier is left out if there are no gaps.
  """
  figures = {
    ("Loss by step", "steps"): draw_curves(found, "step"),
    ("Loss by bytes sent", "bytes"): draw_curves(found, "wire_bytes"),
  }
  if len(frontier.gaps_of(found)) > 1:
    figures["Gap to dense by compression ratio", "frontier"] = frontier.draw(
      found
    )
  folder.mkdir(parents=True, exist_ok=True)
  files = {}
  for (title, name), figure in figures.items():
    files[title] = folder / f"{found.study.name}-{name}.png"
    _save(figure, files[title])
  return files


def draw_curves(found: Comparison, x: str) -> Figure:
  """Draws loss by steps or by bytes sent, with a panel for each table.

  The loss is the held-out loss if it was evaluated during the run, and the
  training loss otherwise; the mean over seeds. The range leaves out the start,
  so that the end of the run is legible.

  Args:
    found: The comparison, with at least one finished run.
    x: "step" or "wire_bytes".

  Returns:
    The figure.
  """
  tables = {
    title: rows
    for title, rows in found.tables.items()
    if any(row is not found.dense for row in rows)
  } or found.tables
  columns = min(2, len(tables))
  lines = -(-len(tables) // columns)
  figure = Figure(figsize=(WIDTH, 0.4 + 4 * lines), layout="constrained")
  panels = figure.subplots(lines, columns, squeeze=False).ravel()
  for axes, (title, rows) in zip(panels, tables.items(), strict=False):
    curves = [
      _curve(axes, row, x, **style) for row, style in _styles(found, rows)
    ]
    # The range has all ends, and dense after the first quarter.
    shown = [loss[len(loss) // 4 :] for _, loss in curves[:1]]
    shown += [loss[-1:] for _, loss in curves]
    low, high = (
      min(loss.min() for _, loss in curves),
      np.concatenate(shown).max(),
    )
    room = 0.05 * (high - low) or 0.1
    axes.set_ylim(low - room, high + room)
    dress(axes, title)
    axes.legend(
      fontsize=7.5, frameon=False, ncols=2, loc="upper center",
      bbox_to_anchor=(0.5, -0.17),
    )  # fmt: skip
    axes.set_ylabel(f"{_kind(rows)} loss (nats)")
    first = min(places[loss <= high].min() for places, loss in curves)
    if x == "step":
      axes.set(xlabel="step", xlim=(first, None))
    else:
      scale_bytes(axes)
      axes.set(xlabel="sent so far (MB per replica)", xlim=(first / 1.3, None))
  for axes in panels[len(tables) :]:
    axes.set_visible(False)
  return figure


def _save(figure: Figure, file: pathlib.Path) -> None:
  """Writes a PNG with 128 colours, a third as large, because git keeps it."""
  pixels = io.BytesIO()
  figure.savefig(pixels, dpi=DPI)
  image = Image.open(pixels).convert("RGB")
  image.quantize(128, dither=Image.Dither.NONE).save(file, optimize=True)


def _styles(
  found: Comparison, rows: Sequence[Row]
) -> Iterator[tuple[Row, dict[str, Any]]]:
  """Yields the rows of a panel with their styles, dense first."""
  if found.dense.runs:
    yield found.dense, {"color": DENSE, "linewidth": 2.2}
  styles = itertools.cycle(itertools.product(_DASHES, COLORS))
  for row in rows:
    if row is not found.dense:
      dashes, color = next(styles)
      yield row, {"color": color, "linestyle": dashes}
      if row.matched:
        yield row.matched, {"color": color, "linestyle": "--", "alpha": 0.8}


def _curve(
  axes: Axes, row: Row, x: str, **style: Any
) -> tuple[np.ndarray, np.ndarray]:
  """Draws the mean over runs and returns its points."""
  runs = list(row.runs.values())
  has_points = all(len(run["evaluations"]) > 1 for run in runs)
  drawn = []
  for run in runs:
    curve = run["curve"]
    steps, loss = curve["step"], curve["loss"]
    if has_points:
      steps, loss = zip(*run["evaluations"], strict=True)
    places = np.interp(steps, curve["step"], curve[x])
    drawn.append((steps, places, loss))
  steps = drawn[0][0]
  places = np.mean([np.interp(steps, s, p) for s, p, _ in drawn], axis=0)
  losses = np.mean([np.interp(steps, s, v) for s, _, v in drawn], axis=0)
  if x == "wire_bytes":
    places = places / 1e6
  axes.plot(places, losses, label=row.name, **{"linewidth": 1.4, **style})
  return places, losses


def _kind(rows: Sequence[Row]) -> str:
  runs = [run for row in rows for run in row.runs.values()]
  has_points = all(len(run["evaluations"]) > 1 for run in runs)
  return "held-out" if has_points else "training"
