"""How much could any schedule of ranks gain, at the protocol's length?

The schedules of the horizon with the mean of the protocol's fixed rank, at its
learning rate, which is not tuned for them: their best shows how much a schedule
of bytes over time can matter. They send 0.9 % more than the fixed rank, whose
rank is 21.8. About 5 hours of one core:

  python experiments/lab/run_study.py --study=configs/paper/schedules.py
"""

from configs.paper import horizon
from configs.protocol import table

CONFIG = table.CONFIG
SEEDS = table.SEEDS
MORE = table.MORE  # recorded for dense and the fixed rank, for their scatter
BEST = 0

_TABLE = "Moved over time, in 4 bits, by error"
_FIXED = "powersgd 21.8, int4, error"
_RATE = {"optimizer.lr": 8e-3}  # tuned for dense and for the fixed rank

TABLES = {
  "Every entry": {"dense": {**table.TABLES["Every entry"]["dense"], **_RATE}},
  _TABLE: {
    arm: {**own, **_RATE}
    for arm, own in {
      _FIXED: table.TABLES["About 1 bit"][_FIXED],
      **horizon.TABLES[_TABLE],
    }.items()
  },
}
