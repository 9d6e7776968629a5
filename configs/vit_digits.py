"""A small vision transformer on scikit-learn's digits.

python experiments/train_gpt2.py --config=configs/vit_digits.py
"""

from ml_collections import ConfigDict

from configs import vision


def get_config(reducer: str = "edgc") -> ConfigDict:
  """Returns the configuration for `--config=FILE:REDUCER`."""
  config = vision.base(reducer, "vit")
  config.model = ConfigDict(
    {"patch": 2, "width": 64, "num_layers": 3, "num_heads": 4, "dropout": 0.1}
  )
  return config
