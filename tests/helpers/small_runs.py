"""The configurations of runs that take seconds."""

from configs import (
  coattention_digits,
  conv_digits,
  diffusion_digits,
  gpt2_tiny,
  vit_digits,
)


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
    max_warmup_steps=2, warmup_rank="dense", wire_dtype="float32",
    sampling={"step_rate": 1.0},
  )  # fmt: skip
  config.powersgd.update(rank=4, warmup_steps=2, wire_dtype="float32")
  return config


# Sizes of `config.model`, and what is not as in `small`.
_TASKS = {
  "gpt2": (gpt2_tiny, {}),
  "bert": (gpt2_tiny, {"vocab_size": 257}),
  "vit": (vit_digits, {"patch": 4, "num_layers": 1}),
  "conv": (conv_digits, {"channels": (32, 64), "dropout": 0.0}),
  "coattention": (coattention_digits, {"patch": 4, "num_layers": 1}),
  "diffusion": (diffusion_digits, {"num_layers": 1}),
}


def small_task(folder, task, reducer="edgc", backend="vmap"):
  """Returns a configuration as `small` of any task, with a line each step."""
  file, sizes = _TASKS[task]
  config = small(folder, reducer)
  if file is not gpt2_tiny:
    own = file.get_config(reducer)
    for name in ("model", "name"):
      config[name] = own[name]
    if "num_heads" in own.model:
      sizes = {"width": 32, "num_heads": 2, **sizes}
    config.evaluation.metric = own.evaluation.metric
    config.batch_size = 32  # 8 images are too noisy to learn from in few steps
  config.model.update(sizes)
  config.task, config.mesh.backend, config.log_every = task, backend, 1
  return config
