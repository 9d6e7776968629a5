"""The paper's GPT-2 of 12.1B parameters on 64 GPUs.

python experiments/lab/plan_layout.py --config=configs/paper/gpt2_12b.py
"""

from ml_collections import ConfigDict

from configs.paper import base


def get_config(reducer: str = "edgc") -> ConfigDict:
  """Returns the configuration for `--config=FILE:REDUCER`."""
  return base.make(
    reducer,
    "paper_gpt2_12b",
    layers=76,
    width=3584,
    heads=28,
    tensor=4,
    replicas=4,
    batch=128,
  )
