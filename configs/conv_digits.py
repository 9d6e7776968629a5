"""A small convolutional network on scikit-learn's digits.

python experiments/train_gpt2.py --config=configs/conv_digits.py
"""

from ml_collections import ConfigDict

from configs import vision


def get_config(reducer: str = "edgc") -> ConfigDict:
  """Returns the configuration for `--config=FILE:REDUCER`."""
  config = vision.base(reducer, "conv")
  config.model = ConfigDict({"channels": (32, 64, 128), "dropout": 0.1})
  return config
