"""gpt2_tiny on 2 replicas, each of which shards its parameters on 4 devices.

python experiments/train_gpt2.py --config=configs/gpt2_tiny_hsdp.py
"""

from ml_collections import ConfigDict

from configs import gpt2_tiny


def get_config(reducer: str = "edgc") -> ConfigDict:
  """Returns the configuration for `--config=FILE:REDUCER`."""
  config = gpt2_tiny.get_config(reducer)
  config.name = "gpt2_tiny_hsdp"
  config.mesh.data = 2
  config.mesh.fsdp = 4
  config.mesh.backend = "jit"
  return config
