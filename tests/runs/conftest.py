"""What whole runs share."""

import fcntl
import os
import pathlib

import pytest
from helpers import environments
from helpers.processes import finish, start

_HERE = pathlib.Path(__file__).parent


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
  for item in items:
    if item.path.parent == _HERE and not item.get_closest_marker("soak"):
      item.add_marker(pytest.mark.slow)


def shared(tmp_path_factory):
  """Returns the temporary folder of all workers."""
  folder = tmp_path_factory.getbasetemp()
  return folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder


@pytest.fixture(scope="session", autouse=True)
def compiled(tmp_path_factory):
  """Gives training, Ray, SLURM and SkyPilot processes one compilation cache."""
  folder = shared(tmp_path_factory) / "compiled"
  environments.cache["JAX_COMPILATION_CACHE_DIR"] = str(folder)


@pytest.fixture(scope="session")
def whole(tmp_path_factory):
  """Returns the folder of an uninterrupted run, which all workers share."""
  folder = shared(tmp_path_factory) / "processes" / "whole"
  folder.parent.mkdir(exist_ok=True)
  with open(folder.parent / "lock", "w") as lock:
    fcntl.flock(lock, fcntl.LOCK_EX)
    if not (folder / "summary.json").exists():
      finish(start(folder))
  return folder
