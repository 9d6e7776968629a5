"""What the slow tests share."""

import pytest
from helpers.processes import finish, start


@pytest.fixture(scope="session")
def whole(tmp_path_factory):
  """Returns the folder of an uninterrupted run, in a process of its own."""
  folder = tmp_path_factory.mktemp("processes") / "whole"
  finish(start(folder))
  return folder
