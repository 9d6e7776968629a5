"""What aligning pipeline stages by their slack is worth.

4 stages of 2 replicas on a modelled link of 100 Mbit/s: stages that are done
sooner send more in the same time, or all follow their own entropy alone.
"""

CONFIG = "configs/gpt2_tiny_pipeline.py"
SETTINGS = {
  "evaluation.every": 0, "evaluation.batches": 64, "checkpoint.every": 0,
}  # fmt: skip
BESIDE = False  # stages have ranks of their own

TABLES = {
  "Dense": {"all-reduce": {"reducer": "allreduce"}},
  "EDGC": {
    "aligned by slack": {"reducer": "edgc", "pipeline.align": "slack"},
    "not aligned": {"reducer": "edgc", "pipeline.align": "none"},
  },
}
