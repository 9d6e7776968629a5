"""Constants of the linear algebra, changed for a while."""

import contextlib
from unittest import mock

from edgc_jax.methods import linear_algebra


@contextlib.contextmanager
def changed(**constants):
  """Changes constants; JAX keeps what it traced with others, until told."""
  with mock.patch.multiple(linear_algebra, **constants):
    _forget()
    try:
      yield
    finally:
      _forget()


def _forget():
  for function in (linear_algebra.orthonormalize, linear_algebra.unit_columns):
    function.clear_cache()
