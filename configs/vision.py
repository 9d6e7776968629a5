"""What the configurations on scikit-learn's digits share."""

from ml_collections import ConfigDict

from configs import common


def base(reducer: str, task: str) -> ConfigDict:
  """Returns a configuration without the sizes of the model, `config.model`."""
  config = common.base(reducer)
  config.name = f"{task}_digits"
  config.task = task
  config.steps = 400
  config.batch_size = 64
  config.checkpoint.every = 100
  config.evaluation.every = 50
  config.evaluation.metric = "accuracy"
  config.optimizer.lr = 6e-3
  config.optimizer.warmup_steps = 40
  config.edgc.rank_max = 12
  config.edgc.rank_min = 8
  config.edgc.rank_multiple = 2
  config.edgc.window = 10
  config.edgc.warmup_steps = 20
  config.edgc.max_warmup_steps = 40
  config.edgc.sampling.step_rate = 1.0
  config.powersgd.rank = 8
  config.powersgd.warmup_steps = 0
  return config
