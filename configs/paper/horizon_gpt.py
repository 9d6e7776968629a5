"""The protocol's model over the paper's horizon: 20,000 steps.

  python experiments/train_gpt2.py --config=configs/paper/horizon_gpt.py:edgc

Warm-up and sampling are in the paper's proportion to the run: a tenth before
the rule applies, one step in ten and one entry in four. A window is 1 % of the
run, where the paper's is 0.4 %: 200 steps have 20 samples. Batches are twice
the protocol's, 8,192 tokens, since the noise of a batch outweighs its gradient
late in a run (docs/results.md).
"""

from ml_collections import ConfigDict

from configs.protocol import gpt

STEPS = 20_000


def get_config(reducer: str = "edgc") -> ConfigDict:
  """Returns the configuration for `--config=FILE:REDUCER`."""
  config = gpt.get_config(reducer)
  config.name = "horizon"
  config.steps, config.batch_size, config.log_every = STEPS, 64, 200
  config.optimizer.warmup_steps = STEPS // 100
  config.evaluation.every = STEPS // 40
  config.edgc.window = config.powersgd.window = STEPS // 100
  config.edgc.warmup_steps = config.edgc.max_warmup_steps = STEPS // 10
  config.edgc.sampling.update(step_rate=0.1, entry_rate=0.25)
  return config
