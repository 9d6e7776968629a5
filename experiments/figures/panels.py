"""Draws the figures, each from its numbers."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

# Okabe and Ito's colours, which colour-blind people can distinguish.
_BLUE, _RED, _GREEN = "#0072b2", "#d55e00", "#009e73"
_ORDER = ("#440154", "#3b528b", "#21918c", "#5ec962", "#e0b000")
_MARKERS = "os^Dv"
_KINDS = {"local": "gradient of a replica", "mean": "mean gradient"}

Numbers = Mapping[str, Any]


def draw_entropy(numbers: Numbers) -> Figure:
  """Draws entropy by step above the ranks, with a column per model."""
  figure = _figure(10, 5.6)
  grid = figure.subplots(2, len(numbers), sharex="col", sharey="row")
  for (name, run), (above, below) in zip(numbers.items(), grid.T, strict=True):
    above.plot(
      run["step"], run["entropy"], color=_BLUE, lw=0.7, alpha=0.6,
      label="estimate of a step",
    )  # fmt: skip
    above.plot(
      run["window_middle"], run["window_mean"], color=_RED, marker="o", ms=3,
      lw=1.2, label="mean of a window",
    )  # fmt: skip
    _dress(above, name, "", "entropy (nats)" if name == "GPT" else "")
    below.step(run["step"], run["rank"], where="post", color=_GREEN, lw=1.8)
    _dress(below, "", "step", "rank" if name == "GPT" else "")
    below.set_ylim(0, max(run["rank"]) * 1.1 + 1)
  grid[0, 0].legend(frameon=False)
  return figure


def draw_histograms(numbers: Numbers) -> Figure:
  """Draws densities of gradient entries, unscaled and in units of the rms."""
  figure = _figure(10, 7)
  grid = figure.subplots(2, len(numbers), sharey="row")
  normal = np.linspace(-6, 6, 201)
  for (name, steps), (above, below) in zip(
    numbers.items(), grid.T, strict=True
  ):
    for color, (step, found) in zip(_ORDER, steps.items(), strict=False):
      units = np.array(found["centres"])
      density = np.array(found["densities"])
      density[density == 0] = np.nan
      label = f"step {step}"
      rms = found["rms"]
      above.plot(units * rms * 1e3, density / rms / 1e3, color=color,
                 label=label)  # fmt: skip
      below.plot(units, density, color=color, label=label)
    # The first step is far wider than the others: its tails are cut off.
    widest = sorted(found["rms"] for found in steps.values())
    above.set_xlim(np.array([-6e3, 6e3]) * widest[-2:][0])
    gaussian = np.exp(-(normal**2) / 2) / np.sqrt(2 * np.pi)
    below.plot(normal, gaussian, "k--", lw=1, label="Gaussian")
    for axes in (above, below):
      axes.set_yscale("log")
    below.set_ylim(bottom=1e-5)
    is_first = name == next(iter(numbers))
    density = "density (10$^3$)" if is_first else ""
    _dress(above, name, "gradient entry (10$^{-3}$)", density)
    _dress(below, "", "gradient entry (its root mean square)",
           "density" if is_first else "")  # fmt: skip
  _add_legend(figure, grid[1, 0], 6)
  return figure


def draw_errors(numbers: Numbers) -> Figure:
  """Draws g(r) of the model, of Gaussian matrices and of gradients."""
  figure = _figure(10, 7)
  found = numbers["matrices"]
  axes_of = figure.subplots(2, 2, sharey=True).ravel()
  for axes, (name, matrix) in zip(axes_of, found.items(), strict=True):
    rows, cols = matrix["shape"]
    ranks = np.arange(len(matrix["model"]))
    axes.plot(ranks, matrix["model"], "k", lw=1.4, label="model")
    axes.plot(
      ranks[::12], matrix["gaussian"][::12], "o", color="k", mfc="none", ms=4,
      label="SVD, Gaussian entries",
    )  # fmt: skip
    colors = dict.fromkeys(found["step"] for found in matrix["real"])
    colors = dict(zip(colors, (_BLUE, _RED), strict=False))
    for real in matrix["real"]:
      label = f"SVD, {_KINDS[real['kind']]}, step {real['step']}"
      style = "--" if real["kind"] == "local" else "-"
      axes.plot(ranks, real["errors"], color=colors[real["step"]], ls=style,
                lw=1.4, label=label)  # fmt: skip
    axes.axvline(numbers["rank_max"], color="#888888", lw=0.8)
    title = name.removeprefix("blocks.").removesuffix(".kernel")
    _dress(axes, f"{title}, {rows} x {cols}", "rank", "")
    axes.set(yscale="log", ylim=(3e-4, 1.5))
  for axes in axes_of[::2]:
    axes.set_ylabel("error g(r) (fraction of the norm)")
  _add_legend(figure, axes_of[0], 3)
  return figure


def draw_ranks(numbers: Numbers) -> Figure:
  """Draws entropy and rank by window, with a colour per rule."""
  figure = _figure(10, 4)
  left, right = figure.subplots(1, 2)
  # The first line is wide, to be visible behind an identical second one.
  for color, width, (rule, run) in zip(
    (_BLUE, _RED), (4.5, 1.2), numbers.items(), strict=True
  ):
    style = {"color": color, "marker": "o", "ms": 1.7 * width, "lw": width}
    style["alpha"] = 0.4 if width > 2 else 1.0
    left.plot(run["window"], run["entropy"], label=rule, **style)
    right.plot(
      run["window"], run["rank"], drawstyle="steps-mid", label=rule, **style
    )
  _dress(left, "Entropy", "window", "mean of a window (nats)")
  _dress(right, "Rank", "window", "rank")
  right.set_ylim(0, run["rank_max"] * 1.1)
  left.legend(frameon=False, title="rule")
  return figure


def draw_sampling(numbers: Numbers) -> Figure:
  """Draws errors of both estimators by rate, and times of an estimate."""
  figure = _figure(12, 4)
  *panels, cost = figure.subplots(1, 3)
  rates = numbers["entry_rates"]
  for axes, (estimator, by_step) in zip(
    panels, numbers["errors"].items(), strict=True
  ):
    for color, marker, (rate, errors) in zip(
      _ORDER, _MARKERS, by_step.items(), strict=False
    ):
      shown = [error or np.nan for error in errors]  # all entries, all steps: 0
      axes.plot(rates, shown, color=color, marker=marker, ms=4,
                label=f"{float(rate):g} of the steps")  # fmt: skip
    axes.axhline(numbers["rank_step_nats"], color="k", ls="--", lw=1,
                 label=f"worth {numbers['rank_step']} ranks")  # fmt: skip
    _dress(axes, estimator, "fraction of the entries", "error (nats)")
    axes.set(xscale="log", yscale="log")
  low, high = zip(*(axes.get_ylim() for axes in panels), strict=True)
  for axes in panels:
    axes.set_ylim(min(low), max(high))
  _add_legend(figure, panels[0], 5)
  for color, marker, (estimator, ratios) in zip(
    (_BLUE, _RED), _MARKERS, numbers["cost"].items(), strict=False
  ):
    percent = 100 * np.array(ratios)
    cost.plot(rates, percent, color=color, marker=marker, ms=4, label=estimator)
  _dress(cost, "Time of one estimate", "fraction of the entries",
         "of forward and backward (%)")  # fmt: skip
  cost.set(xscale="log")
  cost.set_ylim(bottom=0)
  cost.legend(frameon=False)
  return figure


DRAW = {
  "entropy": draw_entropy,
  "histograms": draw_histograms,
  "errors": draw_errors,
  "ranks": draw_ranks,
  "sampling": draw_sampling,
}


def _figure(width: float, height: float) -> Figure:
  figure = Figure(figsize=(width, height), layout="constrained")
  figure.get_layout_engine().set(w_pad=0.08, h_pad=0.08)
  return figure


def _add_legend(figure: Figure, axes: Axes, columns: int) -> None:
  """Adds one legend for all panels, above them."""
  place = {"loc": "outside upper left", "ncols": columns}
  figure.legend(*axes.get_legend_handles_labels(), frameon=False, **place)


def _dress(axes: Axes, title: str, x_label: str, y_label: str) -> None:
  axes.set_title(title, loc="left", fontsize=11, fontweight="bold")
  axes.set(xlabel=x_label, ylabel=y_label)
  axes.spines[["top", "right"]].set_visible(False)
  axes.grid(color="#dddddd", linewidth=0.6)
