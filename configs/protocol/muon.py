"""Muon as the optimiser of kernels, from 32 to 0.03 bits.

Dense, what did best with it in tuning (local steps, whose exchanges take 2 bits
or 1 bit an entry), and the best arms of AdamW at 1 and 0.2 bits. A run takes 15
to 25 minutes of a core:

  python experiments/lab/run_study.py --study=configs/protocol/muon.py --jobs=2
"""

from collections.abc import Mapping
from typing import Any

from configs.protocol import rounds, table

CONFIG = table.CONFIG
SEEDS = table.SEEDS
MORE = table.MORE
BEST = 1


def _muon(exchange: Mapping[str, Any]) -> Mapping[str, Any]:
  return {**exchange, "optimizer.name": "muon"}


def _every(steps: int, bits: int) -> Mapping[str, Any]:
  return _muon(rounds.rare(steps, rounds.quantize(bits)))


TABLES = {
  "Every entry": {"dense": _muon(table.TABLES["Every entry"]["dense"])},
  "About 1 bit": {"quantize, 2 bits, every 2": _every(2, 2)},
  "About 0.4 bits": {"quantize, 2 bits, every 6": _every(6, 2)},
  "About 0.2 bits": {
    "quantize, 1 bit, every 6": _every(6, 1),
    "quantize, 2 bits, every 12": _every(12, 2),
  },
  "About 0.1 bits": {
    "quantize, 1 bit, every 12": _every(12, 1),
    "quantize, 2 bits, every 24": _every(24, 2),
  },
  "About 0.03 bits": {
    "quantize, 1 bit, every 40": _every(40, 1),
    "quantize, 2 bits, every 64": _every(64, 2),
  },
  "The best arms of AdamW": {
    "powersgd 21.8, int4, error": _muon(
      table.TABLES["About 1 bit"]["powersgd 21.8, int4, error"]
    ),
    "SparseLoCo, every 2": _muon(
      rounds.TABLES["About 0.2 bits"]["SparseLoCo, every 2"]
    ),
  },
}

TUNING = {
  **table.TUNING,
  "start": (16e-3,),  # dense's best
  "arms": rounds.shorter_rounds(TABLES),
}
