"""Draws the panels of a report's picture from the logged runs."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator

from experiments.reporting.heat_maps import Matrices
from experiments.training.optimizer import rank_name

_COLORS = ("#0072b2", "#d55e00", "#009e73", "#aa4499", "#e69f00", "#7f4f24")


@dataclasses.dataclass(frozen=True)
class Run:
  """A run folder; columns are [lines, stages], NaN if not measured."""

  name: str
  config: dict[str, Any]
  summary: dict[str, Any]  # Empty until the run has ended.
  columns: dict[str, np.ndarray]
  matrices: Matrices
  leaves: str = "not recorded"  # how each leaf of the gradient is sent

  @property
  def reducer(self) -> str:
    settings = self.config | self.summary
    return str(settings.get("reducer", "unknown reducer"))

  @property
  def is_dense(self) -> np.ndarray:
    """Whether a rank of 0 means dense, not "no ranks"; bool [lines, stages]."""
    settings = self.config | self.summary
    has_ranks = rank_name(settings.get("reducer", "allreduce"), 0) == "dense"
    return (self.columns["rank"] == 0) & has_ranks

  @property
  def label(self) -> str:
    return f"{self.reducer} ({self.name})"

  def numbers(self) -> dict[str, Any]:
    """Returns the summary, or as much of it as the lines so far provide."""

    def last(key: str) -> float | None:
      values = self.columns[key][:, 0]
      values = values[np.isfinite(values)]
      return values[-1].item() if values.size else None

    steps, rank = self.columns["step"][:, 0], self.columns["rank"]
    changed = np.ones(len(rank), bool)
    changed[1:] = (rank[1:] != rank[:-1]).any(axis=1)
    changed &= np.isfinite(rank).all(axis=1)
    dense, ratio = last("dense_bytes"), last("compression_ratio")
    return {
      "reducer": self.reducer,
      "steps": last("step"),
      "stages": self.columns["wire_bytes"].shape[1] if steps.size else None,
      "train_loss": last("loss"),
      "val_loss": last("val_loss"),
      "dense_bytes_per_step": dense,
      "wire_bytes_per_step": dense / ratio if dense and ratio else None,
      "compression_ratio": ratio,
      "rank_history": list(zip(steps[changed], rank[changed], strict=True)),
      "seconds": last("seconds"),
      "tokens_per_second": last("tokens_per_second"),
      "skipped_steps": last("skipped_steps"),
      **self.summary,
    }


def draw(runs: Sequence[Run]) -> Figure:
  """Draws runs in the same panels, each in its own colour.

  Args:
    runs: At least one run; its columns may be empty.

  Returns:
    Panels of loss by step, loss by bytes sent, entropy, rank, bytes per step
    and error, in this order.
  """
  figure = Figure(figsize=(14, 9), layout="constrained")
  figure.get_layout_engine().set(w_pad=0.12, h_pad=0.1)
  (loss, spent, entropy), (rank, wire, error) = figure.subplots(2, 3)
  columns = [run.columns for run in runs]
  # The ratio covers all steps so far, so this is exact on every line.
  sent = [
    c["dense_bytes"] * c["step"] / c["compression_ratio"] for c in columns
  ]
  scale, unit = _byte_unit(max(np.nanmax(s, initial=0) for s in sent))
  top = max(np.nanmax(c["rank"], initial=0.5) for c in columns)
  losses = set()
  for i, c in enumerate(columns):
    color, steps, dense = _COLORS[i % len(_COLORS)], c["step"], runs[i].is_dense
    _curves(loss, steps, c["loss"], color, linewidth=0.6, alpha=0.6)
    _curves(loss, steps, c["val_loss"], color, marker="o")
    # A single evaluation is not a curve.
    is_curve = np.isfinite(c["val_loss"]).sum() > 1
    known = c["val_loss"] if is_curve else c["loss"]
    _curves(spent, sent[i] / scale, known, color)
    if np.isfinite(known).any():
      losses.add("held-out" if is_curve else "training")
    _curves(entropy, steps, c["entropy"], color, linewidth=0.9)
    # Dense is not a rank of zero, so it is drawn in a band above all ranks,
    # at a different height for each run.
    height = top * (1.08 + 0.16 * (i + 1) / (len(runs) + 1))
    shown = np.where(dense, height, c["rank"])
    shown[shown == 0] = np.nan
    _curves(rank, steps, shown, color, drawstyle="steps-post")
    total = c["wire_bytes"].sum(axis=1, keepdims=True)
    _curves(wire, steps, total, color, drawstyle="steps-post")
    if c["wire_bytes"].shape[1] > 1:
      _curves(
        wire, steps, c["wire_bytes"], color, drawstyle="steps-post",
        linestyle=":", marker="",
      )  # fmt: skip
    measured = np.where(dense, np.nan, c["relative_error"])
    _curves(error, steps, measured, color, gaps=True, linewidth=0.8, alpha=0.5)
    # Zero means that nothing was predicted.
    unknown = dense | (c["predicted_error"] == 0)
    predicted = np.where(unknown, np.nan, c["predicted_error"])
    _curves(error, steps, predicted, color, gaps=True, linestyle="--", zorder=3)

  absent = "not measured by this reducer"
  stages = max(c["wire_bytes"].shape[1] for c in columns)
  dotted = ", stages dotted" if stages > 1 else ""
  loss_name = " or ".join(sorted(losses)) or "held-out"
  panels = (
    (loss, "Loss: training (thin), held-out (points)", "loss (nats)", ""),
    (spent, "Loss by bytes sent", f"{loss_name} loss (nats)", ""),
    (entropy, "Entropy of the gradient", "entropy (nats)", absent),
    (rank, "Rank", "rank", absent),
    (wire, f"Bytes per step, dense dashed{dotted}", "sent per replica",
     absent),
    (error, "Error: measured, predicted dashed", "energy lost (fraction)",
     "nothing was compressed"),
  )  # fmt: skip
  for axes, title, y_label, reason in panels:
    axes.set_title(title, loc="left", fontsize=11, fontweight="bold")
    axes.set(xlabel="step", ylabel=y_label)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color="#dddddd", linewidth=0.6)
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=axes is not spent))
    axes.set_xlim(0, (axes if axes is spent else loss).get_xlim()[1])
    if not axes.lines:
      axes.set(xticks=[], yticks=[])
      reason = reason if loss.lines else "nothing logged yet"
      center = {"transform": axes.transAxes, "ha": "center", "va": "center"}
      axes.text(0.5, 0.5, reason, color="#666666", **center)
  spent.set_xlabel(f"sent so far ({unit} per replica)")
  if rank.lines:
    _dress_rank(rank, top, any(run.is_dense.any() for run in runs))
  if wire.lines:
    _dress_wire(wire, {d for c in columns for d in c["dense_bytes"][-1:, 0]})
  if error.lines:
    error.set_ylim(0, error.get_ylim()[1] * 1.02)
  _add_legend(figure, runs)
  return figure


def downsample(values: np.ndarray, limit: int = 2000) -> np.ndarray:
  """Selects the points of a curve to draw.

  Args:
    values: [points], NaN for a gap.
    limit: The maximum number of points to keep, at least 4.

  Returns:
    Increasing indices: both ends, and the minimum and maximum of each of equal
    intervals, so that no spike is lost.
  """
  if len(values) <= limit:
    return np.arange(len(values))
  kept = [0, len(values) - 1]
  for part in np.array_split(np.arange(len(values)), limit // 2 - 1):
    kept += [part[values[part].argmin()], part[values[part].argmax()]]
  return np.unique(kept)


def human_bytes(count: float) -> str:
  """Formats bytes, such as "2.5 MB"; a kB is 1000 B."""
  scale, unit = _byte_unit(count)
  return f"{count / scale:.3g} {unit}"


def _add_legend(figure: Figure, runs: Sequence[Run]) -> None:
  """Adds each run's colour, and the shades of the first and last stage."""
  labels = [run.label for run in runs]
  colors = [_COLORS[i % len(_COLORS)] for i in range(len(runs))]
  # About 180 letters fit across; the line next to a label takes up to ten.
  fitting = 180 // (max(map(len, labels)) + 10)
  stages = max(run.columns["wire_bytes"].shape[1] for run in runs)
  for stage in sorted({0, stages - 1}) if stages > 1 else ():
    labels.append(f"stage {stage}")
    colors.append(_shade("#000000", stage, stages))
  handles = [Line2D([], [], color=color, linewidth=3) for color in colors]
  place = {"loc": "outside upper left", "frameon": False}
  place["ncols"] = min(max(fitting, 1), 4)
  for text in figure.legend(handles, labels, **place).get_texts():
    text.set_parse_math(False)  # A folder's name may hold a dollar sign.


def _dress_rank(axes: Axes, top: float, dense: bool) -> None:
  ticks = MaxNLocator(5, integer=True).tick_values(0, top)
  ticks = [tick for tick in ticks if 1 <= tick <= top]
  labels = [f"{tick:.0f}" for tick in ticks]
  if dense:
    axes.axhspan(top * 1.08, top * 1.24, color="#eeeeee", zorder=0)
    ticks, labels = [*ticks, top * 1.16], [*labels, "dense"]
  axes.set_yticks(ticks, labels)
  axes.set_ylim(0, top * (1.24 if dense else 1.05))


def _dress_wire(axes: Axes, dense: set[float]) -> None:
  drawn = [line.get_ydata() for line in axes.lines]
  values = np.concatenate([*drawn, [*dense]])
  values = values[values > 0]
  for count in dense:
    axes.axhline(count, color="#444444", linestyle="--", linewidth=1)
  axes.set_yscale("log")
  # With room on both sides, at least one of 1, 2, 5 gets a tick.
  axes.set_ylim(values.min() / 2, values.max() * 2)
  axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
  axes.yaxis.set_major_formatter(lambda value, _: human_bytes(value))
  axes.yaxis.set_minor_locator(NullLocator())


def _shade(color: str, stage: int, stages: int) -> np.ndarray:
  """Returns `color` for stage 0, and a lighter shade for each later stage."""
  light = 0.65 * stage / max(stages - 1, 1)
  return (1 - light) * np.array(to_rgb(color)) + light


def _curves(
  axes: Axes,
  x: np.ndarray,
  y: np.ndarray,
  color: str,
  gaps: bool = False,
  **style: Any,
) -> None:
  """Draws every stage of y [lines, stages] over x [lines, 1].

  Without `gaps` a curve continues across lines that have no value.
  """
  stages = y.shape[1]
  for stage in range(stages):
    known = np.isfinite(y[:, stage])
    if not known.any():
      continue
    lines = np.flatnonzero(known | gaps)
    lines = lines[downsample(y[lines, stage])]
    shade = _shade(color, stage, stages)
    # Later stages are thinner, so that equal curves all show.
    own = {"linewidth": 1.8 - stage / stages, "markersize": 3}
    own["marker"] = "o" if len(lines) < 20 else ""
    axes.plot(x[lines, 0], y[lines, stage], color=shade, **(own | style))


def _byte_unit(count: float) -> tuple[float, str]:
  power = 0
  while power < 4 and count / 1000**power >= 999.5:
    power += 1
  return 1000.0**power, ("B", "kB", "MB", "GB", "TB")[power]
