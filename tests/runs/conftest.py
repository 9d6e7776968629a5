"""What the slow tests share."""

import fcntl
import os

import pytest
from helpers import environments
from helpers.processes import finish, start

# Files of long tests first, so that no worker is left with one at the end; runs
# in this process and runs in others alternate.
_FIRST = (
  "exact_resume", "bucket", "parallel", "mixed_hosts", "other_shards",
  "ray_cluster", "mishaps", "killed_runs", "slurm", "four_processes",
)  # fmt: skip


def pytest_collection_modifyitems(items):
  place = {f"{name}_test.py": i for i, name in enumerate(_FIRST)}
  items.sort(key=lambda item: place.get(item.path.name, len(place)))


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
