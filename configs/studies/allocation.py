"""Allocates a fixed budget of bytes over matrices and over time.

There are two budgets, about 6 and 12 times fewer bytes than dense over the
whole run. Every allocation is compressed from the first step; most are also
run with a dense warm-up of 20 of the 400 steps, as published, and lower ranks
afterwards to send the same total. 69 runs; four hours on 2 cores.
"""

from collections.abc import Mapping
from typing import Any

CONFIG = "configs/gpt2_tiny.py"
MATCHED_RANKS = False  # the fixed ranks of equal bytes are rows of this study
# Differences are small, so evaluate on 131,072 held-out tokens, at the end.
SETTINGS = {
  "evaluation.every": 0, "evaluation.batches": 64, "checkpoint.every": 0,
}  # fmt: skip


def _edgc(
  rank_max: int, rank_min: int, dense_warmup: bool, **options: Any
) -> Mapping[str, Any]:
  """Returns settings of edgc between two ranks, with allocation options."""
  settings = {
    "rank_max": rank_max, "rank_min": rank_min, "rule.rank_multiple": 1,
    "rule.warmup_rank": "dense" if dense_warmup else "max",
    "rule.max_warmup_steps": 20,
    **{f"allocation.{k}": v for k, v in options.items()},
  }  # fmt: skip
  return {"reducer": "edgc"} | {f"edgc.{k}": v for k, v in settings.items()}


def _powersgd(rank: int, warmup_steps: int = 0, **options: Any) -> Mapping:
  settings = {"rank": rank, "warmup_steps": warmup_steps, **options}
  reducer = {"reducer": "powersgd"}
  return reducer | {f"powersgd.{k}": v for k, v in settings.items()}


def _table(
  ratio: int,
  rank: int,
  rank_after_dense: int,
  published: tuple[int, int],
  published_after_dense: tuple[int, int],
  schedule: tuple[int, int],
) -> Mapping[str, Mapping[str, Any]]:
  """Returns the rows of one budget; the first is the baseline of the others."""
  high, low = schedule
  dense = f"{ratio} times, dense warm-up"
  rows = {
    f"{ratio} times: fixed rank {rank}": _powersgd(rank),
    f"{dense}: fixed rank {rank_after_dense}": _powersgd(
      rank_after_dense, warmup_steps=20
    ),
    f"{ratio} times: rank falling from {high} to {low}": _powersgd(
      high, final_rank=low
    ),
    f"{ratio} times: rank rising from {low} to {high}": _powersgd(
      low, final_rank=high
    ),
    f"{ratio} times: stage rule": _edgc(*published, False, granularity="stage"),
    f"{dense}: stage rule (as published)": _edgc(
      *published_after_dense, True, granularity="stage"
    ),
  }
  for curves in ("entropy", "calibrated", "energy"):
    rows[f"{ratio} times: {curves} allocation"] = _edgc(
      rank, rank, False, curves=curves
    )
  for curves in ("entropy", "energy"):
    rows[f"{dense}: {curves} allocation"] = _edgc(
      rank_after_dense, rank_after_dense, True, curves=curves
    )
  return rows


TABLES = {
  "Dense": {"all-reduce": {"reducer": "allreduce"}},
  "About 6 times less than dense": _table(
    6, 23, 17, (32, 22), (23, 16), (35, 11)
  ),
  "About 12 times less than dense": _table(
    12, 11, 4, (16, 10), (6, 4), (17, 5)
  ),
}
