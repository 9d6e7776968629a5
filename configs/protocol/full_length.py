"""Checks that a quarter of the length orders learning rates as all of it does.

Two arms of the table, tuned over whole runs.
"""

from configs.protocol import table

CONFIG = table.CONFIG
SEEDS = ()
TUNING = {**table.TUNING, "settings": {}}
TABLES = {
  "Whole runs": {
    arm: table.TABLES[group][arm]
    for group, arm in (
      ("Every entry", "dense"),
      ("About 1 bit", "powersgd 21.8, int4, error"),
    )
  }
}
