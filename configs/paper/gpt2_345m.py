"""The paper's GPT-2 of 345M parameters on 16 GPUs.

python experiments/lab/plan_layout.py --config=configs/paper/gpt2_345m.py
"""

from ml_collections import ConfigDict

from configs.paper import base


def get_config(reducer: str = "edgc") -> ConfigDict:
  """Returns the configuration for `--config=FILE:REDUCER`."""
  return base.make(
    reducer,
    "paper_gpt2_345m",
    layers=24,
    width=1024,
    heads=16,
    tensor=2,
    replicas=2,
    batch=64,
  )
