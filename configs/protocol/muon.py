"""Muon as the optimiser: below dense, from 2 to 0.03 bits.

The arms of rounds.py that did best there, beside dense gradients, with Muon in
place of AdamW. A run takes 10 to 25 minutes of a core:

  python experiments/lab/run_study.py --study=configs/protocol/muon.py --jobs=2
"""

from collections.abc import Mapping
from typing import Any

from configs.protocol import rounds, table

CONFIG = table.CONFIG
SEEDS = table.SEEDS
MORE = table.MORE
BEST = 2


def _arms(
  arms: Mapping[str, Mapping[str, Any]],
) -> Mapping[str, Mapping[str, Any]]:
  return {
    f"{arm}, Muon": {**own, "optimizer.name": "muon"}
    for arm, own in arms.items()
  }


def _rounds(bits: int, every: int) -> Mapping[str, Mapping[str, Any]]:
  own = rounds.TABLES["About 2 bits"]["quantize, 2 bits"]
  return {
    f"quantize, {bits} bits, every {every}": {
      **own, "quantize.bits": bits, "local.every": every,
    }
  }  # fmt: skip


def _of(budget: str, *arms: str) -> Mapping[str, Mapping[str, Any]]:
  return {arm: rounds.TABLES[budget][arm] for arm in arms}


TABLES = {
  "Every entry": _arms(_of("Baselines", "dense")),
  "About 1 bit": _arms(
    _rounds(2, 2)
    | {"powersgd 21.8, int4, error": rounds._powersgd(21.8)}
  ),
  "About 0.4 bits": _arms(_rounds(2, 6)),
  "About 0.2 bits": _arms(
    _rounds(2, 12) | _of("About 0.2 bits", "SparseLoCo, every 2")
  ),
}
