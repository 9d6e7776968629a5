"""Heat maps of ranks, entropies and errors of every matrix over a run."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

_KEYS = (
  "matrix_rank", "matrix_entropy", "matrix_error", "matrix_predicted_error",
)  # fmt: skip
_MOST_COLUMNS = 400  # logged lines in a heat map; at most twice as many
_MOST_LABELS = 60


class Matrices:
  """The metrics of each matrix by logged step, thinned out in long runs."""

  def __init__(self) -> None:
    """Starts without lines; `add` them in order."""
    self._kept: list[Mapping[str, Any]] = []
    self._seen, self._stride = 0, 1

  def add(self, record: Mapping[str, Any]) -> None:
    """Adds a line of metrics.jsonl, if it has metrics of matrices."""
    if not record.get("matrix_rank"):
      return
    if self._seen % self._stride == 0:
      self._kept.append({key: record.get(key) for key in ("step", *_KEYS)})
    self._seen += 1
    if len(self._kept) == 2 * _MOST_COLUMNS:
      self._kept, self._stride = self._kept[::2], 2 * self._stride

  @functools.cached_property
  def _keys(self) -> list[tuple[str, int, int]]:
    keys = (key for r in self._kept for key in _flat(r["matrix_rank"]))
    return list(dict.fromkeys(keys))

  @property
  def names(self) -> list[str]:
    """Names of the K matrices: stage, path and index in the stack."""
    return [_name(key, self._keys) for key in self._keys]

  @property
  def steps(self) -> np.ndarray:
    """Steps of the lines, float64 [lines]."""
    return np.array([record["step"] for record in self._kept], float)

  def values(self, key: str) -> np.ndarray:
    """Returns the metric `key`, float64 [lines, K]; NaN if not measured."""
    flat = [_flat(record[key] or {}) for record in self._kept]
    rows = [[row.get(key, np.nan) for key in self._keys] for row in flat]
    return np.array(rows, float).reshape(-1, len(self._keys))


def draw(matrices: Matrices, title: str) -> Figure | None:
  """Draws heat maps over matrices and steps, and measured against predicted.

  Args:
    matrices: The metrics of one run.
    title: The run's name.

  Returns:
    Panels of rank, entropy, error, and measured against predicted error; None
    if the run has no metrics of matrices.
  """
  count = len(matrices.names)
  if not count:
    return None
  height = 2.5 + 2 * min(max(0.19 * count, 2.2), 12)
  figure = Figure(figsize=(14, height), layout="constrained")
  figure.suptitle(title, x=0.01, ha="left", parse_math=False)
  (rank, entropy), (error, against) = figure.subplots(2, 2)
  values = {key: matrices.values(key) for key in _KEYS}
  is_low = values["matrix_rank"] > 0
  _heat_map(rank, matrices, np.where(is_low, values["matrix_rank"], np.nan),
            "Rank (white: dense)", "rank")  # fmt: skip
  _heat_map(entropy, matrices, values["matrix_entropy"], "Entropy", "nats")
  _heat_map(error, matrices, np.where(is_low, values["matrix_error"], np.nan),
            "Energy lost", "fraction of gradient and residual")  # fmt: skip
  _errors(against, values, is_low)
  return figure


def _heat_map(
  axes: Axes, matrices: Matrices, values: np.ndarray, title: str, unit: str
) -> None:
  axes.set_title(title, loc="left", fontsize=11, fontweight="bold")
  if not np.isfinite(values).any():
    _write(axes, "not measured")
    return
  steps = matrices.steps
  # A logged line covers the steps since the previous line.
  edges = np.concatenate([[min(0.0, steps[0] - 1)], steps])
  rows = np.arange(len(matrices.names) + 1) - 0.5
  image = axes.pcolormesh(edges, rows, values.T, cmap="viridis")
  bar = axes.figure.colorbar(image, ax=axes, pad=0.01)
  bar.set_label(unit)
  every = -(-len(matrices.names) // _MOST_LABELS)
  shown = range(0, len(matrices.names), every)
  axes.set_yticks(shown, [matrices.names[i] for i in shown], fontsize=7)
  for label in axes.get_yticklabels():
    label.set_parse_math(False)
  axes.invert_yaxis()
  axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
  axes.set_xlabel("step")


def _errors(
  axes: Axes, values: Mapping[str, np.ndarray], is_low: np.ndarray
) -> None:
  """Draws a point per matrix: means over the last quarter of the run."""
  axes.set_title(
    "Error by matrix, last quarter of the run", loc="left", fontsize=11,
    fontweight="bold",
  )  # fmt: skip
  last = slice(3 * len(is_low) // 4, None)
  pairs = np.stack(
    [values["matrix_predicted_error"][last], values["matrix_error"][last]]
  )
  known = is_low[last] & np.isfinite(pairs).all(axis=0) & (pairs[0] > 0)
  if not known.any():
    _write(axes, "nothing was predicted")
    return
  counts = np.maximum(known.sum(axis=0), 1)
  means = np.where(known, pairs, 0.0).sum(axis=1) / counts
  means = means[:, known.any(axis=0)]
  top = min(1.0, 1.2 * means.max())
  axes.plot([0, top], [0, top], color="#999999", linewidth=1)
  axes.text(
    0.03 * top, 0.97 * top, "line: as predicted", color="#666666", va="top"
  )
  axes.plot(*means, "o", color="#0072b2", markersize=5, alpha=0.7)
  axes.set(
    xlim=(0, top), ylim=(0, top), xlabel="predicted (fraction of energy lost)",
    ylabel="measured",
  )  # fmt: skip
  axes.spines[["top", "right"]].set_visible(False)
  axes.grid(color="#dddddd", linewidth=0.6)


def _write(axes: Axes, text: str) -> None:
  """Writes `text` in the middle of an empty panel."""
  axes.set(xticks=[], yticks=[])
  axes.text(
    0.5, 0.5, text, color="#666666", ha="center", va="center",
    transform=axes.transAxes,
  )  # fmt: skip


def _flat(by_path: Mapping[str, Any]) -> dict[tuple[str, int, int], float]:
  """Returns {(path, stage, index): number} of {path: [stages][indices]}."""
  return {
    (path, stage, index): number
    for path, stages in by_path.items()
    for stage, numbers in enumerate(stages)
    for index, number in enumerate(numbers)
  }


def _name(key: tuple[str, int, int], keys: Sequence[tuple]) -> str:
  path, stage, index = key
  is_stack = any(other[0] == path and other[2] for other in keys)
  is_staged = any(other[1] for other in keys)
  return (
    (f"stage {stage} " if is_staged else "")
    + path.removesuffix("/kernel")
    + (f" {index}" if is_stack else "")
  )
