"""A masked-language model of gpt2_tiny's size: BERT's task, bytes as tokens.

python experiments/train_gpt2.py --config=configs/bert_tiny.py
python experiments/train_gpt2.py --config=configs/bert_tiny.py:allreduce
"""

from ml_collections import ConfigDict

from configs import gpt2_tiny


def get_config(reducer: str = "edgc") -> ConfigDict:
  """The configuration; the reducer is named behind the file's name."""
  config = gpt2_tiny.get_config(reducer)
  config.name = "bert_tiny"
  config.model.objective = "masked"
  config.model.vocab_size = 257  # bytes and the mask
  return config
