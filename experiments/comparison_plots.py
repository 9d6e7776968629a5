"""The pictures of a study: loss by step, loss by bytes, and the frontier."""

import io
import itertools
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from matplotlib import patheffects
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.ticker import LogLocator, NullLocator
from matplotlib.transforms import Bbox
from PIL import Image

from experiments.comparison import Comparison, Row, gap, non_dominated

# Told apart by colour-blind people (Okabe and Ito), and lines by their dashes.
_COLORS = (
  "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f4f24",
)  # fmt: skip
_MARKERS = "osD^vP*X"
_DASHES = ("-", (0, (1, 1)), (0, (3, 1, 1, 1)))
_WIDTH, _DPI = 9.0, 100  # inches, so 900 pixels
_DENSE = "#444444"
_HALO = patheffects.withStroke(linewidth=2, foreground="white")


def write(found: Comparison, folder: pathlib.Path) -> dict[str, pathlib.Path]:
  """Draws <study>-steps.png, <study>-bytes.png and <study>-frontier.png.

  Args:
    found: At least one finished run.
    folder: Where to.

  Returns:
    {what a picture shows: its file}; the frontier only where there are gaps.
  """
  figures = {
    ("Loss by step", "steps"): draw_curves(found, "step"),
    ("Loss by bytes sent", "bytes"): draw_curves(found, "wire_bytes"),
  }
  if len(_gaps(found)) > 1:
    figures["Gap to dense by compression ratio", "frontier"] = draw_frontier(
      found
    )
  folder.mkdir(parents=True, exist_ok=True)
  files = {}
  for (title, name), figure in figures.items():
    files[title] = folder / f"{found.study.name}-{name}.png"
    _save(figure, files[title])
  return files


def draw_curves(found: Comparison, x: str) -> Figure:
  """Loss by steps or by bytes sent, a panel for each table.

  Held-out loss where it was measured on the way, else training loss; mean over
  seeds, cut to where the run's end can be read.

  Args:
    found: At least one finished run.
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
  figure = Figure(figsize=(_WIDTH, 0.4 + 4 * lines), layout="constrained")
  panels = figure.subplots(lines, columns, squeeze=False).ravel()
  for axes, (title, rows) in zip(panels, tables.items(), strict=False):
    curves = [
      _curve(axes, row, x, **style) for row, style in _styles(found, rows)
    ]
    # What is worth seeing: the ends, and dense from a quarter on.
    shown = [loss[len(loss) // 4 :] for _, loss in curves[:1]]
    shown += [loss[-1:] for _, loss in curves]
    low, high = (
      min(loss.min() for _, loss in curves),
      np.concatenate(shown).max(),
    )
    room = 0.05 * (high - low) or 0.1
    axes.set_ylim(low - room, high + room)
    _dress(axes, title)
    axes.legend(
      fontsize=7.5, frameon=False, ncols=2, loc="upper center",
      bbox_to_anchor=(0.5, -0.17),
    )  # fmt: skip
    axes.set_ylabel(f"{_kind(rows)} loss (nats)")
    first = min(places[loss <= high].min() for places, loss in curves)
    if x == "step":
      axes.set(xlabel="step", xlim=(first, None))
    else:
      _scale_bytes(axes)
      axes.set(xlabel="sent so far (MB per replica)", xlim=(first / 1.3, None))
  for axes in panels[len(tables) :]:
    axes.set_visible(False)
  return figure


def draw_frontier(found: Comparison) -> Figure:
  """Gap to dense against the ratio of bytes: what no other beats is joined.

  Args:
    found: At least one row with a gap.

  Returns:
    The figure; bars are standard errors over seeds.
  """
  figure = Figure(figsize=(_WIDTH, 6.0), dpi=_DPI, layout="constrained")
  axes = figure.subplots()
  gaps = _gaps(found)
  places = [place for _, place, _ in gaps]
  best = [places[i] for i in non_dominated(places)]
  axes.plot(*zip(*best, strict=True), color="#999999", zorder=1)
  groups = list(found.tables)
  members = {id(r): t for t, rows in found.tables.items() for r in rows}
  beside = {
    id(row.beside): members[id(row)] for row in found.rows if row.beside
  }
  shown = set()
  for row, (ratio, height), error in gaps:
    group = {**beside, **members}[id(row)]
    number = groups.index(group)
    color = _COLORS[number % len(_COLORS)]
    axes.errorbar(
      ratio, height, yerr=error, color=color, capsize=2, linewidth=1,
      marker=_MARKERS[number % len(_MARKERS)], markersize=6,
      markerfacecolor="white" if id(row) in beside else color,
      label=group if group not in shown else None, linestyle="",
      zorder=4,
    )  # fmt: skip
    shown.add(group)
  heights = [height for _, height in places]
  # Small gaps are what matters, and great ones have to be there, too.
  if max(heights) > 5:
    axes.set_yscale("symlog", linthresh=1, linscale=1)
    ticks = [-1, -0.5, 0, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000]
    axes.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.set_ylim(min([-0.5, *heights]) - 0.2, max(heights) * 1.5)
    axes.yaxis.set_minor_locator(NullLocator())
  axes.axhline(0, color=_DENSE, linestyle="--", linewidth=1, zorder=0)
  low, high = min(r for r, _ in places), max(r for r, _ in places)
  axes.set_xlim(min(low, 1) / 1.15, high * 1.6)
  _scale_bytes(axes)
  _dress(axes, "Gap to dense by compression ratio")
  axes.set_xlabel("times fewer bytes than dense, over the whole run")
  axes.set_ylabel(f"held-out loss above {found.dense.name} (%)")
  axes.legend(
    fontsize=8, frameon=False, loc="upper left", title_fontsize=8,
    title="hollow: fixed rank of the same bytes" if beside else None,
    alignment="left",
  )  # fmt: skip
  where = {id(row): place for row, place, _ in gaps}
  for row, place, _ in gaps:
    if row.beside and id(row.beside) in where:
      ends = zip(place, where[id(row.beside)], strict=True)
      axes.plot(*ends, color="#999999", linewidth=0.8, linestyle=":")
  named = [(r.name, place) for r, place, _ in gaps if id(r) not in beside]
  _label(figure, axes, named, [place for _, place, _ in gaps])
  return figure


def _save(figure: Figure, file: pathlib.Path) -> None:
  """Writes a PNG in 128 colours, a third as large: pages are kept in git."""
  pixels = io.BytesIO()
  figure.savefig(pixels, dpi=_DPI)
  image = Image.open(pixels).convert("RGB")
  image.quantize(128, dither=Image.Dither.NONE).save(file, optimize=True)


def _gaps(found: Comparison) -> list[tuple[Row, tuple[float, float], float]]:
  """Rows with a gap, their (ratio, gap in %), and its error."""
  gaps = []
  for row in found.rows:
    if row is found.dense:
      gaps.append((row, (row.mean("compression_ratio"), 0.0), 0.0))
    elif found_gap := gap(row, found.dense):
      mean, error = found_gap
      place = row.mean("compression_ratio"), 100 * mean
      gaps.append((row, place, 100 * (error or 0.0)))
  return gaps


def _styles(
  found: Comparison, rows: Sequence[Row]
) -> Iterator[tuple[Row, dict[str, Any]]]:
  """What a panel shows, dense first, with how."""
  if found.dense.runs:
    yield found.dense, {"color": _DENSE, "linewidth": 2.2}
  styles = itertools.cycle(itertools.product(_DASHES, _COLORS))
  for row in rows:
    if row is not found.dense:
      dashes, color = next(styles)
      yield row, {"color": color, "linestyle": dashes}
      if row.beside:
        yield row.beside, {"color": color, "linestyle": "--", "alpha": 0.8}


def _curve(
  axes: Axes, row: Row, x: str, **style: Any
) -> tuple[np.ndarray, np.ndarray]:
  """Draws the mean over runs, and returns its points."""
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


def _scale_bytes(axes: Axes) -> None:
  axes.set_xscale("log")
  axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
  axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
  axes.xaxis.set_minor_locator(NullLocator())


def _dress(axes: Axes, title: str) -> None:
  axes.set_title(title, loc="left", fontsize=10, fontweight="bold")
  axes.spines[["top", "right"]].set_visible(False)
  axes.grid(color="#dddddd", linewidth=0.6)
  axes.set_axisbelow(True)
  axes.tick_params(labelsize=8)


def _label(
  figure: Figure,
  axes: Axes,
  named: Sequence[tuple[str, tuple[float, float]]],
  points: Sequence[tuple[float, float]],
) -> None:
  """Puts names where no other and no point is, as near as that can be."""
  renderer = FigureCanvasAgg(figure).get_renderer()
  figure.draw_without_rendering()
  centers = axes.transData.transform(points)
  taken = [Bbox.from_bounds(x - 7, y - 7, 14, 14) for x, y in centers]
  taken.append(axes.get_legend().get_window_extent(renderer))
  for name, place in named:
    for offset, side in _OFFSETS:
      text = axes.annotate(
        name, place, offset, textcoords="offset points", fontsize=7.5, ha=side,
        va="center", path_effects=[_HALO],
        arrowprops={"arrowstyle": "-", "color": "#aaaaaa", "linewidth": 0.6,
                    "shrinkA": 0, "shrinkB": 3},
      )  # fmt: skip
      text.set_in_layout(False)
      text.update_positions(renderer)
      box = Text.get_window_extent(text, renderer)  # without the arrow
      is_inside = axes.bbox.contains(*box.min) and axes.bbox.contains(*box.max)
      if is_inside and not any(box.overlaps(other) for other in taken):
        break
      text.remove()
    else:  # no room for it
      continue
    taken.append(box)


# Beside a point, nearest first; further up and down also further out.
_OFFSETS = [
  ((right * (8 + far / 4), up), side)
  for far in range(0, 240, 6)
  for up in dict.fromkeys((far, -far))
  for right, side in ((1, "left"), (-1, "right"))
]
