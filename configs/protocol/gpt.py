"""The model of the protocol: a byte-level GPT-2 of 0.45M parameters.

  python experiments/train_gpt2.py --config=configs/protocol/gpt.py:powersgd

20 tokens a parameter: 2,150 steps of 4,096 tokens, on 4 simulated replicas.
"""

from ml_collections import ConfigDict

from configs import common


def get_config(reducer: str = "edgc") -> ConfigDict:
  """Returns the configuration for `--config=FILE:REDUCER`."""
  config = common.base(reducer)
  config.name = "protocol"
  config.steps = 2150
  config.batch_size = 32
  config.log_every = 50
  config.checkpoint.every = 0
  config.mesh.data = 4
  config.mesh.backend = "vmap"
  config.model.vocab_size = 256  # bytes
  config.model.context = 128
  config.model.width = 128
  config.model.num_layers = 2
  config.model.num_heads = 4
  config.model.unroll = 2
  config.optimizer.lr = 4e-3
  config.optimizer.warmup_steps = 100
  config.evaluation.every = 100
  config.evaluation.batches = 32

  config.edgc.window = 50
  config.edgc.warmup_steps = 100
  config.edgc.max_warmup_steps = 200
  config.edgc.rank_multiple = 1
  config.edgc.sampling.step_rate = 1.0
  config.edgc.sampling.entry_rate = 0.05
  config.powersgd.warmup_steps = 0
  config.powersgd.window = 50
  config.quantize.error_feedback = True
  return config
