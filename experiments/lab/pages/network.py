"""Tables and pictures of results/network.md, from results/data/.

Step times are from network.json. Times to a loss are from advice.json and
advice_10m.json, which have the methods that `advise` chooses from, for the
protocol's model and a larger one. Whole runs are from whole_runs.json.
"""

import functools
import itertools
import json
import math
import pathlib
from collections.abc import Sequence
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, StrMethodFormatter

from experiments import ROOT
from experiments.lab.network import results
from experiments.lab.network.results import DENSE, NARROW, NO_EXCHANGE
from experiments.lab.study import statistics
from experiments.trainer.reporting.style import COLORS, WIDTH, dress, markdown
from experiments.trainer.reporting.style import DENSE as GREY

_FILE = results.FILE
_WITH_LOSS = (
  "results/data/advice.json",
  "results/data/advice_10m.json",
)  # times to a loss
_PARTS = {"without": GREY, "compress": COLORS[4], "communicate": COLORS[0]}


_LINK = ["rate", "round_trip"]


@functools.cache
def _found(file: pathlib.Path | None = None) -> dict[str, Any]:
  return json.loads((file or _FILE).read_text())


@functools.cache
def _cells(file: pathlib.Path | None = None) -> pd.DataFrame:
  return results.cells_of(file or _FILE)


def _nearest() -> pd.DataFrame:
  """Returns the cells of the shortest round trip."""
  cells = _cells()
  return cells[cells["round_trip"] == cells["round_trip"].min()]


def _link_of(cells: pd.DataFrame) -> dict[str, pd.Series]:
  """Returns the columns of a table that name the link, as text."""
  columns = {"Mbit/s": _text(cells["rate"], "g")}
  if cells["round_trip"].any():
    columns["round trip, ms"] = _text(cells["round_trip"], "g")
  return columns


def _origin(file: str = "") -> Sequence[str]:
  """Lists the commands that measured each layout."""
  runs = _found(ROOT / file if file else None)["runs"]
  return [
    f"- {', '.join(run['layouts'])}: `{run['command']}`, {run['minutes']:.0f}"
    f" minutes in all, commit {run['commit']}; {run['machine']}, {run['cores']}"
    f" cores for all hosts; {run['rounds']} rounds; {run['versions']}"
    for run in runs
  ]


def _steps(layout: str) -> Sequence[str]:
  """Compares our rows of a layout with the dense ones."""
  cells = _cells()
  ours = cells[(cells["layout"] == layout) & (cells["framework"] == "jax")]
  is_none = ours["row"] == NO_EXCHANGE
  limit = ours["limit"].mask(is_none)
  table = {
    **_link_of(ours),
    "method": ours["row"],
    "step, s": _text(ours["step"], ".3f"),
    "exchange, s": _text(ours["exchange"].mask(is_none), ".3f"),
  }
  for kind, key in (("exchange", "clear"), ("step", "step")):
    for other, left_out in ((DENSE, []), (NARROW, [DENSE])):
      dense = ours[ours["row"] == other].set_index(_LINK)[key]
      less = 1 - ours[key] / ours[_LINK].join(dense, on=_LINK)[key]
      less = less.mask(ours["row"].isin([NO_EXCHANGE, other, *left_out]))
      table[f"{kind} less than {other}"] = _text(less, ".1%")
  return markdown(
    table
    | {
      "compute": _text(ours["without"], ".3f"),
      "compress": _text(ours["compress"], ".3f"),
      "communicate": _text(ours["communicate"], ".3f"),
      "payload, MB": _text(ours["wire_bytes"] / 1e6, ".2f"),
      "sent, MB": _text(ours["sent_bytes"] / 1e6, ".2f"),
      "limit, s": _text(limit, ".3f"),
      "step / limit": _text(ours["step"] / limit, ".2f"),
    }
  )


def _peers(layout: str) -> Sequence[str]:
  """Compares our rows of a layout with PyTorch's."""
  cells = _cells()
  cells = cells[cells["layout"] == layout].set_index([*_LINK, "row"])
  ours, theirs = (
    cells[cells["framework"] == name] for name in ("jax", "torch")
  )
  both = theirs.add_suffix("_theirs").join(ours, how="inner").reset_index()
  is_none = both["row"] == NO_EXCHANGE
  table = {
    **_link_of(both),
    "method": both["row"],
    "step, ours": _text(both["step"], ".3f"),
    "step, PyTorch": _text(both["step_theirs"], ".3f"),
    "step, ratio": _text(both["step"] / both["step_theirs"], ".2f"),
  }
  for name, values, spec in (
    ("exchange, ours", both["exchange"], ".3f"),
    ("exchange, PyTorch", both["exchange_theirs"], ".3f"),
    ("exchange, ratio", both["clear"] / both["clear_theirs"], ".2f"),
    ("link alone", both["link_alone"], ".3f"),
  ):
    table[name] = _text(values.mask(is_none), spec)
  return markdown(table)


@functools.cache
def _times(file: str) -> pd.DataFrame:
  """Returns times to a loss, as shares of dense's on the same link.

  Args:
    file: The JSON file, from the project's root.

  Returns:
    A line for each method and link: link, method, steps, measured, predicted,
    is_choice.
  """
  cells = _cells(ROOT / file)
  cells = cells[cells["framework"] == "jax"]
  cells = cells.set_index(["layout", *_LINK, "row"])["step"].sort_index()
  lines = []
  for advice in _found(ROOT / file)["advice"]:
    link = advice["rate"], advice["round_trip"]
    steps, predicted = pd.Series(advice["steps"]), pd.Series(advice["seconds"])
    frame = pd.DataFrame(
      {
        "measured": steps
        * cells.loc[advice["layout"], *link].reindex(steps.index),
        "predicted": steps * predicted,
      }
    )
    frame = (frame / frame.loc[DENSE]).dropna()  # without what did not run
    name = results.link_name(*link)
    is_choice = frame.index == advice["choice"]
    lines.append(frame.assign(link=name, steps=steps, is_choice=is_choice))
  return pd.concat(lines).rename_axis("method").reset_index()


def _time_to_loss(file: str) -> Sequence[str]:
  """Compares times to a loss by method and link; marks choice and best."""
  times = _times(file)
  best = times.groupby("link")["measured"].transform("min")
  is_best = times["measured"] == best
  text = times["measured"].map("{:.3f}".format)
  text = text.where(~is_best, "**" + text + "**")
  text = text.where(~times["is_choice"], text + " ←")
  table = times.assign(text=text).pivot(
    index=["method", "steps"], columns="link", values="text"
  )
  methods = times["method"].unique()
  table = table.reset_index().set_index("method").loc[methods].reset_index()
  table["steps"] = table["steps"].map("{:.2f}".format)
  links = list(times["link"].unique())
  chosen = times[times["is_choice"]]
  behind = chosen["measured"] / best[chosen.index] - 1
  errors = (times["predicted"] / times["measured"] - 1).abs()
  return [
    *markdown(table[["method", "steps", *links]].fillna("-")),
    "",
    f"The choice (←) takes at most {behind.max():.0%} longer than the best"
    f" method (bold), and on the mean link {behind.mean():.0%}. Predicted"
    f" shares differ from measured ones by {errors.median():.0%} in the median"
    f" and {errors.max():.0%} at most.",
  ]


def _whole_runs() -> Sequence[str]:
  """Returns times to a loss of whole runs, beside steps times seconds."""
  expected = _times(_WITH_LOSS[0]).set_index(["link", "method"])["measured"]
  curves = {}
  for run in _found(ROOT / results.WHOLE_RUNS)["runs"]:
    name = results.link_name(run["rate"], run["round_trip"])
    curve = _in_minutes(pd.DataFrame(run["lines"]))
    curves[name, run["seed"], run["arm"]] = curve
  lines = []
  for (link, seed, arm), curve in curves.items():
    loss, minutes = curve.iloc[-1][["val_loss", "minutes"]]
    other = curves.get((link, seed, DENSE))
    dense = (
      math.nan if other is None else statistics.reached(other, loss, "minutes")
    )
    lines.append(
      {
        "link": link,
        "method": arm,
        "seed": f"{seed}",
        "held-out loss": f"{loss:.4f}",
        "minutes": f"{minutes:.1f}",
        "dense's to that loss": dense,
        "share": minutes / dense,
        "steps times seconds": expected.get((link, arm), math.nan),
      }
    )
  table = pd.DataFrame(lines)
  for name, spec in (
    ("dense's to that loss", ".1f"),
    ("share", ".2f"),
    ("steps times seconds", ".2f"),
  ):
    table[name] = _text(table[name], spec)
  return markdown(table)


def _in_minutes(lines: pd.DataFrame) -> pd.DataFrame:
  """Returns the evaluations after the first one, with `minutes` since step 0.

  The last program is compiled in the first evaluation. The steps until the line
  after it count at the mean pace since then.
  """
  first = int(lines["val_loss"].notna().to_numpy().argmax())
  since, curve = lines.iloc[first + 1], lines.iloc[first + 2 :]
  curve = curve.dropna(subset="val_loss").copy()
  a_step = (curve["seconds"] - since["seconds"]) / (
    curve["step"] - since["step"]
  )
  curve["minutes"] = a_step * curve["step"] / 60
  return curve


def draw_times() -> Figure:
  """Draws times to a loss by link, with a panel for each model.

  Measured times have marks, and predicted ones crosses.
  """
  figure, panels = _panels(len(_WITH_LOSS), 1.3, 3.8)
  found = {file: _times(file) for file in _WITH_LOSS}
  methods = pd.concat(found.values())["method"].unique()
  looks = dict(
    zip(
      methods,
      zip(itertools.cycle(COLORS), itertools.cycle("osD^vP*X"), strict=False),
      strict=False,
    )
  )
  looks[DENSE] = GREY, "o"
  handles = {}
  for axes, (file, times) in zip(panels, found.items(), strict=True):
    links = list(times["link"].unique())
    for method, own in times.groupby("method", sort=False):
      color, marker = looks[method]
      places = [links.index(link) for link in own["link"]]
      (handles[method],) = axes.plot(
        places, own["measured"], color=color, marker=marker, label=method,
        linestyle=":", linewidth=1, markersize=6,
      )  # fmt: skip
      axes.plot(places, own["predicted"], "x", color=color, markersize=4)
    axes.set_yscale("log")
    axes.set_xticks(range(len(links)), links)
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.minorticks_off()
    params = _found(ROOT / file)["params"] / 1e6
    dress(
      axes, f"Time to the loss, as a share of dense's: {params:.3g}M parameters"
    )
  panels[-1].set_xlabel(
    "uplinks of 4 hosts, and round trip; crosses are predicted"
  )
  figure.legend(
    handles=list(handles.values()), fontsize=8, frameon=False,
    loc="outside lower center", ncols=4,
  )  # fmt: skip
  return figure


def draw_parts() -> Figure:
  """Draws bars of the parts, measured alone, and marks of the whole step."""
  cells = _nearest()
  whole = cells[cells["row"] != NO_EXCHANGE].dropna(subset=list(_PARTS))
  rate = 100.0 if (whole["rate"] == 100).any() else whole["rate"].median()
  layouts = whole[whole["rate"] == rate]["layout"].unique()
  figure, panels = _panels(len(layouts), 0.8, 3.2)
  for axes, layout in zip(panels, layouts, strict=True):
    own = cells[(cells["layout"] == layout) & (cells["rate"] == rate)]
    own.set_index(own["framework"] + ", " + own["row"])[list(_PARTS)].plot.barh(
      ax=axes, stacked=True, color=_PARTS, width=0.6, legend=False
    )
    places = range(len(own))
    axes.vlines(
      own["step"], [p - 0.4 for p in places], [p + 0.4 for p in places],
      color="black", label="the whole step",
    )  # fmt: skip
    axes.invert_yaxis()
    dress(axes, f"{layout}, {rate:g} Mbit/s")
    axes.set_xlabel("seconds a step")
  panels[0].legend(["the whole step", "compute", *list(_PARTS)[1:]],
                   fontsize=8, frameon=False)  # fmt: skip
  return figure


def draw_speeds() -> Figure:
  """Draws step time by link speed, with a panel for each layout."""
  cells = _nearest()
  counts = cells.groupby("layout", sort=False)["rate"].nunique()
  layouts = counts[counts > 1].index
  figure, panels = _panels(len(layouts), 0.6, 3.6)
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


def _panels(
  count: int, more: float, each: float
) -> tuple[Figure, Sequence[Axes]]:
  """Returns a figure of panels below each other, of a height in inches."""
  size = (WIDTH, more + each * count)
  figure = Figure(figsize=size, layout="constrained")
  return figure, figure.subplots(count, 1, squeeze=False).ravel()


def _text(values: pd.Series, spec: str) -> pd.Series:
  """Formats numbers, and a dash for what is not measured or compared."""
  return values.map(lambda x: "-" if pd.isna(x) else format(x, spec))


TABLES = {
  "network origin": _origin,
  "network": _steps,
  "network peers": _peers,
  "time to loss": _time_to_loss,
  "whole runs": _whole_runs,
}
PICTURES = {
  "network-parts": draw_parts,
  "network-speeds": draw_speeds,
  "network-times": draw_times,
}
