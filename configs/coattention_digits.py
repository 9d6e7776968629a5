"""Two streams with co-attention, on the halves of digits.

python experiments/train_gpt2.py --config=configs/coattention_digits.py
"""

from ml_collections import ConfigDict

from configs import vision


def get_config(reducer: str = "edgc") -> ConfigDict:
  """Returns the configuration for `--config=FILE:REDUCER`."""
  config = vision.base(reducer, "coattention")
  config.model = ConfigDict(
    {"patch": 2, "width": 64, "num_layers": 2, "num_heads": 4, "dropout": 0.1}
  )
  return config
