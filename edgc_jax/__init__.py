"""Entropy-driven dynamic gradient compression as one link of an optax chain.

tx = optax.chain(edgc_jax.edgc(axis_name="data"), optax.adamw(3e-4))
"""

from edgc_jax import guards

guards.widen_thread_pool()  # before any device is used; see the function

from edgc_jax.comm_cost import wire_bytes  # noqa: E402
from edgc_jax.matrices import MatrixView, trailing_matrix  # noqa: E402
from edgc_jax.state_sharding import state_specs  # noqa: E402
from edgc_jax.telemetry import metrics  # noqa: E402
from edgc_jax.transforms import allreduce, edgc, powersgd  # noqa: E402
from edgc_jax.wrappers import accumulate, skip_nonfinite  # noqa: E402

__version__ = "0.1.0"

__all__ = [
  "MatrixView",
  "accumulate",
  "allreduce",
  "edgc",
  "metrics",
  "powersgd",
  "skip_nonfinite",
  "state_specs",
  "trailing_matrix",
  "wire_bytes",
]
