"""The paper's GPT-2 of 2.5B parameters on 32 GPUs.

python experiments/lab/plan_layout.py --config=configs/paper/gpt2_2b5.py
"""

from ml_collections import ConfigDict

from configs.paper import base


def get_config(reducer: str = "edgc") -> ConfigDict:
  """Returns the configuration for `--config=FILE:REDUCER`."""
  return base.make(
    reducer,
    "paper_gpt2_2b5",
    layers=52,
    width=1920,
    heads=24,
    tensor=4,
    replicas=2,
    batch=64,
  )
