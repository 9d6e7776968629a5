"""gpt2_tiny on 4 pipeline stages of 2 replicas, each stage on its own rank.

python experiments/train_gpt2.py --config=configs/gpt2_tiny_pipeline.py
"""

from ml_collections import ConfigDict

from configs import gpt2_tiny


def get_config(reducer: str = "edgc") -> ConfigDict:
  """The configuration; the reducer is named behind the file's name."""
  config = gpt2_tiny.get_config(reducer)
  config.name = "gpt2_tiny_pipeline"
  config.steps = 200
  config.mesh.data = 2
  config.mesh.stage = 4
  config.mesh.backend = "shard_map"
  config.pipeline.microbatches = 4
  config.pipeline.backward_seconds = 0.02

  # Devices of one machine have no link: that of 100 Mbit/s is modelled.
  config.link.bandwidth = 12.5e6
  config.link.latency = 0.5e-3

  # Ranks up to where dense is as fast, or saves too little.
  config.edgc.rank_max = 0
  config.edgc.rank_min = 0
  config.edgc.rank_multiple = 4
  config.edgc.max_rank_step = 0
  return config
