"""A test of entropy that could show a gain: ranks that have room to move.

In table.py the floor of `edgc` is at three quarters of its ceiling, so that it
moves a few per cent of its bytes. Here the floor is a quarter of the ceiling,
as by default, and the entropy is estimated in both ways:

  python experiments/lab/run_study.py --study=configs/protocol/entropy.py

Tuning by the rule of table.py gave `edgc` half of the learning rate of fixed
ranks, which explains as much as the rank does. So each arm names its rate, and
the fixed ranks that send the bytes of `edgc` train at 0.008, as it does.
"""

from collections.abc import Mapping
from typing import Any

from configs.protocol import table

CONFIG = table.CONFIG
SEEDS = table.SEEDS
MORE = table.MORE
BEST = 1

_CEILING, _FLOOR = 26, 6
_TUNED, _OF_FIXED_RANKS = 4e-3, 8e-3


def _edgc(estimator: str, rate: float) -> Mapping[str, Any]:
  return {
    "reducer": "edgc", "edgc.rank_max": _CEILING, "edgc.rank_min": _FLOOR,
    "edgc.rank_multiple": 1, "edgc.max_rank_step": 4,
    "edgc.wire_dtype": "int4", "edgc.min_ratio": 1.0,
    "edgc.sampling.estimator": estimator, "optimizer.lr": rate,
  }  # fmt: skip


def _fixed(table_name: str, arm: str) -> Mapping[str, Any]:
  own = table.TABLES[table_name][arm]
  return {arm: {**own, "optimizer.lr": _OF_FIXED_RANKS}}


def _arms(rate: float) -> Mapping[str, Mapping[str, Any]]:
  return {
    f"edgc {_CEILING} to {_FLOOR}, int4, {estimator}, {rate:g}": _edgc(
      estimator, rate
    )
    for estimator in ("gaussian", "histogram")
  }


_FIXED = "powersgd 21.8, int4, error"

TABLES = {
  "Every entry": _fixed("Every entry", "dense"),
  "About 1 bit": {
    **_fixed("About 1 bit", _FIXED),
    **_arms(_OF_FIXED_RANKS),
    **_arms(_TUNED),
  },
}
MATCHED = dict.fromkeys(_arms(_OF_FIXED_RANKS), _FIXED)
