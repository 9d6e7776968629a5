"""Does a rank that follows entropy beat a fixed one, if the run is long?

The described method and the public codes' linear rule, as published: dense for
a tenth of the run, then one rank for all matrices, float32 factors, a floor of
a quarter of the largest rank. Our `edgc`; a rank that rises as the entropy
falls, as a control; each beside a fixed rank of the same bytes. And six
schedules that fall or rise over the run, evenly, most of it first or most of it
last, with the mean of the fixed rank. Their best shows how much a schedule of
bytes over time can matter; it follows the learning rate if it falls evenly.

  make horizon
"""

from collections.abc import Mapping
from typing import Any

from configs.protocol import table

CONFIG = "configs/paper/horizon_gpt.py"
SEEDS = (0, 1, 2)

TUNING = {
  "key": "optimizer.lr",
  "start": (4e-3, 8e-3),
  "factor": 2,
  "seed": 100,
  "tolerance": 0.02,
  "settings": {
    "steps": 2500, "evaluation.every": 0, "powersgd.window": 25,
    "edgc.window": 25, "edgc.warmup_steps": 250,
    "edgc.max_warmup_steps": 250,
  },
}  # fmt: skip


def as_published(rule: str) -> Mapping[str, Any]:
  return {
    "reducer": "edgc", "edgc.rule": rule, "edgc.rank_max": 16,
    "edgc.rank_min": 4, "edgc.rank_multiple": 1, "edgc.max_rank_step": 4,
    "edgc.warmup_rank": "dense", "edgc.allocation": "uniform",
    "edgc.min_ratio": 1.0, "edgc.sampling.estimator": "histogram",
    "edgc.wire_dtype": "float32",
  }  # fmt: skip


def _ours(rule: str) -> Mapping[str, Any]:
  return {
    "reducer": "edgc", "edgc.rule": rule, "edgc.rank_max": 32,
    "edgc.rank_min": 8, "edgc.rank_multiple": 2, "edgc.max_rank_step": 4,
    "edgc.wire_dtype": "int4", "edgc.min_ratio": 1.0,
  }  # fmt: skip


def _moving(first: float, last: int, exponent: float) -> Mapping[str, Any]:
  return {
    **table.powersgd(first, "int4", "error"),
    "powersgd.final_rank": last, "powersgd.final_exponent": exponent,
  }  # fmt: skip


TABLES = {
  "Every entry": {"dense": {"reducer": "allreduce"}},
  "As published, float32": {
    "fixed 8, float32, uniform": table.powersgd(8.0, "float32", "uniform"),
    "as described, 16 to 4": as_published("cqm"),
    "linear rule, 16 to 4": as_published("linear"),
  },
  "In 4 bits, by error": {
    "fixed 22, int4, error": table.powersgd(22.0, "int4", "error"),
    "edgc 32 to 8, int4": _ours("cqm"),
    "reverse rule, 8 to 32, int4": _ours("reverse"),
  },
  # Of eight parts of the run, whose ranks have a mean of 22.
  "Moved over time, in 4 bits, by error": {
    "32 to 12": _moving(32.0, 12, 1.0),
    "12 to 32": _moving(12.0, 32, 1.0),
    "39 to 16, most of it first": _moving(39.0, 16, 0.25),
    "27 to 6, most of it last": _moving(27.0, 6, 4.0),
    "17 to 38, most of it last": _moving(17.0, 38, 4.0),
    "5 to 28, most of it first": _moving(5.0, 28, 0.25),
  },
}
MATCHED = {
  "as described, 16 to 4": "fixed 8, float32, uniform",
  "linear rule, 16 to 4": "fixed 8, float32, uniform",
  "edgc 32 to 8, int4": "fixed 22, int4, error",
  "reverse rule, 8 to 32, int4": "fixed 22, int4, error",
}
