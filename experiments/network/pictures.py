"""The pictures of the network benchmark."""

from collections.abc import Sequence

from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, StrMethodFormatter

from experiments.network.results import Results
from experiments.reporting.style import COLORS, WIDTH, dress
from experiments.reporting.style import DENSE as GREY

_PARTS = (
  ("compute", GREY),
  ("compress", COLORS[4]),
  ("communicate", COLORS[0]),
)


def draw_parts(results: Results) -> Figure:
  """Bars of the parts, each measured alone, and marks of the whole step."""
  rate = _middle(results.rates)
  layouts = [
    layout
    for layout in results.layouts
    if any(c.parts for c in results.of(layout=layout, rate=rate))
  ] or results.layouts[:1]
  figure = Figure(
    figsize=(WIDTH, 0.8 + 3.2 * len(layouts)), layout="constrained"
  )
  panels = figure.subplots(len(layouts), 1, squeeze=False).ravel()
  for axes, layout in zip(panels, layouts, strict=True):
    cells = results.of(layout=layout, rate=rate)
    for place, cell in enumerate(cells):
      left = 0.0
      widths = (cell.without, cell.compress, cell.communicate)
      for (_, color), width in zip(_PARTS, widths, strict=True):
        axes.barh(place, width or 0.0, left=left, color=color, height=0.6)
        left += width or 0.0
      axes.plot([cell.step] * 2, [place - 0.4, place + 0.4], color="black")
    axes.set_yticks(
      range(len(cells)), [f"{c.framework}, {c.row}" for c in cells]
    )
    axes.invert_yaxis()
    dress(axes, f"{layout}, {rate:g} Mbit/s")
    axes.set_xlabel("seconds a step")
  for name, color in _PARTS:
    panels[0].barh(0, 0, color=color, label=name)
  panels[0].plot([], [], color="black", label="the whole step")
  panels[0].legend(fontsize=8, frameon=False)
  return figure


def draw_speeds(results: Results) -> Figure:
  """Step time against the speed of the links, a panel for each layout."""
  layouts = [
    layout
    for layout in results.layouts
    if len({cell.rate for cell in results.of(layout=layout)}) > 1
  ] or results.layouts[:1]
  count = len(layouts)
  figure = Figure(figsize=(WIDTH, 0.6 + 3.6 * count), layout="constrained")
  panels = figure.subplots(count, 1, squeeze=False).ravel()
  for axes, layout in zip(panels, layouts, strict=True):
    cells = results.of(layout=layout)
    rows = list(dict.fromkeys(c.row for c in cells))
    for row in rows:
      color = COLORS[rows.index(row) % len(COLORS)]
      for framework, style in (("jax", "o-"), ("torch", "s--")):
        line = [c for c in cells if (c.row, c.framework) == (row, framework)]
        if line:
          axes.plot(
            [c.rate for c in line], [c.step for c in line], style,
            color=color, label=f"{framework}, {row}", markersize=4,
          )  # fmt: skip
    axes.set(xscale="log", yscale="log", ylabel="seconds a step")
    axes.set_xticks(results.rates, [f"{rate:g}" for rate in results.rates])
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.minorticks_off()
    dress(axes, layout)
    axes.legend(fontsize=7, frameon=False, loc="center left",
                bbox_to_anchor=(1.0, 0.5))  # fmt: skip
  panels[-1].set_xlabel("Mbit/s of a host's uplink")
  return figure


def _middle(rates: Sequence[float]) -> float:
  """100 Mbit/s where it is there."""
  return 100.0 if 100.0 in rates else rates[len(rates) // 2]
