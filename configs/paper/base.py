"""What the paper's three runs have in common.

Facts from the scripts that the authors of arXiv:2511.10333 have published; they
train with Megatron-LM on 16, 32 and 64 GPUs, in float32. Three departures: the
learning rate falls over the steps of the run, and not over 320,000; ranks are
at least 16 apart where the largest one is above 250, since a ladder has at most
16 ranks; and the rank moves by one step of the ladder a window, not by 4 ranks
(results/paper.md has both). The authors derive the largest rank from times that
are not published. Here it follows from the link and the time of a backward pass
below: assumptions for 2.5B on V100 (results/paper.md), to be replaced by one's
own.
"""

from ml_collections import ConfigDict

from configs import common

STEPS, WINDOW = 230_000, 1000
_MICRO_BATCH = 4  # sequences


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
  # An uplink of 10 Gbit/s, shared by the devices of a node: bytes of payload of
  # an all-reduce per second and device.
  config.link.update(
    bandwidth=1.25e9 * replicas / (2 * (replicas - 1)) / tensor, latency=1e-4
  )
  config.pipeline.backward_seconds = 0.4

  # The largest rank is the largest that is no slower than dense. Dense for a
  # tenth of the run; then a rank for each window, down to a quarter
  # of the largest, at most one step of the ladder away from the rank before.
  config.edgc.update(
    rank_max=None, rank_min=None, max_rank_step=None, window=WINDOW,
    warmup_steps=STEPS // 10, max_warmup_steps=STEPS // 10,
    warmup_rank="dense", allocation="uniform", min_ratio=1.0,
    wire_dtype="float32",
  )  # fmt: skip
  config.edgc.sampling.update(
    step_rate=0.1, entry_rate=0.25, estimator="histogram"
  )
  config.powersgd.warmup_steps = STEPS // 10
  config.powersgd.wire_dtype = "float32"
  return config
