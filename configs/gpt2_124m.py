"""GPT-2 with 124M parameters, for accelerators and prepared token files.

  python experiments/train_gpt2.py --config=configs/gpt2_124m.py \
      --config.data.path=FOLDER --config.mesh.data=8

FOLDER holds train.bin and val.bin, little-endian uint16 tokens of GPT-2's
vocabulary. This configuration has not been trained on an accelerator yet, so
no time or result is known.
"""

from ml_collections import ConfigDict

from configs import common


def get_config(reducer: str = "edgc") -> ConfigDict:
  """Returns the configuration for `--config=FILE:REDUCER`."""
  config = common.base(reducer)
  config.name = "gpt2_124m"
  config.steps = 100_000
  config.batch_size = 256
  config.log_every = 50
  config.mesh.data = 8
  config.model.dtype = "bfloat16"
  config.optimizer.warmup_steps = 2000
  config.evaluation.every = 1000
  config.evaluation.batches = 20
  # Warm-up is a tenth of the run; the published window is 1000 steps.
  config.edgc.rank_max = 64
  config.edgc.rank_min = 16
  config.edgc.window = 1000
  config.edgc.warmup_steps = 10_000
  config.edgc.max_warmup_steps = 20_000
  config.powersgd.rank = 32
  config.powersgd.warmup_steps = 10_000
  return config
