"""The first arms of the table again, at four times the parameters.

A run takes about five hours on one core, the study 150:

  python experiments/lab/run_study.py --study=configs/protocol/larger.py
"""

from configs.protocol import table

CONFIG = "configs/protocol/gpt_2m.py"
SEEDS = (0, 1, 2)
TUNING = {
  **table.TUNING,
  "start": (4e-3, 8e-3),
  "settings": {
    **table.TUNING["settings"],
    "steps": 2263,
    "edgc.warmup_steps": 50,
    "edgc.max_warmup_steps": 100,
  },
}

# Ranks of about 2, 1 and 0.5 bits for the 1,853,568 parameters of the model.
_RANKS = {"About 2 bits": 68.0, "About 1 bit": 33.4, "About 0.5 bits": 16.2}

TABLES = {
  "Every entry": {
    arm: table.TABLES["Every entry"][arm]
    for arm in ("dense", "quantize, 4 bits")
  }
} | {
  budget: {
    f"powersgd {rank:g}, int4, {allocation}": {
      **table.TABLES["About 1 bit"][f"powersgd 21.8, int4, {allocation}"],
      "powersgd.rank": rank,
    }
    for allocation in ("uniform", "error")
  }
  for budget, rank in _RANKS.items()
}
