"""Interactive charts of logged runs."""

import functools
import html
from collections.abc import Sequence

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from experiments.trainer.reporting.logged_run import Run
from experiments.trainer.reporting.style import COLORS

_AXIS = {"gridcolor": "rgba(128, 128, 128, 0.3)", "zeroline": False}
_UP_TO = "vh"  # a logged value is that of the steps up to its own
_BYTES = {"tickformat": "~s", "hoverformat": ".4~s"}
# Legible on white and on black; the page gives most texts its own colour.
_LAYOUT = {
  "template": "none", "height": 340, "font": {"color": "#808080"},
  "paper_bgcolor": "rgba(0, 0, 0, 0)", "plot_bgcolor": "rgba(0, 0, 0, 0)",
  "margin": {"l": 10, "r": 10, "t": 30, "b": 45}, "hovermode": "x unified",
  "legend": {"orientation": "h", "y": -0.2},
  "hoverlabel": {"bgcolor": "#333333", "font": {"color": "#eeeeee"}},
  "modebar": {"bgcolor": "rgba(0, 0, 0, 0)", "color": "#808080"},
  "xaxis": {"title": {"text": "step", "standoff": 5}, **_AXIS},
  "yaxis": {"automargin": True, **_AXIS},
}  # fmt: skip


def draw(runs: Sequence[Run]) -> dict[str, go.Figure]:
  """Returns charts by title, of those metrics that any of the runs logged."""
  curves = functools.partial(_curves, runs)
  keys = sorted({key for run in runs for key in run.lines})
  held_out = [key for key in keys if key.startswith("val_")]
  speeds = [key for key in keys if key.endswith("_per_second")]
  charts = {
    "Loss": curves("loss", "val_loss"),
    **{key[4:].capitalize(): curves(key[4:], key) for key in held_out},
    "Loss by bytes sent": curves("loss", "val_loss", x="bytes"),
    "Entropy of the gradient (nats)": curves("entropy"),
    "Rank (gap: dense)": curves("rank", shape=_UP_TO),
    "Bytes a step": curves("wire_bytes", "dense_bytes", shape=_UP_TO),
    "Error (share of energy)": curves("relative_error", "predicted_error"),
    "Seconds so far": curves("seconds"),
    "Sites of a round": curves("site_members", shape=_UP_TO),
    "Seconds of waiting for sites so far": curves("site_waited"),
    "Bytes between sites so far": curves("site_sent", "site_received"),
    **{key.replace("_per_", " a ").capitalize(): curves(key) for key in speeds},
  }
  charts["Loss by bytes sent"].update_xaxes(**_BYTES)
  charts["Bytes between sites so far"].update_yaxes(**_BYTES)
  charts["Sites of a round"].update_yaxes(tickformat="d", rangemode="tozero")
  charts["Bytes a step"].update_yaxes(type="log", dtick="D2", **_BYTES)
  for run in runs:
    name = f": {run.name}" if len(runs) > 1 else ""
    for key in ("rank", "entropy", "error", "predicted error"):
      charts[f"{key.capitalize()} by matrix{name}"] = _heat_map(run, key)
  return {title: chart for title, chart in charts.items() if chart.data}


def thin(y: pd.Series, parts: int = 1000) -> pd.Series:
  """Returns both ends of a curve, and the extremes of each of its parts."""
  if len(y) <= 2 * parts:
    return y
  places = np.array_split(np.arange(len(y)), parts)
  values = y.fillna(0).to_numpy()  # a gap may be kept, too
  kept = [p[[values[p].argmin(), values[p].argmax()]] for p in places]
  return y.iloc[np.unique([0, *np.ravel(kept), len(y) - 1])]


def _curves(
  runs: Sequence[Run], *keys: str, x: str = "step", shape: str = "linear"
) -> go.Figure:
  """Draws metrics of all runs and stages.

  A run has a colour, and its later stages are paler; in a single run each stage
  has a colour.
  """
  figure, is_one = go.Figure(layout=_LAYOUT), len(runs) == 1
  for i, run in enumerate(runs):
    for dash, key in zip(("solid", "dot"), keys, strict=False):
      values = run.table(key)
      for stage, y in values.dropna(axis=1, how="all").items():
        y = thin(y)
        name = [] if is_one else [run.name]
        name += [key.replace("_", " ")] * (len(keys) > 1)
        name += [f"stage {stage}"] * (len(values.columns) > 1)
        figure.add_scatter(
          x=run.lines[x][y.index], y=y, name=html.escape(", ".join(name)),
          mode="lines+markers" if len(y) < 50 else "lines",
          opacity=1 if is_one else 1 - 0.65 * stage / len(values.columns),
          line={"width": 1.5, "dash": dash, "shape": shape,
                "color": COLORS[(stage if is_one else i) % len(COLORS)]},
        )  # fmt: skip
  figure.update_xaxes(title_text=x, rangemode="tozero")
  height = _LAYOUT["height"] + 12 * len(figure.data)  # room for the legend
  return figure.update_layout(showlegend=len(figure.data) > 1, height=height)


def _heat_map(run: Run, key: str) -> go.Figure:
  figure = go.Figure(layout=_LAYOUT)
  values = run.table(f"matrix_{key.replace(' ', '_')}")
  if values.notna().any(axis=None):
    figure.add_heatmap(
      x=values.index, y=[*map(html.escape, values)], z=values.T,
      colorscale="Viridis", colorbar={"thickness": 10}, hoverongaps=False,
      hovertemplate="step %{x}, %{y}: %{z:.4g}<extra></extra>",
    )  # fmt: skip
  figure.update_yaxes(autorange="reversed", tickfont={"size": 10})
  height = max(_LAYOUT["height"], 16 * len(values.columns))
  return figure.update_layout(hovermode="closest", height=height)
