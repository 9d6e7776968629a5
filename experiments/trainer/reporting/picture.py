"""The curves of a report as one picture, for places that show no pages."""

import html
import textwrap
from collections.abc import Mapping

import plotly.graph_objects as go
from matplotlib.figure import Figure
from matplotlib.ticker import (
  EngFormatter,
  LogLocator,
  MaxNLocator,
  NullFormatter,
)

from experiments.trainer.reporting.style import WIDTH, dress

_DASHES = {"solid": "-", "dot": ":"}


def draw(charts: Mapping[str, go.Figure], title: str) -> Figure:
  """Draws all charts that have curves, two beside each other.

  Args:
    charts: The charts by title.
    title: Of the whole picture, as it stands there.
  """
  found = {
    title: chart
    for title, chart in charts.items()
    if chart.data[0].type == "scatter"
  }
  rows = -(-len(found) // 2)
  figure = Figure(figsize=(WIDTH, 2.6 * max(rows, 1)), layout="constrained")
  heading = figure.suptitle(textwrap.fill(title, 100), fontsize=9)
  heading.set_parse_math(False)  # names of folders may hold $
  panels = figure.subplots(max(rows, 1), 2, squeeze=False).ravel()
  for axes, (name, chart) in zip(panels, found.items(), strict=False):
    dress(axes, name)
    for curve in chart.data:
      axes.plot(
        curve.x, curve.y, _DASHES[curve.line.dash], color=curve.line.color,
        marker="." if "markers" in curve.mode else "", markersize=4,
        alpha=curve.opacity, linewidth=1, label=html.unescape(curve.name),
        drawstyle="steps-pre" if curve.line.shape == "vh" else "default",
      )  # fmt: skip
    axes.set_xlabel(chart.layout.xaxis.title.text, fontsize=8)
    axes.set_yscale(chart.layout.yaxis.type or "linear")
    for axis, set_limits, layout in (
      (axes.xaxis, axes.set_xlim, chart.layout.xaxis),
      (axes.yaxis, axes.set_ylim, chart.layout.yaxis),
    ):
      if layout.type == "log":
        axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.set_minor_formatter(NullFormatter())
      if layout.tickformat == "~s":  # SI prefixes, as on the page
        axis.set_major_formatter(EngFormatter(sep=""))
      if layout.tickformat == "d":
        axis.set_major_locator(MaxNLocator(integer=True))
      if layout.rangemode == "tozero":
        set_limits(0)  # the lower one
    if len(chart.data) > 1:
      legend = axes.legend(fontsize=7, frameon=False)
      for text in legend.get_texts():
        text.set_parse_math(False)
  for axes in panels[len(found) :]:
    axes.set_axis_off()
  return figure
