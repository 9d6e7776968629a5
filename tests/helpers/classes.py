"""Classes of width (`compression.factors`) for the small matrices of tests."""

import contextlib
from unittest import mock

from edgc_jax.compression import low_rank


@contextlib.contextmanager
def in_classes():
  """Gives all matrices traced inside classes, the narrowest of 2 columns."""
  found = []
  width_classes = low_rank._width_classes

  def choose(*args):
    found.append(width_classes(*args))
    return found[-1]

  with (
    mock.patch.object(low_rank, "_SMALL", 0),
    mock.patch.object(low_rank, "_GRANULE", 2),
    mock.patch.object(low_rank, "_width_classes", choose),
  ):
    yield
  assert any(len(classes) > 1 for classes in found), "no classes were traced"
