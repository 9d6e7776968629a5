"""The registry of reducers, which tests and configurations read.

A new method is a file of this folder, a line here, and a page.
"""

from collections.abc import Callable, Mapping

import optax

from edgc_jax.methods.allreduce import allreduce
from edgc_jax.methods.edgc import edgc
from edgc_jax.methods.powersgd import powersgd
from edgc_jax.methods.quantize import quantize
from edgc_jax.methods.randomk import randomk
from edgc_jax.methods.topk import topk

__all__ = [
  "allreduce",
  "edgc",
  "powersgd",
  "quantize",
  "randomk",
  "topk",
]

METHOD_VERSIONS: Mapping[str, int] = {
  **dict.fromkeys([*__all__, "local_steps"], 1),
  **dict.fromkeys(["quantize", "topk"], 2),
  **dict.fromkeys(["edgc", "powersgd"], 3),
}
"""The version of each method, by name.

It is raised when a method gives other results with the same options. Records of
runs hold it, and `tests/golden_test.py` asks for it.
"""

REDUCERS: Mapping[str, Callable[..., optax.GradientTransformationExtraArgs]] = {
  name: globals()[name] for name in __all__
}
"""The reducers by name, as tests and configurations find them."""
