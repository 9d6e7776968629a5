"""Programs that train, measure and report; not installed with the package.

JAX reads its environment variables when it is imported, so that happens here,
before all else: a program ends with one line if JAX refuses one of them.
"""

import logging
import os
import pathlib
import sys

try:
  import jax  # noqa: F401
except ValueError as refused:
  sys.exit(
    f"error: JAX's environment variables must have values that it knows, got"
    f" one that it does not: {refused}; correct or unset it."
  )

if "JAX_LOGGING_LEVEL" not in os.environ:
  # JAX logs every platform that it does not find.
  logging.getLogger("jax").setLevel(logging.WARNING)

ROOT = pathlib.Path(__file__).resolve().parents[1]  # of the repository


def from_root(file: str) -> str:
  """Returns a path from the working folder, or else from the repository's root.

  So commands that name a file of configs/ work in any folder.
  """
  is_elsewhere = not os.path.exists(file) and (ROOT / file).is_file()
  return str(ROOT / file) if is_elsewhere else file
