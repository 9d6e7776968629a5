"""Draws the frontier of a study: gap to dense by compression ratio."""

from collections.abc import Sequence

from matplotlib import patheffects
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.ticker import NullLocator
from matplotlib.transforms import Bbox

from experiments.reporting import style
from experiments.study.comparison import Comparison, Row, gap, non_dominated

_MARKERS = "osD^vP*X"
_HALO = patheffects.withStroke(linewidth=2, foreground="white")
# Places of a label left and right of a point, nearest first. Labels further up
# or down are also further out.
_OFFSETS = [
  ((right * (8 + far / 4), up), side)
  for far in range(0, 240, 6)
  for up in dict.fromkeys((far, -far))
  for right, side in ((1, "left"), (-1, "right"))
]


def draw(found: Comparison) -> Figure:
  """Draws gaps to dense against compression ratios, with the Pareto frontier.

  Args:
    found: The comparison, with at least one row with a gap.

  Returns:
    The figure; bars are standard errors over seeds.
  """
  figure = Figure(
    figsize=(style.WIDTH, 6.0), dpi=style.DPI, layout="constrained"
  )
  axes = figure.subplots()
  gaps = gaps_of(found)
  places = [place for _, place, _ in gaps]
  others = {id(row.matched) for row in found.rows}
  own = [place for row, place, _ in gaps if id(row) not in others]
  best = [own[i] for i in non_dominated(own)]
  # The gap at a point is attainable at every smaller ratio, too.
  axes.plot(
    *zip(*best, strict=True), color="#999999", zorder=1, drawstyle="steps-pre"
  )
  groups = list(found.tables)
  members = {id(r): t for t, rows in found.tables.items() for r in rows}
  matched = {
    id(row.matched): members[id(row)] for row in found.rows if row.matched
  }
  shown = set()
  for row, (ratio, height), error in gaps:
    group = {**matched, **members}[id(row)]
    number = groups.index(group)
    color = style.COLORS[number % len(style.COLORS)]
    axes.errorbar(
      ratio, height, yerr=error, color=color, capsize=2, linewidth=1,
      marker=_MARKERS[number % len(_MARKERS)], markersize=6,
      markerfacecolor="white" if id(row) in matched else color,
      label=group if group not in shown else None, linestyle="",
      zorder=4,
    )  # fmt: skip
    shown.add(group)
  heights = [height for _, height in places]
  # Small gaps matter most, but large ones must be visible, too.
  if max(heights) > 5:
    axes.set_yscale("symlog", linthresh=1, linscale=1)
    ticks = [-1, -0.5, 0, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000]
    axes.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.set_ylim(min([-0.5, *heights]) - 0.2, max(heights) * 1.5)
    axes.yaxis.set_minor_locator(NullLocator())
  axes.axhline(0, color=style.DENSE, linestyle="--", linewidth=1, zorder=0)
  low, high = min(r for r, _ in places), max(r for r, _ in places)
  axes.set_xlim(min(low, 1) / 1.15, high * 1.6)
  style.scale_bytes(axes)
  style.dress(axes, "Gap to dense by compression ratio")
  axes.set_xlabel("times fewer bytes than dense, over the whole run")
  axes.set_ylabel(f"held-out loss above {found.dense.name} (%)")
  axes.legend(
    fontsize=8, frameon=False, loc="upper left", title_fontsize=8,
    title="grey: the smallest gap; bars: standard errors"
    + "\nhollow: fixed rank of the same bytes" * bool(matched),
    alignment="left",
  )  # fmt: skip
  where = {id(row): place for row, place, _ in gaps}
  for row, place, _ in gaps:
    if row.matched and id(row.matched) in where:
      ends = zip(place, where[id(row.matched)], strict=True)
      axes.plot(*ends, color="#999999", linewidth=0.8, linestyle=":")
  named = [(r.name, place) for r, place, _ in gaps if id(r) not in matched]
  _label(figure, axes, named, [place for _, place, _ in gaps])
  return figure


def gaps_of(found: Comparison) -> list[tuple[Row, tuple[float, float], float]]:
  """Returns rows with a gap, their (ratio, gap in %), and its error in %."""
  gaps = []
  for row in found.rows:
    if row is found.dense:
      gaps.append((row, (row.mean("compression_ratio"), 0.0), 0.0))
    elif found_gap := gap(row, found.dense):
      mean, error = found_gap
      place = row.mean("compression_ratio"), 100 * mean
      gaps.append((row, place, 100 * (error or 0.0)))
  return gaps


def _label(
  figure: Figure,
  axes: Axes,
  named: Sequence[tuple[str, tuple[float, float]]],
  points: Sequence[tuple[float, float]],
) -> None:
  """Puts each name as near to its point as possible without overlaps."""
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
    else:  # there is no room for this name
      continue
    taken.append(box)
