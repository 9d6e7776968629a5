"""Does the entropy fall under BERT's objective as under GPT's?

The described rule at the protocol's length, with both objectives: dense for a
tenth of the run, windows of 1 %. One seed; the learning rate is the one that
the rule takes over the horizon. Losses of the two objectives do not compare.
About half an hour of two cores:

  python experiments/lab/run_study.py --study=configs/paper/objectives.py
"""

from configs.paper import horizon
from configs.protocol import table

CONFIG = table.CONFIG
SEEDS = (0,)

_RULE = {
  **horizon.as_published("cqm"),
  "optimizer.lr": 4e-3, "edgc.window": 22,
  "edgc.warmup_steps": 215, "edgc.max_warmup_steps": 215,
}  # fmt: skip

TABLES = {
  "Every entry": {
    "dense": {**table.TABLES["Every entry"]["dense"], "optimizer.lr": 8e-3},
  },
  "As published, float32": {
    "GPT, as described": _RULE,
    "BERT, as described": {**_RULE, "task": "bert", "model.vocab_size": 257},
  },
}
