"""A cache of compiled programs, for tests of whole runs."""

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache


@pytest.fixture(scope="module")
def compiled_once(tmp_path_factory):
  """Caches compiled programs, for runs that tests cut off and resume."""
  options = {
    "jax_compilation_cache_dir": str(tmp_path_factory.mktemp("compiled")),
    "jax_persistent_cache_min_compile_time_secs": 0.2,
  }
  before = {name: getattr(jax.config, name) for name in options}
  for name, value in options.items():
    jax.config.update(name, value)
  compilation_cache.reset_cache()  # JAX looks for a cache only once
  yield
  for name, value in before.items():
    jax.config.update(name, value)
  compilation_cache.reset_cache()
