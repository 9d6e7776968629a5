"""Ablations of edgc: changes one setting at a time, at one budget of bytes.

The budget is about 9 times fewer bytes than dense. Each table changes one
setting of the row "EDGC"; the table's title gives the value there. Each row is
compared with a fixed rank of nearly the same bytes, so that a setting does not
look better because it sends more. That rank is rounded to half ranks, which is
within a quarter of a rank, so that rows can share its run. Aligning stages
needs a pipeline: see alignment.py. Runs have half the steps of gpt2_tiny;
about 28 runs per seed.
"""

from collections.abc import Mapping
from typing import Any

CONFIG = "configs/gpt2_tiny.py"
SETTINGS = {
  "steps": 200, "evaluation.every": 0, "evaluation.batches": 64,
  "checkpoint.every": 0,
}  # fmt: skip
GRID = 0.5


def _edgc(**options: Any) -> Mapping[str, Any]:
  """Returns row "EDGC", with options; a window samples at least one step."""
  base = {
    "rank_max": 20, "rank_min": 14, "window": 10, "warmup_steps": 20,
    "rank_multiple": 1, "max_rank_step": 2,
    "warmup_rank": "max", "max_warmup_steps": 20,
    "sampling.step_rate": 1.0, "sampling.entry_rate": 0.05,
  }  # fmt: skip
  settings = {**base, **options}
  return {"reducer": "edgc"} | {f"edgc.{k}": v for k, v in settings.items()}


def _powersgd(rank: int, **options: Any) -> Mapping[str, Any]:
  """Returns settings of a fixed rank that sends nearly as much as "EDGC"."""
  settings = {"rank": rank, "window": 10, **options}
  reducer = {"reducer": "powersgd"}
  return reducer | {f"powersgd.{k}": v for k, v in settings.items()}


# From 20 to 14 in steps of 2 the step limit decides: all rules fall equally
# fast. This range and limit leave the decision to the rule.
_WIDE = {"rank_max": 32, "rank_min": 8, "max_rank_step": 24}


def _rows(key: str, *values: Any) -> Mapping[str, Mapping[str, Any]]:
  name = key.split(".")[-1]
  return {f"EDGC, {name} {value}": _edgc(**{key: value}) for value in values}


TABLES = {
  "Dense": {"all-reduce": {"reducer": "allreduce"}},
  "As in the comparison of methods": {"EDGC": _edgc()},
  "Window (10), steps": _rows("window", 5, 20),
  "Share of steps sampled (1)": _rows("sampling.step_rate", 0.1),
  "Share of entries read (0.05)": _rows("sampling.entry_rate", 0.01, 1.0),
  "Estimator (gaussian)": _rows("sampling.estimator", "histogram"),
  "Rule (cqm) and its exponent (2), when they decide alone": {
    "EDGC, 8 to 32": _edgc(**_WIDE),
    "EDGC, 8 to 32, rule linear": _edgc(**_WIDE, rule="linear"),
    "EDGC, 8 to 32, exponent 1": _edgc(**_WIDE, exponent=1.0),
    "EDGC, 8 to 32, exponent 4": _edgc(**_WIDE, exponent=4.0),
  },
  "Largest step of the rank (2)": _rows("max_rank_step", 6),
  # The budget sets the rank of a step. The allocation shares it out.
  "Budget (by entropy) and allocation (error)": {
    "fixed rank 15, uniform": _powersgd(15, allocation="uniform"),
    "fixed rank 15, by error": _powersgd(15, allocation="error"),
    "EDGC, allocation uniform": _edgc(allocation="uniform"),
    "EDGC": _edgc(),
  },
  "Warm-up (max)": _rows("warmup_rank", "dense"),
}
