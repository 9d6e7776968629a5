"""A test of entropy that could show a gain: ranks that have room to move.

In table.py the floor of `edgc` is at three quarters of its ceiling, so that it
moves a few per cent of its bytes. Here the floor is a quarter of the ceiling,
as by default, and the entropy is estimated in both ways. The fixed rank sends
fewer bytes than both:

  python experiments/lab/run_study.py --study=configs/protocol/entropy.py
"""

from collections.abc import Mapping
from typing import Any

from configs.protocol import table

CONFIG = table.CONFIG
SEEDS = table.SEEDS
MORE = table.MORE
BEST = 2
TUNING = table.TUNING

_CEILING, _FLOOR = 26, 6


def _edgc(estimator: str) -> Mapping[str, Any]:
  return {
    "reducer": "edgc", "edgc.rank_max": _CEILING, "edgc.rank_min": _FLOOR,
    "edgc.rank_multiple": 1, "edgc.max_rank_step": 4,
    "edgc.wire_dtype": "int4", "edgc.min_ratio": 1.0,
    "edgc.sampling.estimator": estimator,
  }  # fmt: skip


_FIXED = "powersgd 21.8, int4, error"

TABLES = {
  "Every entry": {"dense": table.TABLES["Every entry"]["dense"]},
  "About 1 bit": {
    _FIXED: table.TABLES["About 1 bit"][_FIXED],
    **{
      f"edgc {_CEILING} to {_FLOOR}, int4, {estimator}": _edgc(estimator)
      for estimator in ("gaussian", "histogram")
    },
  },
}
