"""A byte-level masked language model (BERT's task) of gpt2_tiny's size.

python experiments/train_gpt2.py --config=configs/bert_tiny.py
python experiments/train_gpt2.py --config=configs/bert_tiny.py:allreduce
"""

from ml_collections import ConfigDict

from configs import gpt2_tiny


def get_config(reducer: str = "edgc") -> ConfigDict:
  """Returns the configuration for `--config=FILE:REDUCER`."""
  config = gpt2_tiny.get_config(reducer)
  config.name = "bert_tiny"
  config.task = "bert"
  config.model.vocab_size = 257  # 256 bytes and the mask
  return config
