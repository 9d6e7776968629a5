"""Compares pipeline stages aligned by their slack with stages that are not.

4 stages of 2 replicas on a modelled link of 100 Mbit/s. Aligned stages that
finish their backward pass earlier send more in the same time; otherwise each
stage follows its own entropy.
"""

CONFIG = "configs/gpt2_tiny_pipeline.py"
SETTINGS = {
  "evaluation.every": 0, "evaluation.batches": 64, "checkpoint.every": 0,
}  # fmt: skip
MATCHED_RANKS = False  # each stage has its own rank: no fixed rank matches

TABLES = {
  "Dense": {"all-reduce": {"reducer": "allreduce"}},
  "EDGC": {
    "aligned by slack": {"reducer": "edgc", "pipeline.align": "slack"},
    "not aligned": {"reducer": "edgc", "pipeline.align": "none"},
  },
}
