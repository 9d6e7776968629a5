"""Eight fake CPU devices for the whole suite.

The package widens XLA's thread pool when it is imported, which has to happen
before JAX uses a device: hence the order below.
"""

import gc
import os

import pytest
from helpers import quick_compile

# A space alone would be taken for the name of a file.
_FLAGS = f"{quick_compile.XLA_FLAGS} {os.environ.get('XLA_FLAGS', '')}"
os.environ["XLA_FLAGS"] = _FLAGS.strip()

import edgc_jax  # noqa: E402, F401

import jax  # isort: skip # noqa: E402

jax.config.update("jax_num_cpu_devices", 8)
# Passes over the HLO are not left out by this.
jax.config.update("jax_disable_most_optimizations", True)


@pytest.fixture(scope="module", autouse=True)
def forget_programs(request):
  """Lets compiled programs go when the tests of a module are done.

  Each has some hundred memory maps, of which Linux gives a process 65,530; at
  the end of them XLA aborts the process.
  """
  yield
  for value in vars(getattr(request, "module", None) or request).values():
    if hasattr(value, "cache_clear"):
      value.cache_clear()
  jax.clear_caches()
  gc.collect()
