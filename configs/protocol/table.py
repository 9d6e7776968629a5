"""The first table of the protocol: every arm at a budget of bits.

Budgets are bits a parameter a step over the whole run. Ranks are those at which
the package predicts these bits for the 445,952 parameters of the model. About
70 hours of a core:

  python experiments/lab/run_study.py --study=configs/protocol/table.py --jobs=2
"""

from collections.abc import Mapping
from typing import Any

CONFIG = "configs/protocol/gpt.py"
SEEDS = (0, 1, 2)
MORE = (3, 4, 5, 6, 7)
BEST = 2

# A quarter of the length; windows in proportion. The warm-up keeps its length,
# because short ones diverge at rates that are best in full runs.
TUNING = {
  "key": "optimizer.lr",
  "start": (8e-3, 16e-3),
  "factor": 2,
  "seed": 100,
  "tolerance": 0.02,  # nats: two standard deviations between seeds
  "settings": {
    "steps": 538, "evaluation.every": 0, "powersgd.window": 12,
    "edgc.window": 12, "edgc.warmup_steps": 25, "edgc.max_warmup_steps": 50,
  },
}  # fmt: skip


def _arm(reducer: str, **options: Any) -> Mapping[str, Any]:
  return {"reducer": reducer} | {
    f"{reducer}.{key}": value for key, value in options.items()
  }


def powersgd(rank: float, wire: str, allocation: str) -> Mapping[str, Any]:
  return _arm(
    "powersgd", rank=rank, wire_dtype=wire, allocation=allocation,
    min_ratio=1.0,
  )  # fmt: skip


def _edgc(most: int, least: int, multiple: int) -> Mapping[str, Any]:
  return _arm(
    "edgc", rank_max=most, rank_min=least, rank_multiple=multiple,
    max_rank_step=2 * multiple, wire_dtype="int4", min_ratio=1.0,
  )  # fmt: skip


# {table: {wire: rank}}, and {table: (rank_max, rank_min, rank_multiple)} of
# edgc.
_RANKS = {
  "About 2 bits": {"bfloat16": 10.2, "int8": 22.2, "int4": 44.6},
  "About 1 bit": {"bfloat16": 4.3, "int8": 10.6, "int4": 21.8},
  "About 0.5 bits": {"bfloat16": 1.36, "int8": 4.83, "int4": 10.4},
}
_FALLING = {
  "About 2 bits": (52, 40, 2),
  "About 1 bit": (26, 20, 1),
  "About 0.5 bits": (12, 9, 1),
}

TABLES = {
  "Every entry": {
    "dense": _arm("allreduce"),
    "dense, bfloat16": _arm("allreduce", wire_dtype="bfloat16"),
    "quantize, 8 bits": _arm("quantize", bits=8, error_feedback=True),
    "quantize, 4 bits": _arm("quantize", bits=4, error_feedback=True),
    "topk, 1 %": _arm("topk", density=0.01),
  },
} | {
  budget: {
    f"powersgd {rank:g}, {wire}, {allocation}": powersgd(rank, wire, allocation)
    for wire, rank in ranks.items()
    for allocation in ("uniform", "error")
  }
  | {
    f"edgc {most} to {least}, int4": _edgc(most, least, multiple)
    for most, least, multiple in [_FALLING[budget]]
  }
  for budget, ranks in _RANKS.items()
}
MATCHED = {
  f"edgc {most} to {least}, int4": f"powersgd {_RANKS[budget]['int4']:g}, int4,"
  " error"
  for budget, (most, least, _) in _FALLING.items()
}
