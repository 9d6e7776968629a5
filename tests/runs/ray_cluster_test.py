"""examples/ray_cluster.py on a cluster of two nodes; a worker is killed."""

import importlib.util
import json
import pathlib
import subprocess
import sys
import tempfile

import numpy as np
import pytest
from helpers import environments, soak

pytestmark = [
  pytest.mark.soak("examples/ray_cluster.py"),
  pytest.mark.skipif(
    not importlib.util.find_spec("ray"), reason="Ray is not installed."
  ),
]

ROOT = soak.ROOT
SECONDS = 400
STEPS, EVERY, KILLED_AT = 60, 10, 25  # of the example and of the driver


def environment(folder):
  """Returns variables that keep Ray on loopback and out of other folders."""
  kept = environments.of_users("RAY_") | environments.QUICK | environments.cache
  return kept | {
    "PYTHONPATH": f"{ROOT}:{ROOT / 'examples'}",
    # Ray takes 127.0.0.1 for a mistake, except where this is 0.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_TMPDIR": str(folder),
    # The controller takes one report a poll; a poll is every 2 s by default.
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.2",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_niceness": "0",  # or a busy machine runs all else before them
  }


def test_workers_train_on_both_nodes(tmp_path):
  # Sockets have paths of 107 characters at most.
  with tempfile.TemporaryDirectory(prefix="ray-") as temporary:
    pathlib.Path(temporary, "ray").mkdir()
    subprocess.run(
      [sys.executable, ROOT / "tests" / "helpers" / "ray_driver.py", tmp_path],
      env=environment(temporary), timeout=SECONDS, check=True,
    )  # fmt: skip
  found = json.loads((tmp_path / "found.json").read_text())
  assert found["nodes"] == 2
  for name in ("whole", "killed"):
    assert len(set(found[name]["nodes"])) == 2
    assert found[name]["step"] == STEPS
    assert found[name]["loss"] < 0.5
    assert found[name]["ratio"] > 9
  # No step is lost beyond the last checkpoint.
  assert found["whole"]["first"] == 1
  assert found["killed"]["first"] == KILLED_AT // EVERY * EVERY + 1
  # The killed run ends with the same state.
  whole, killed = (
    soak.arrays_of(tmp_path / name / str(STEPS)) for name in ("whole", "killed")
  )
  assert whole.keys() == killed.keys()
  assert any("residual" in name for name in whole)
  for name, array in whole.items():
    np.testing.assert_array_equal(array, killed[name], err_msg=name)
