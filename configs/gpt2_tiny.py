"""A byte-level GPT-2 of 1.9M parameters, on Python's standard library.

python experiments/train_gpt2.py --config=configs/gpt2_tiny.py
python experiments/train_gpt2.py --config=configs/gpt2_tiny.py:allreduce
python experiments/train_gpt2.py --config=configs/gpt2_tiny.py:powersgd
"""

from ml_collections import ConfigDict

from configs import common


def get_config(reducer: str = "edgc") -> ConfigDict:
  """Returns the configuration for `--config=FILE:REDUCER`."""
  config = common.base(reducer)
  config.name = "gpt2_tiny"
  config.steps = 400
  config.batch_size = 16
  config.checkpoint.every = 100
  config.model.vocab_size = 256  # bytes
  config.model.context = 128
  config.model.width = 192
  config.model.num_layers = 4
  config.model.num_heads = 6
  config.model.unroll = 4
  # Tuned with factors in float32: configs/protocol/rate_gpt2_tiny.py.
  config.optimizer.lr = 2e-3
  config.optimizer.warmup_steps = 40

  # About 110 times fewer bytes than dense. Every 10 steps the rule chooses a
  # rank, and the allocation gives each matrix more or less than it. As by
  # default, the floor is a quarter of the ceiling.
  config.edgc.rank_max = 28
  config.edgc.rank_min = 6
  config.edgc.rank_multiple = 2
  config.edgc.window = 10
  config.edgc.warmup_steps = 20
  config.edgc.max_warmup_steps = 40
  # Entropy varies more between steps than one rank is worth, but little
  # between entries of a step: sample few entries in every step
  # (docs/results.md).
  config.edgc.sampling.step_rate = 1.0
  config.edgc.sampling.entry_rate = 0.05
  config.powersgd.rank = 9  # about the bytes of edgc
  config.powersgd.warmup_steps = 0
  return config
