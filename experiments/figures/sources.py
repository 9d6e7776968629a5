"""Collects the numbers of each figure from the folders of recorded runs."""

import json
import pathlib
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from edgc_jax.budget.entropy import ESTIMATORS
from experiments.benchmarks.measurements import ENTRY_RATES, FULL_PASS, PERIODS
from experiments.figures.numbers import (
  cost_ratios,
  gaussian_error,
  histogram,
  model_error,
  sampling_error,
  svd_error,
  window_means,
)

FALL = 0.1  # nats; an example of a fall of the entropy
_DRAWS = 3  # Gaussian matrices per shape
_SHOWN = ("blocks.attention_out.kernel", "blocks.attention_in.kernel",
          "blocks.mlp_in.kernel", "embedding")  # fmt: skip


class RecordedRun(NamedTuple):
  """The contents of a run folder that `record_run.py` wrote."""

  config: Mapping[str, Any]
  summary: Mapping[str, Any]
  lines: list[Mapping[str, Any]]  # of metrics.jsonl
  gradients: Mapping[int, Mapping[str, np.ndarray]]  # by step, by name
  entropies: Mapping[str, Mapping[str, float]]  # by step, by estimate
  costs: Mapping[str, list[float]]  # seconds by estimate

  def column(self, name: str) -> np.ndarray:
    """Returns a metric of the only stage, [lines]."""
    return np.array([np.ravel(line[name])[0] for line in self.lines])


def read_run(folder: pathlib.Path) -> RecordedRun:
  """Reads a finished run.

  Args:
    folder: The run's folder.

  Raises:
    FileNotFoundError: if the run is not finished.
  """

  def read(name: str, needed: bool = True) -> Any:
    file = folder / name
    return json.loads(file.read_text()) if needed or file.exists() else {}

  gradients = {
    int(re.findall(r"\d+", file.stem)[0]): np.load(file)
    for file in folder.glob("gradients-*.npz")
  }
  return RecordedRun(
    read("config.json"),
    read("summary.json"),
    list(map(json.loads, (folder / "metrics.jsonl").open())),
    dict(sorted(gradients.items())),
    read("entropies.json", needed=False),
    read("costs.json", needed=False),
  )


def collect(runs: Mapping[str, RecordedRun]) -> dict[str, dict[str, Any]]:
  """Returns the numbers of every figure, by its name.

  Args:
    runs: The runs gpt2-cqm, bert-cqm and gpt2-linear, by name.

  Returns:
    Values that JSON can hold.
  """
  gpt2, bert = runs["gpt2-cqm"], runs["bert-cqm"]
  models = {"GPT": gpt2, "BERT": bert}
  rules = {"cqm": gpt2, "linear": runs["gpt2-linear"]}
  return {
    "entropy": {name: _entropy(run) for name, run in models.items()},
    "histograms": {name: _histograms(run) for name, run in models.items()},
    "errors": _errors(gpt2),
    "ranks": {name: _ranks(run) for name, run in rules.items()},
    "sampling": _sampling(gpt2),
  }


def rounded(value: Any) -> Any:
  """Rounds every number in `value` to five significant digits."""
  if isinstance(value, Mapping):
    return {str(key): rounded(each) for key, each in value.items()}
  if isinstance(value, list | tuple | np.ndarray):
    return [rounded(each) for each in value]
  if isinstance(value, float):
    return float(f"{value:.5g}")
  return value.item() if isinstance(value, np.generic) else value


def _entropy(run: RecordedRun) -> dict[str, Any]:
  steps, entropy = run.column("step"), run.column("entropy")
  middles, means = window_means(steps, entropy, run.config["edgc"]["window"])
  return {
    "step": steps.tolist(),
    "entropy": entropy.tolist(),
    "window_middle": middles.tolist(),
    "window_mean": means.tolist(),
    "rank": run.column("rank").tolist(),
    "val_loss": run.summary["val_loss"],
  }


def _histograms(run: RecordedRun) -> dict[int, Any]:
  """Returns histograms of the first replica's gradient, by step."""
  return {
    step: histogram(
      np.concatenate(
        [arrays[n].ravel() for n in arrays if n.startswith("local ")]
      )
    )
    for step, arrays in run.gradients.items()
  }


def _errors(run: RecordedRun) -> dict[str, Any]:
  """Returns g(r) by matrix: of the model, Gaussian draws and gradients."""
  last = max(run.gradients)
  early = sorted(run.gradients)[min(1, len(run.gradients) - 1)]
  found = {}
  for name in _SHOWN:
    shape = run.gradients[last][f"mean {name}"].shape
    real = []
    for kind in ("local", "mean"):
      for step in sorted({early, last}):
        stack = run.gradients[step][f"{kind} {name}"].reshape(-1, *shape[-2:])
        errors = svd_error(stack).mean(axis=0).tolist()
        real.append({"kind": kind, "step": step, "errors": errors})
    found[name] = {
      "shape": list(shape[-2:]),
      "matrices": int(np.prod(shape[:-2])),
      "model": model_error(*shape[-2:]).tolist(),
      "gaussian": gaussian_error(*shape[-2:], _DRAWS).mean(axis=0).tolist(),
      "real": real,
    }
  return {
    "rank_max": run.config["edgc"]["rank_max"],
    "draws": _DRAWS,
    "matrices": found,
  }


def _ranks(run: RecordedRun) -> dict[str, Any]:
  window = run.config["edgc"]["window"]
  ends = run.column("step") % window == 0
  _, means = window_means(run.column("step"), run.column("entropy"), window)
  return {
    "window": (run.column("step")[ends] // window).tolist(),
    "rank": run.column("rank")[ends].tolist(),
    "entropy": means[: ends.sum()].tolist(),
    "rank_min": run.config["edgc"]["rank_min"],
    "rank_max": run.config["edgc"]["rank_max"],
    "max_rank_step": run.config["edgc"]["max_rank_step"],
    "val_loss": run.summary["val_loss"],
    "compression_ratio": run.summary["compression_ratio"],
  }


def _sampling(run: RecordedRun) -> dict[str, Any]:
  edgc, steps = run.config["edgc"], sorted(map(int, run.entropies))

  def column(name: str) -> np.ndarray:
    return np.array([run.entropies[str(step)][name] for step in steps])

  full = {estimator: column(f"{estimator} 1.0") for estimator in ESTIMATORS}
  errors = {
    estimator: {
      str(1 / period): [
        sampling_error(
          full[estimator]
          if rate == 1.0
          else column(f"{estimator} {rate} every {period}"),
          full[estimator],
          edgc["window"],
          period,
        )
        for rate in ENTRY_RATES
      ]
      for period in PERIODS
    }
    for estimator in ESTIMATORS
  }
  ratios = cost_ratios(run.costs, FULL_PASS)
  costs = {
    estimator: [ratios[f"{estimator} {rate}"] for rate in ENTRY_RATES]
    for estimator in ESTIMATORS
  }
  model = model_error(
    run.config["model"]["width"], 4 * run.config["model"]["width"]
  )
  top, step = edgc["rank_max"], edgc["rank_multiple"]
  return {
    "first_step": steps[0],
    "last_step": steps[-1],
    "window": edgc["window"],
    "entry_rates": list(ENTRY_RATES),
    "errors": errors,
    "cost": costs,
    "pass_seconds": float(np.median(run.costs[FULL_PASS])),
    "rounds": len(run.costs[FULL_PASS]),
    "gap": float(np.mean(full["histogram"] - full["gaussian"])),
    # Entropy that one step of the rank is worth, for the largest matrices.
    "rank_step": step,
    "rank_step_nats": float(np.log(model[top - step] / model[top])),
  }
