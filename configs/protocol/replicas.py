"""Which exchange leads with 16 replicas, where the others have 4.

Batches have the same size, so a replica has 256 tokens a step in place of
1,024. Gathered entries grow with the number of replicas, few bits of every
entry do not. Dense averages the same gradients with 4 and 16 replicas: its runs
are those of 4.

  python experiments/lab/run_study.py --study=configs/protocol/replicas.py \\
      --jobs=2
"""

from collections.abc import Mapping
from typing import Any

from configs.protocol import rounds, table

CONFIG = table.CONFIG
SEEDS = table.SEEDS
MORE = table.MORE
TUNING = table.TUNING
BEST = 1

_ARMS = {a: own for each in rounds.TABLES.values() for a, own in each.items()}


def _of_16(arm: str) -> Mapping[str, Mapping[str, Any]]:
  return {f"{arm}, 16 replicas": {**_ARMS[arm], "mesh.data": 16}}


TABLES = {
  "Dense": {"dense": _ARMS["dense"]},
  "Every entry": {
    **_of_16("quantize, 2 bits, every 2"),
    **_of_16("quantize, 2 bits, every 6"),
  },
  "Gathered entries": {
    **_of_16("SparseLoCo, every 2"),
    **_of_16("SparseLoCo, every 4"),
  },
}
