"""Eight fake CPU devices for the whole suite.

The package widens XLA's thread pool when it is imported, which has to happen
before JAX uses a device: hence the order below.
"""

import edgc_jax  # noqa: F401

import jax  # isort: skip
import pytest

jax.config.update("jax_num_cpu_devices", 8)


@pytest.fixture(autouse=True, scope="module")
def _compile_quickly(request):
  """Programs that run a few steps only; a module may say `OPTIMIZED = True`."""
  wanted = getattr(request.module, "OPTIMIZED", False)
  jax.config.update("jax_disable_most_optimizations", not wanted)
