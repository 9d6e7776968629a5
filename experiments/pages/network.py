"""Tables and pictures of docs/network.md, from docs/network.json."""

import functools
import json
import pathlib
import statistics
from collections.abc import Sequence
from typing import Any

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, StrMethodFormatter

from experiments.network import results
from experiments.network.results import DENSE, NARROW, NO_EXCHANGE
from experiments.reporting.style import COLORS, WIDTH, dress
from experiments.reporting.style import DENSE as GREY

_FILE = pathlib.Path(__file__).resolve().parents[2] / results.FILE
_NONE = "-"
_PARTS = {
  "without": ("compute", GREY),
  "compress": ("compress", COLORS[4]),
  "communicate": ("communicate", COLORS[0]),
}


@functools.cache
def _found() -> dict[str, Any]:
  return json.loads(_FILE.read_text())


@functools.cache
def _cells() -> pd.DataFrame:
  return results.cells_of(_FILE)


def _origin() -> Sequence[str]:
  """Lists the commands that measured each layout."""
  return [
    f"- {', '.join(run['layouts'])}: `{run['command']}`, {run['minutes']:.0f}"
    f" minutes in all, commit {run['commit']}; {run['machine']}, {run['cores']}"
    f" cores for all hosts; {run['rounds']} rounds; {run['versions']}"
    for run in _found()["runs"]
  ]


def _steps(layout: str) -> Sequence[str]:
  """Compares our rows of a layout with the dense ones."""
  cells = _cells()
  ours = cells[(cells["layout"] == layout) & (cells["framework"] == "jax")]
  by_row = ours.set_index(["rate", "row"])
  lines = []
  for cell in ours.to_dict("records"):
    is_none = cell["row"] == NO_EXCHANGE
    line = {
      "Mbit/s": f"{cell['rate']:g}",
      "method": cell["row"],
      "step, s": f"{cell['step']:.3f}",
      "exchange, s": _NONE if is_none else _number(cell["exchange"], ".3f"),
    }
    for kind, key in (("exchange", "clear"), ("step", "step")):
      for other, smaller in ((DENSE, ()), (NARROW, (DENSE,))):
        place = (cell["rate"], other)
        is_compared = cell["row"] not in (NO_EXCHANGE, other, *smaller)
        less = None
        if is_compared and place in by_row.index:
          less = 1 - cell[key] / by_row.loc[place, key]
        line[f"{kind} less than {other}"] = _number(less, ".1%")
    limit = None if is_none else cell["limit"]
    lines.append(
      line
      | {
        "compute": _number(cell["without"], ".3f"),
        "compress": _number(cell["compress"], ".3f"),
        "communicate": _number(cell["communicate"], ".3f"),
        "payload, MB": _number(cell["wire_bytes"] / 1e6, ".2f"),
        "sent, MB": _number(cell["sent_bytes"] / 1e6, ".2f"),
        "limit, s": _number(limit, ".3f"),
        "step / limit": _number(limit and cell["step"] / limit, ".2f"),
      }
    )
  return _markdown(lines)


def _peers(layout: str) -> Sequence[str]:
  """Compares our rows of a layout with PyTorch's."""
  cells = _cells()
  cells = cells[cells["layout"] == layout].set_index(["rate", "row"])
  ours, theirs = (
    cells[cells["framework"] == name] for name in ("jax", "torch")
  )
  both = theirs.add_suffix("_theirs").join(ours, how="inner")
  lines = []
  for (rate, row), cell in both.iterrows():
    is_none = row == NO_EXCHANGE
    ratio = cell["clear"] / cell["clear_theirs"]
    values = (
      cell["exchange"], cell["exchange_theirs"], ratio, cell["link_alone"],
    )  # fmt: skip
    lines.append(
      {
        "Mbit/s": f"{rate:g}", "method": row,
        "step, ours": f"{cell['step']:.3f}",
        "step, PyTorch": f"{cell['step_theirs']:.3f}",
        "step, ratio": f"{cell['step'] / cell['step_theirs']:.2f}",
      }
      | {
        name: _NONE if is_none else _number(value, spec)
        for name, value, spec in zip(
          ("exchange, ours", "exchange, PyTorch", "exchange, ratio",
           "link alone"),
          values,
          (".3f", ".3f", ".2f", ".3f"),
          strict=True,
        )
      }
    )  # fmt: skip
  return _markdown(lines)


def _advice() -> Sequence[str]:
  """Compares predicted with measured steps, and the choice with the right."""
  cells = _cells()
  ours = cells[cells["framework"] == "jax"]
  lines, errors, orders, right = [], [], [], 0
  for advice in _found()["advice"]:
    place = (ours["layout"] == advice["layout"]) & (
      ours["rate"] == advice["rate"]
    )
    steps = ours[place].set_index("row")["step"].to_dict()
    predicted = advice["seconds"]
    if not steps.keys() >= predicted.keys():
      continue
    measured = {name: steps[name] for name in predicted}
    best = results.right_choice(measured)
    right += advice["choice"] == best
    errors += [abs(predicted[n] / measured[n] - 1) for n in measured]
    orders += results.orders_of(predicted, measured)
    fastest = min(measured.values())
    lines.append(
      {"layout": advice["layout"], "Mbit/s": f"{advice['rate']:g}"}
      | {
        n: f"{p:.3f} / {measured[n]:.3f} ({p / measured[n] - 1:+.0%})"
        for n, p in predicted.items()
      }
      | {
        "choice": advice["choice"],
        "right": best,
        "choice / fastest": f"{measured[advice['choice']] / fastest:.2f}",
      }
    )
  return [
    *_markdown(lines),
    "",
    f"Right: {right} of {len(lines)}; errors: median"
    f" {statistics.median(errors):.0%}, largest {max(errors):.0%}. Of"
    f" {len(orders)} pairs of methods whose steps differ clearly,"
    f" {sum(orders)} are in the right order.",
  ]


def draw_parts() -> Figure:
  """Draws bars of the parts, measured alone, and marks of the whole step."""
  cells = _cells()
  whole = cells[cells["row"] != NO_EXCHANGE].dropna(subset=list(_PARTS))
  rate = 100.0 if (whole["rate"] == 100).any() else whole["rate"].median()
  layouts = whole[whole["rate"] == rate]["layout"].unique()
  figure = Figure(
    figsize=(WIDTH, 0.8 + 3.2 * len(layouts)), layout="constrained"
  )
  panels = figure.subplots(len(layouts), 1, squeeze=False).ravel()
  for axes, layout in zip(panels, layouts, strict=True):
    own = cells[(cells["layout"] == layout) & (cells["rate"] == rate)]
    names = (own["framework"] + ", " + own["row"]).tolist()
    left = own["step"] * 0
    for key, (_, color) in _PARTS.items():
      widths = own[key].fillna(0.0)
      axes.barh(range(len(own)), widths, left=left, color=color, height=0.6)
      left = left + widths
    for place, step in enumerate(own["step"]):
      axes.plot([step] * 2, [place - 0.4, place + 0.4], color="black")
    axes.set_yticks(range(len(own)), names)
    axes.invert_yaxis()
    dress(axes, f"{layout}, {rate:g} Mbit/s")
    axes.set_xlabel("seconds a step")
  for name, color in _PARTS.values():
    panels[0].barh(0, 0, color=color, label=name)
  panels[0].plot([], [], color="black", label="the whole step")
  panels[0].legend(fontsize=8, frameon=False)
  return figure


def draw_speeds() -> Figure:
  """Draws step time by link speed, with a panel for each layout."""
  cells = _cells()
  counts = cells.groupby("layout", sort=False)["rate"].nunique()
  layouts = counts[counts > 1].index
  figure = Figure(
    figsize=(WIDTH, 0.6 + 3.6 * len(layouts)), layout="constrained"
  )
  panels = figure.subplots(len(layouts), 1, squeeze=False).ravel()
  rates = sorted(cells["rate"].unique())
  for axes, layout in zip(panels, layouts, strict=True):
    own = cells[cells["layout"] == layout]
    rows = list(own["row"].unique())
    for (row, framework), line in own.groupby(["row", "framework"], sort=False):
      axes.plot(
        line["rate"], line["step"], "o-" if framework == "jax" else "s--",
        color=COLORS[rows.index(row) % len(COLORS)],
        label=f"{framework}, {row}", markersize=4,
      )  # fmt: skip
    axes.set(xscale="log", yscale="log", ylabel="seconds a step")
    axes.set_xticks(rates, [f"{rate:g}" for rate in rates])
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.minorticks_off()
    dress(axes, layout)
    axes.legend(fontsize=7, frameon=False, loc="center left",
                bbox_to_anchor=(1.0, 0.5))  # fmt: skip
  panels[-1].set_xlabel("Mbit/s of a host's uplink")
  return figure


def _markdown(lines: Sequence[dict[str, str]]) -> Sequence[str]:
  table = pd.DataFrame(lines)
  return table.to_markdown(index=False, disable_numparse=True).splitlines()


def _number(value: float | None, spec: str) -> str:
  return _NONE if value is None or pd.isna(value) else format(value, spec)


TABLES = {
  "network origin": _origin,
  "network": _steps,
  "network peers": _peers,
  "network advice": _advice,
}
PICTURES = {"network-parts": draw_parts, "network-speeds": draw_speeds}
