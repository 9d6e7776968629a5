"""Constants of the linear algebra, changed for a while."""

import contextlib
from unittest import mock

from edgc_jax.methods import linear_algebra


@contextlib.contextmanager
def changed(**constants):
  """Changes constants, also in functions that JAX has traced with others."""
  with mock.patch.multiple(linear_algebra, **constants):
    _forget()
    try:
      yield
    finally:
      _forget()


def _forget():
  """Ends JAX's memory of the functions that read constants."""
  for function in (linear_algebra.orthonormalize, linear_algebra.unit_columns):
    function.clear_cache()
