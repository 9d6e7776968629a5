"""The pictures of a study: loss by step, loss by bytes, and the frontier."""

import itertools
import pathlib
from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.ticker import LogLocator, NullLocator
from matplotlib.transforms import Bbox

from experiments.comparison import Comparison, Row, gap, non_dominated

# Told apart by colour-blind people (Okabe and Ito), and lines by their dashes.
_COLORS = (
  "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f4f24",
)  # fmt: skip
_MARKERS = "osD^vP*X"
_DASHES = ("-", (0, (1, 1)), (0, (3, 1, 1, 1)))
_WIDTH, _DPI = 9.0, 100  # inches, so 900 pixels
_DENSE = "#444444"


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
  if _gaps(found):
    figures["Gap to dense by compression ratio", "frontier"] = draw_frontier(
      found
    )
  folder.mkdir(parents=True, exist_ok=True)
  files = {}
  for (title, name), figure in figures.items():
    files[title] = folder / f"{found.study.name}-{name}.png"
    figure.savefig(files[title], dpi=_DPI)
  return files


def draw_curves(found: Comparison, x: str) -> Figure:
  """Loss by steps or by bytes sent, a panel for each table.

  Held-out loss where it was measured on the way, else training loss; mean over
  seeds. The end of the run is what is shown: it begins where dense has a tenth
  of its steps behind it.

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
  figure = Figure(figsize=(_WIDTH, 0.4 + 3.4 * lines), layout="constrained")
  panels = figure.subplots(lines, columns, squeeze=False).ravel()
  for axes, (title, rows) in zip(panels, tables.items(), strict=False):
    ends = []
    if found.dense.runs:
      _, loss = _curve(axes, found.dense, x, color=_DENSE, linewidth=2.2)
      ends += [loss[-1], loss[len(loss) // 10]]
    styles = itertools.product(_DASHES, _COLORS)
    for row, (dashes, color) in zip(
      rows, itertools.cycle(styles), strict=False
    ):
      if row is found.dense:
        continue
      _, loss = _curve(axes, row, x, color=color, linestyle=dashes)
      ends += [loss[-1], loss.min()]
      if row.beside:
        _curve(axes, row.beside, x, color=color, linestyle="--", alpha=0.8)
    room = 0.05 * (max(ends) - min(ends)) or 0.1
    axes.set_ylim(min(ends) - room, max(ends) + room)
    _dress(axes, title)
    axes.legend(fontsize=7.5, frameon=False, loc="upper right")
    axes.set_ylabel(f"{_kind(rows)} loss (nats)")
    if x == "step":
      axes.set(xlabel="step", xlim=(0, None))
    else:
      axes.set(xlabel="sent so far (MB per replica)", xscale="log")
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
  figure = Figure(figsize=(_WIDTH, 6.0), layout="constrained")
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
  axes.set_xscale("log")
  low, high = min(r for r, _ in places), max(r for r, _ in places)
  axes.set_xlim(min(low, 1) / 1.15, high * 1.6)
  axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
  axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
  axes.xaxis.set_minor_locator(NullLocator())
  _dress(axes, "Gap to dense by compression ratio")
  axes.set_xlabel("times fewer bytes than dense, over the whole run")
  axes.set_ylabel(f"held-out loss above {found.dense.name} (%)")
  axes.legend(
    fontsize=8, frameon=False, loc="upper left", title_fontsize=8,
    title="hollow: fixed rank of the same bytes" if beside else None,
    alignment="left",
  )  # fmt: skip
  _label(figure, axes, [(row.name, place) for row, place, _ in gaps])
  return figure


def _gaps(found: Comparison) -> list[tuple[Row, tuple[float, float], float]]:
  """Rows with a gap, their (ratio, gap in %), and its error."""
  gaps = []
  for row in found.rows:
    found_gap = gap(row, found.dense)
    if found_gap:
      mean, error = found_gap
      place = row.mean("compression_ratio"), 100 * mean
      gaps.append((row, place, 100 * (error or 0.0)))
  return gaps


def _curve(
  axes: Axes, row: Row, x: str, **style: object
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


def _dress(axes: Axes, title: str) -> None:
  axes.set_title(title, loc="left", fontsize=10, fontweight="bold")
  axes.spines[["top", "right"]].set_visible(False)
  axes.grid(color="#dddddd", linewidth=0.6)
  axes.set_axisbelow(True)
  axes.tick_params(labelsize=8)


def _label(
  figure: Figure, axes: Axes, points: Sequence[tuple[str, tuple[float, float]]]
) -> None:
  """Names points where no other name, point or bar is, as near as it can."""
  figure.draw_without_rendering()
  renderer = figure.canvas.get_renderer()
  centers = [axes.transData.transform(place) for _, place in points]
  taken = [Bbox.from_bounds(x - 5, y - 5, 10, 10) for x, y in centers]
  if axes.get_legend():
    taken.append(axes.get_legend().get_window_extent(renderer))
  for name, place in points:
    text = None
    for offset, side in _OFFSETS:
      if text:
        text.remove()
      text = _annotate(axes, name, place, offset, side)
      box = text.get_window_extent(renderer)
      inside = axes.bbox.x0 <= box.x0 and box.x1 <= figure.bbox.x1
      if inside and not any(box.overlaps(other) for other in taken):
        break
    taken.append(Text.get_window_extent(text, renderer))


def _annotate(
  axes: Axes, name: str, place: tuple[float, float], offset: tuple, side: str
) -> Text:
  return axes.annotate(
    name, place, offset, textcoords="offset points", fontsize=7.5, ha=side,
    va="center", annotation_clip=False,
    arrowprops={"arrowstyle": "-", "color": "#aaaaaa", "linewidth": 0.6,
                "shrinkA": 0, "shrinkB": 3},
  )  # fmt: skip


_OFFSETS = [
  ((right * (6 + near / 3), up), side)
  for near in range(0, 160, 8)
  for up in (near, -near)
  for right, side in ((1, "left"), (-1, "right"))
]
