"""The configuration of a run that takes seconds."""

from configs import gpt2_tiny


def small(folder, reducer="edgc"):
  """Returns eight steps of a model of a few thousand parameters."""
  config = gpt2_tiny.get_config(reducer)
  config.run_dir = str(folder)
  config.steps, config.batch_size, config.log_every = 8, 8, 3
  config.model.update(context=16, width=32, num_layers=1, num_heads=2)
  config.evaluation.update(every=4, batches=1)
  config.optimizer.warmup_steps = 2
  config.edgc.update(
    rank_max=8, rank_min=4, window=2, warmup_steps=2, min_ratio=1.5,
    max_warmup_steps=2, warmup_rank="dense",
    sampling={"step_rate": 1.0},
  )  # fmt: skip
  config.powersgd.update(rank=4, warmup_steps=2)
  return config
