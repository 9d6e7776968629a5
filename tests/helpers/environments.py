"""The environments of programs that tests start."""

import os

from helpers import quick_compile

# What the tests, or the import of the package, set in this process.
_OWN = ("EDGC_JAX", "JAX_", "NPROC", "PYTHONWARNINGS", "XLA_")

# Programs that compile quickly, as the tests themselves do.
QUICK = {
  "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
  "JAX_PLATFORMS": "cpu",
  "XLA_FLAGS": quick_compile.XLA_FLAGS,
}
# Programs that processes keep for one another. `runs/conftest.py` says where;
# most are small ones, of which a process has two hundred.
cache = {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}


def of_users(*prefixes):
  """Returns this environment as it was before the tests changed it.

  Args:
    *prefixes: Of the names of further variables to leave out.
  """
  foreign = (*_OWN, *prefixes)
  return {k: v for k, v in os.environ.items() if not k.startswith(foreign)}
