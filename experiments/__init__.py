"""Programs that train, measure and report; not installed with the package.

JAX reads its environment variables when it is imported, so that happens here,
before all else: a program ends with one line if JAX refuses one of them.
"""

import sys

try:
  import jax  # noqa: F401
except ValueError as refused:
  sys.exit(
    f"error: JAX's environment variables must have values that it knows, got"
    f" one that it does not: {refused}; correct or unset it."
  )
