"""What it costs to exchange at every step beside the next one.

The mean gradient one step late, after the warm-up of the rate; and steps of
each replica alone, of which the others hear one step later:

  python experiments/lab/run_study.py --study=configs/protocol/overlap.py
"""

from configs.protocol import table

CONFIG = table.CONFIG
SEEDS = table.SEEDS
MORE = table.MORE
TUNING = table.TUNING

_DENSE = table.TABLES["Every entry"]["dense"]
_AVERAGED = {**_DENSE, "local.every": 1}  # an outer rate of 1, no momentum

TABLES = {
  "At every step": {
    "dense": _DENSE,
    "dense, one step late": {"reducer": "late", "late.start": 100},
    "dense, own steps averaged": _AVERAGED,
    "dense, own steps at once, others' one step late": {
      **_AVERAGED, "local.overlap": 1,
    },
  },
}  # fmt: skip
