"""gpt2_tiny on 4 pipeline stages of 2 replicas, with a rank per stage.

python experiments/train_gpt2.py --config=configs/gpt2_tiny_pipeline.py
"""

from ml_collections import ConfigDict

from configs import gpt2_tiny


def get_config(reducer: str = "edgc") -> ConfigDict:
  """Returns the configuration for `--config=FILE:REDUCER`."""
  config = gpt2_tiny.get_config(reducer)
  config.name = "gpt2_tiny_pipeline"
  config.steps = 120
  config.evaluation.every = 30
  config.mesh.data = 2
  config.mesh.stage = 4
  config.mesh.backend = "jit"
  config.pipeline.microbatches = 4

  # Devices of one machine have no link, so a link of 100 Mbit/s is modelled.
  # The other times were measured on two cores. They are fixed here so that the
  # run is the same everywhere; zeros would measure them.
  config.link.bandwidth = 12.5e6
  config.link.latency = 0.5e-3
  config.link.compression_base = 7.5e-3
  config.link.compression_per_rank = 2.4e-4
  config.pipeline.backward_seconds = 15e-3

  # The largest rank that the link allows and that saves a factor of 3.
  config.edgc.rank_max = None
  config.edgc.rank_min = None
  config.edgc.rank_multiple = 8
  config.edgc.max_rank_step = None
  config.edgc.min_ratio = 3.0
  # In 4 bits later stages have time for every entry.
  config.edgc.wire_dtype = "float32"
  config.edgc.warmup_steps = 10
  config.edgc.max_warmup_steps = 10
  return config
