"""Eight fake CPU devices for the whole suite.

`edgc_jax` must be imported before JAX uses a device, since its import widens
XLA's thread pool: hence the order below.
"""

import gc
import os

import pytest
from helpers import quick_compile

# XLA takes a lone space for the name of a file.
_FLAGS = f"{quick_compile.XLA_FLAGS} {os.environ.get('XLA_FLAGS', '')}"
os.environ["XLA_FLAGS"] = _FLAGS.strip()

import edgc_jax  # noqa: E402, F401

import jax  # isort: skip # noqa: E402

pytest_plugins = ["helpers.compiled_once", "helpers.wheel"]

jax.config.update("jax_num_cpu_devices", 8)
# XLA's passes over the HLO still run.
jax.config.update("jax_disable_most_optimizations", True)
# Tracing makes many objects and few cycles: collecting took 7 % of the time.
gc.set_threshold(50_000, 20, 100)


@pytest.fixture(scope="module", autouse=True)
def forget_programs(request):
  """Frees compiled programs after the tests of a module.

  Each holds about a hundred memory maps. Linux allows a process 65,530; beyond
  that XLA aborts.
  """
  yield
  for value in vars(getattr(request, "module", None) or request).values():
    if hasattr(value, "cache_clear"):
      value.cache_clear()
  jax.clear_caches()
  gc.collect()


@pytest.fixture
def without_cache():
  """Cached programs mix up collectives over several axes."""
  before = jax.config.jax_enable_compilation_cache
  jax.config.update("jax_enable_compilation_cache", False)
  yield
  jax.config.update("jax_enable_compilation_cache", before)
