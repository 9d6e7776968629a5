"""The larger model of the protocol: a byte-level GPT-2 of 1.85M parameters.

20 tokens a parameter: 9,050 steps of 4,096 tokens, on 4 simulated replicas; the
data are seen 3.5 times.
"""

from ml_collections import ConfigDict

from configs.protocol import gpt


def get_config(reducer: str = "edgc") -> ConfigDict:
  """Returns the configuration for `--config=FILE:REDUCER`."""
  config = gpt.get_config(reducer)
  config.name = "protocol-2m"
  config.steps = 9050
  config.model.width = 192
  config.model.num_layers = 4
  config.model.num_heads = 6
  config.model.unroll = 4
  config.optimizer.warmup_steps = 200
  config.edgc.warmup_steps = 200
  config.edgc.max_warmup_steps = 400
  return config
