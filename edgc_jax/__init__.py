"""Compresses the gradient all-reduce of data-parallel training, for optax.

The reducers of this package (`edgc`, `powersgd`, `topk`, ...) are gradient
transformations that average local gradients over replicas:

  tx = optax.chain(edgc_jax.edgc(axis_name="data"), optax.adamw(3e-4))
"""

from edgc_jax.comm import cpu_backend

cpu_backend.widen_thread_pool()  # has no effect once JAX has used a device

from edgc_jax.adaptation.allocation import Allocation
from edgc_jax.adaptation.entropy import Sampling
from edgc_jax.adaptation.rank_rule import RankRule
from edgc_jax.comm.dataflow import FastAxis
from edgc_jax.measure.advice import advise
from edgc_jax.measure.description import describe
from edgc_jax.measure.timing import (
  measure_backward,
  measure_coding,
  measure_compression,
  measure_link,
)
from edgc_jax.pipeline.gradients import clip_by_global_norm
from edgc_jax.pipeline.schedule import apply_stages
from edgc_jax.pipeline.stages import Stages
from edgc_jax.plan.leaves import MatrixView, layer_matrix, trailing_matrix
from edgc_jax.plan.link_model import CompressionModel, LinkModel, wire_bytes
from edgc_jax.reducers.baselines import quantize, randomk, signsgd, topk
from edgc_jax.reducers.edgc import edgc
from edgc_jax.reducers.powersgd import allreduce, powersgd
from edgc_jax.reducers.wrappers import (
  accumulate,
  after_update,
  over_shards,
  skip_nonfinite,
)
from edgc_jax.state.metrics import metrics
from edgc_jax.state.resharding import resize_shards
from edgc_jax.state.resizing import (
  follow_first_replica,
  rebase_entropy,
  rescale_gradients,
  resize_replicas,
)
from edgc_jax.state.sharding import state_specs

__version__ = "0.1.0"

__all__ = [
  "Allocation",
  "CompressionModel",
  "FastAxis",
  "LinkModel",
  "MatrixView",
  "RankRule",
  "Sampling",
  "Stages",
  "accumulate",
  "advise",
  "after_update",
  "allreduce",
  "apply_stages",
  "clip_by_global_norm",
  "describe",
  "edgc",
  "follow_first_replica",
  "layer_matrix",
  "measure_backward",
  "measure_coding",
  "measure_compression",
  "measure_link",
  "metrics",
  "over_shards",
  "powersgd",
  "quantize",
  "randomk",
  "rebase_entropy",
  "rescale_gradients",
  "resize_replicas",
  "resize_shards",
  "signsgd",
  "skip_nonfinite",
  "state_specs",
  "topk",
  "trailing_matrix",
  "wire_bytes",
]
