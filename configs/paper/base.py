"""What the paper's three runs have in common.

Facts from the scripts that the paper's authors (arXiv:2511.10333) have published,
which train with Megatron-LM on 16, 32 and 64 GPUs, in float32. Two departures:
the learning rate falls over the steps of the run, and not over 320,000; and the
largest rank, which the authors derive from times that are not published, stands
here as a number (0 has it derived from the link).
"""

from ml_collections import ConfigDict

from configs import common

STEPS, WINDOW = 230_000, 1000
_MICRO_BATCH = 4  # sequences
_RANK_MAX = 64


def make(
  reducer: str,
  name: str,
  *,
  layers: int,
  width: int,
  heads: int,
  tensor: int,
  replicas: int,
  batch: int,
) -> ConfigDict:
  """Returns the configuration of one of the paper's models.

  Args:
    reducer: The reducer.
    name: A name of the run.
    layers: Number of blocks.
    width: Size of the residual stream.
    heads: Attention heads.
    tensor: Devices that share a stage.
    replicas: Number of replicas.
    batch: Sequences of a step.
  """
  config = common.base(reducer)
  config.name = name
  config.steps, config.batch_size, config.log_every = STEPS, batch, 100
  config.mesh.update(data=replicas, stage=4, tensor=tensor, backend="jit")
  config.model.update(
    width=width, num_layers=layers, num_heads=heads, dtype="float32"
  )
  config.pipeline.microbatches = batch // replicas // _MICRO_BATCH
  config.optimizer.update(
    lr=1.5e-4, final_lr_ratio=1 / 15, warmup_steps=STEPS // 100,
    weight_decay=0.01, clip_norm=1.0,
  )  # fmt: skip
  config.evaluation.update(every=WINDOW, batches=10)

  # Dense for a tenth of the run; then a rank for each window, down to a quarter
  # of the largest, at most 4 away from the rank before.
  config.edgc.update(
    rank_max=_RANK_MAX, rank_min=_RANK_MAX // 4, window=WINDOW,
    warmup_steps=STEPS // 10, max_warmup_steps=STEPS // 10,
    warmup_rank="dense", max_rank_step=4, allocation="uniform",
  )  # fmt: skip
  config.edgc.sampling.update(
    step_rate=0.1, entry_rate=0.25, estimator="histogram"
  )
  config.powersgd.update(rank=float(_RANK_MAX), warmup_steps=STEPS // 10)
  return config
