"""Compresses the gradient all-reduce of data-parallel training, for optax.

The reducers of this package (`edgc`, `powersgd`, `topk`, ...) are gradient
transformations that average local gradients over replicas:

  tx = optax.chain(edgc_jax.edgc(axis_name="data"), optax.adamw(3e-4))
"""

from edgc_jax.wire import cpu_backend

cpu_backend.widen_thread_pool()  # has no effect once JAX has used a device

from edgc_jax import extend as extend
from edgc_jax.budget.allocation import ErrorAllocation
from edgc_jax.budget.entropy import Sampling
from edgc_jax.budget.rules import Rule, Window, cqm
from edgc_jax.leaves.views import (
  MatrixView,
  TransposedView,
  layer_matrix,
  scanned,
  trailing_matrix,
)
from edgc_jax.measure.advice import advise, measure_computing
from edgc_jax.measure.description import describe, wire_bytes
from edgc_jax.measure.timing import (
  measure_backward,
  measure_compression,
  measure_link,
)
from edgc_jax.mesh.adapting import follow_first_replica, restart_reference
from edgc_jax.mesh.local_gradients import value_and_grad
from edgc_jax.mesh.on_mesh import on_mesh
from edgc_jax.mesh.resizing import resize
from edgc_jax.mesh.restoring import restore
from edgc_jax.mesh.sharding import state_axes, state_specs
from edgc_jax.methods import *  # noqa: F403
from edgc_jax.methods import METHOD_VERSIONS, REDUCERS
from edgc_jax.methods import __all__ as _methods
from edgc_jax.reducer.local_steps import local_params, local_steps
from edgc_jax.reducer.split_local_steps import split_local_steps
from edgc_jax.reducer.wrappers import (
  accumulate,
  after_update,
  mean_over,
  skip_nonfinite,
)
from edgc_jax.sites.site import Site
from edgc_jax.stages.gradients import clip_by_global_norm
from edgc_jax.stages.stages import Stages
from edgc_jax.state.metrics import metrics
from edgc_jax.wire.link_model import CompressionModel, LinkModel

__version__ = "0.2.0"  # the only place

__all__ = [
  "METHOD_VERSIONS",
  "REDUCERS",
  "CompressionModel",
  "ErrorAllocation",
  "LinkModel",
  "MatrixView",
  "Rule",
  "Sampling",
  "Site",
  "Stages",
  "TransposedView",
  "Window",
  "accumulate",
  "advise",
  "after_update",
  "clip_by_global_norm",
  "cqm",
  "describe",
  "follow_first_replica",
  "layer_matrix",
  "local_params",
  "local_steps",
  "mean_over",
  "measure_backward",
  "measure_compression",
  "measure_computing",
  "measure_link",
  "metrics",
  "on_mesh",
  "resize",
  "restart_reference",
  "restore",
  "scanned",
  "skip_nonfinite",
  "split_local_steps",
  "state_axes",
  "state_specs",
  "trailing_matrix",
  "value_and_grad",
  "wire_bytes",
]
__all__ += _methods
