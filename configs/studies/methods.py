"""The main comparison: low-rank, sparse and low-precision compression.

Each method has one or two budgets of bytes; the baselines are dense
all-reduces in float32 and bfloat16. Each row of edgc is compared with a fixed
rank that sends the same bytes. 54 runs with three seeds; two and a half hours
on 2 cores.
"""

from collections.abc import Mapping
from typing import Any

CONFIG = "configs/gpt2_tiny.py"
# Differences are small, so evaluate on 131,072 held-out tokens, at the end.
SETTINGS = {
  "evaluation.every": 0, "evaluation.batches": 64, "checkpoint.every": 0,
}  # fmt: skip


def _reducer(name: str, **options: Any) -> Mapping[str, Any]:
  return {"reducer": name} | {f"{name}.{k}": v for k, v in options.items()}


def _edgc(rank_max: int, rank_min: int, **options: Any) -> Mapping[str, Any]:
  """Returns settings of edgc between two ranks, without a dense warm-up."""
  base = {
    "rank_max": rank_max, "rank_min": rank_min, "window": 10,
    "warmup_steps": 20, "rank_multiple": 2, "max_rank_step": 2,
    "warmup_rank": "max", "max_warmup_steps": 20,
  }  # fmt: skip
  return _reducer("edgc", **{**base, **options})


TABLES = {
  "Dense": {
    "all-reduce, fp32": _reducer("allreduce"),
    "all-reduce, bf16": _reducer("allreduce", wire_dtype="bfloat16"),
  },
  "Low rank": {
    "PowerSGD, rank 23": _reducer("powersgd", rank=23),
    "PowerSGD, rank 11": _reducer("powersgd", rank=11),
    "PowerSGD, rank 23, bf16": _reducer(
      "powersgd", rank=23, wire_dtype="bfloat16"
    ),
    "EDGC": _edgc(20, 14),
    "EDGC, linear rule": _edgc(20, 14, rule="linear"),
    "EDGC, bf16": _edgc(
      40, 30, wire_dtype="bfloat16", rank_multiple=5, max_rank_step=5
    ),
    "EDGC, bf16, half the rank": _edgc(20, 14, wire_dtype="bfloat16"),
  },
  "Sparse": {
    "top-k, 1 %": _reducer("topk", density=0.01),
    "top-k, 5 %": _reducer("topk", density=0.05),
    "random-k, 5 %": _reducer("randomk", density=0.05),
  },
  "Fewer bits": {
    "8 bits": _reducer("quantize", bits=8),
    "4 bits": _reducer("quantize", bits=4),
  },
}
