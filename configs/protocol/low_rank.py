"""Variants of low rank in 4 bits, at 1 and 0.5 bits.

The weights of matrices among which the rank is shared:

  python experiments/lab/run_study.py --study=configs/protocol/low_rank.py
"""

from collections.abc import Mapping
from typing import Any

from configs.protocol import table

CONFIG = table.CONFIG
SEEDS = table.SEEDS
MORE = table.MORE
TUNING = table.TUNING


def _variants(budget: str, arm: str) -> Mapping[str, Mapping[str, Any]]:
  own = table.TABLES[budget][arm]
  return {
    arm: own,
    **{
      f"{arm}, errors over sigma^{exponent:g}": {
        **own,
        "powersgd.scale_exponent": exponent,
      }
      for exponent in (0.0, 2.0)
    },
  }


TABLES = {
  "Every entry": {"dense": table.TABLES["Every entry"]["dense"]},
} | {
  budget: _variants(budget, arm)
  for budget, arm in (
    ("About 1 bit", "powersgd 21.8, int4, error"),
    ("About 0.5 bits", "powersgd 10.4, int4, error"),
  )
}
