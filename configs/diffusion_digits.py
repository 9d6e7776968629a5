"""A small diffusion model of scikit-learn's digits.

python experiments/train_gpt2.py --config=configs/diffusion_digits.py
"""

from ml_collections import ConfigDict

from configs import vision


def get_config(reducer: str = "edgc") -> ConfigDict:
  """Returns the configuration for `--config=FILE:REDUCER`."""
  config = vision.base(reducer, "diffusion")
  config.evaluation.metric = "loss"
  config.model = ConfigDict({"width": 64, "num_layers": 3})
  return config
