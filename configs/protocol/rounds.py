"""From 2 to 0.03 bits: few bits, low rank, and rare exchanges.

Every arm with local steps chooses its outer rule, too. About 60 hours of a
core, of which a fifth tune:

  python experiments/lab/run_study.py --study=configs/protocol/rounds.py
"""

from collections.abc import Mapping
from typing import Any

from configs.protocol import table

CONFIG = table.CONFIG
SEEDS = table.SEEDS
MORE = table.MORE
BEST = 2

_LONG = 16  # steps of a round from which the tuning keeps the number of rounds


_EVERY_ENTRY = table.TABLES["Every entry"]
_DENSE = _EVERY_ENTRY["dense"]
_SPARSE_LOCO = {
  "reducer": "topk", "topk.density": 1 / 64, "topk.chunk": 4096,
  "topk.bits": 2, "topk.residual_decay": 0.95,
}  # fmt: skip
# With 12 bits an index and vectors in float32: 0.73 bits an exchange.
_AS_PUBLISHED = {"reducer": "sparse_loco"}
_DEMO = {"reducer": "demo", "optimizer.name": "sign"}


def quantize(bits: int) -> Mapping[str, Any]:
  return {**_EVERY_ENTRY["quantize, 4 bits"], "quantize.bits": bits}


def _powersgd(rank: float) -> Mapping[str, Any]:
  own = table.TABLES["About 1 bit"]["powersgd 21.8, int4, error"]
  return {**own, "powersgd.rank": rank}


def rare(every: int, exchange: Mapping[str, Any]) -> Mapping[str, Any]:
  return {**exchange, "local.every": every}


def shorter_rounds(
  tables: Mapping[str, Mapping[str, Mapping[str, Any]]],
) -> Mapping[str, Mapping[str, Any]]:
  """Returns the tuning's settings of arms with long rounds.

  In a quarter of the steps their rounds are shorter, so that there are as many
  of them.
  """
  return {
    arm: {"local.every": own["local.every"] // 4}
    for arms in tables.values()
    for arm, own in arms.items()
    if own.get("local.every", 0) >= _LONG
  }


# One exchange takes 4.06, 2.08 and 1.09 bits in 4, 2 and 1 bits an entry, and
# 0.38 with SparseLoCo on 4 replicas, which is `topk` in chunks and 2 bits. Runs
# of the first version took 4.31, 2.30 and 1.30, since vectors were dense.
TABLES = {
  "Baselines": {
    "dense": _DENSE,
    "dense, lookahead every 10": {
      **rare(10, _DENSE), "local.lookahead": True, "local.lr": 0.7,
      "local.momentum": 0.9,
    },
    "dense, every 64": rare(64, _DENSE),
  },
  "About 2 bits": {
    "quantize, 2 bits": quantize(2),
    "quantize, 4 bits, every 2": rare(2, quantize(4)),
    "dense, every 16": rare(16, _DENSE),
  },
  "About 1 bit": {
    "quantize, 1 bit": quantize(1),
    "quantize, 2 bits, every 2": rare(2, quantize(2)),
    "quantize, 4 bits, every 4": rare(4, quantize(4)),
    "dense, every 32": rare(32, _DENSE),
    "SparseLoCo as published, every 1": rare(1, _AS_PUBLISHED),
  },
  "About 0.4 bits": {
    "powersgd 8.1, int4, error": _powersgd(8.1),
    "quantize, 2 bits, every 6": rare(6, quantize(2)),
    "quantize, 4 bits, every 10": rare(10, quantize(4)),
    "dense, every 80": rare(80, _DENSE),
    "SparseLoCo, every 1": rare(1, _SPARSE_LOCO),
    "SparseLoCo as published, every 2": rare(2, _AS_PUBLISHED),
    "DeMo": {**_DEMO, "demo.count": 8},
  },
  "About 0.2 bits": {
    "powersgd 3.5, int4, error": _powersgd(3.5),
    "quantize, 2 bits, every 12": rare(12, quantize(2)),
    "quantize, 4 bits, every 20": rare(20, quantize(4)),
    "dense, every 160": rare(160, _DENSE),
    "SparseLoCo, every 2": rare(2, _SPARSE_LOCO),
    "SparseLoCo as published, every 4": rare(4, _AS_PUBLISHED),
    "powersgd 44.6, int4, error, every 10": rare(10, _powersgd(44.6)),
  },
  "About 0.1 bits": {
    "SparseLoCo, every 4": rare(4, _SPARSE_LOCO),
  },
  "About 0.03 bits": {
    "quantize, 1 bit, every 40": rare(40, quantize(1)),
    "quantize, 2 bits, every 64": rare(64, quantize(2)),
    "SparseLoCo, every 24": rare(24, _SPARSE_LOCO),
    "SparseLoCo as published, every 24": rare(24, _AS_PUBLISHED),
  },
}  # fmt: skip
_ARMS = {arm: own for each in TABLES.values() for arm, own in each.items()}

# Outer rules. Own settings average without momentum, as SparseLoCo does. The
# second one is DiLoCo's.
_RULES = [
  {"local.lr": 0.7, "local.momentum": 0.9},
  {"local.lr": 1.0, "local.momentum": 0.5},
  {"local.lr": 1.0, "local.momentum": 0.8},
]
ALTERNATIVES = {
  arm: _RULES
  for arm, own in _ARMS.items()
  if "local.every" in own and "local.lookahead" not in own
} | {
  "dense, lookahead every 10": [
    {"local.lr": 1.0, "local.momentum": 0.5},
    {"local.lr": 0.5, "local.momentum": 0.0},
  ]
}

TUNING = {**table.TUNING, "arms": shorter_rounds(TABLES)}
