"""What the slow tests share."""

import os

import pytest
from helpers import environments
from helpers.processes import finish, start


@pytest.fixture(scope="session", autouse=True)
def compiled(tmp_path_factory):
  """Gives training, Ray, SLURM and SkyPilot processes one compilation cache."""
  folder = tmp_path_factory.getbasetemp()
  if "PYTEST_XDIST_WORKER" in os.environ:
    folder = folder.parent
  environments.cache["JAX_COMPILATION_CACHE_DIR"] = f"{folder}/compiled"


@pytest.fixture(scope="session")
def whole(tmp_path_factory):
  """Returns the folder of an uninterrupted run, in a process of its own."""
  folder = tmp_path_factory.mktemp("processes") / "whole"
  finish(start(folder))
  return folder
