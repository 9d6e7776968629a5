"""A byte-level GPT-2 of 10.8M parameters, for measuring real links.

python experiments/train_gpt2.py --config=configs/gpt2_10m.py
"""

from ml_collections import ConfigDict

from configs import gpt2_tiny


def get_config(reducer: str = "edgc") -> ConfigDict:
  """Returns the configuration for `--config=FILE:REDUCER`."""
  config = gpt2_tiny.get_config(reducer)
  config.name = "gpt2_10m"
  config.steps = 2000
  config.model.width = 384
  config.model.num_layers = 6
  config.model.unroll = 6
  config.optimizer.lr = 6e-4
  config.optimizer.warmup_steps = 100
  config.edgc.rank_max = 32
  config.edgc.rank_min = 8
  config.edgc.rank_multiple = 4
  config.edgc.window = 50
  config.edgc.warmup_steps = 100
  config.edgc.max_warmup_steps = 200
  config.powersgd.rank = 32
  return config
