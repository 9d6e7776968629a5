"""Allocates a fixed number of bytes over time and over matrices.

There are two numbers, about 6 and 12 times fewer bytes than dense over the
whole run. The budget divides them over time: a fixed rank, a schedule of ranks,
or a rank that follows entropy. The allocation shares each step's bytes among
matrices: uniform ranks, or ranks by error. Every row is compressed from the
first step; most are also run with a dense warm-up of 20 of the 400 steps, as
published, and lower ranks afterwards to send the same total. 63 runs; four
hours on 2 cores.
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
  rank_max: int, rank_min: int, allocation: str, dense_warmup: bool = False
) -> Mapping[str, Any]:
  """Returns settings of edgc between two ranks, with an allocation."""
  settings = {
    "rank_max": rank_max, "rank_min": rank_min, "rank_multiple": 1,
    "warmup_rank": "dense" if dense_warmup else "max",
    "max_warmup_steps": 20,
    "allocation": allocation,
  }  # fmt: skip
  return {"reducer": "edgc"} | {f"edgc.{k}": v for k, v in settings.items()}


def _powersgd(rank: int, warmup_steps: int = 0, **options: Any) -> Mapping:
  settings = {"rank": rank, "warmup_steps": warmup_steps, "window": 10}
  settings |= options
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
  return {
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
    f"{ratio} times: rule": _edgc(*published, "uniform"),
    f"{dense}: rule (as published)": _edgc(
      *published_after_dense, "uniform", dense_warmup=True
    ),
    f"{ratio} times: fixed rank {rank}, by error": _powersgd(
      rank, allocation="error"
    ),
    f"{dense}: fixed rank {rank_after_dense}, by error": _powersgd(
      rank_after_dense, warmup_steps=20, allocation="error"
    ),
    f"{ratio} times: rule, by error": _edgc(*published, "error"),
    f"{dense}: rule, by error": _edgc(
      *published_after_dense, "error", dense_warmup=True
    ),
  }


TABLES = {
  "Dense": {"all-reduce": {"reducer": "allreduce"}},
  "About 6 times less than dense": _table(
    6, 23, 17, (32, 22), (23, 16), (35, 11)
  ),
  "About 12 times less than dense": _table(
    12, 11, 4, (16, 10), (6, 4), (17, 5)
  ),
}
