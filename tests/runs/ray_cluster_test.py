"""examples/ray_cluster.py on a cluster of two nodes; a worker is killed."""

import importlib.util
import json
import pathlib
import subprocess
import sys
import tempfile

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from helpers import environments

pytestmark = pytest.mark.skipif(
  not importlib.util.find_spec("ray"), reason="Ray is not installed."
)

ROOT = pathlib.Path(__file__).resolve().parents[2]
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


def arrays_of(path):
  """Returns all arrays of a checkpoint by name."""
  with ocp.PyTreeCheckpointer() as reader:
    tree = reader.metadata(path).item_metadata.tree
    as_numpy = ocp.RestoreArgs(restore_type=np.ndarray)
    restored = reader.restore(
      path, restore_args=jax.tree.map(lambda _: as_numpy, tree)
    )
  leaves = jax.tree_util.tree_leaves_with_path(restored)
  return {jax.tree_util.keystr(path): leaf for path, leaf in leaves}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
  """Returns the folder of both runs, and what the driver has found."""
  folder = tmp_path_factory.mktemp("ray")
  # Sockets have paths of 107 characters at most.
  with tempfile.TemporaryDirectory(prefix="ray-") as temporary:
    pathlib.Path(temporary, "ray").mkdir()
    subprocess.run(
      [sys.executable, ROOT / "tests" / "helpers" / "ray_driver.py", folder],
      env=environment(temporary), timeout=SECONDS, check=True,
    )  # fmt: skip
  return folder, json.loads((folder / "found.json").read_text())


def test_workers_train_on_both_nodes(runs):
  _, found = runs
  assert found["nodes"] == 2
  for name in ("whole", "killed"):
    assert len(set(found[name]["nodes"])) == 2
    assert found[name]["step"] == STEPS
    assert found[name]["loss"] < 0.5
    assert found[name]["ratio"] > 9


def test_no_step_is_lost_beyond_the_last_checkpoint(runs):
  _, found = runs
  assert found["whole"]["first"] == 1
  last = KILLED_AT // EVERY * EVERY
  assert found["killed"]["first"] == last + 1


def test_the_killed_run_ends_with_the_same_state(runs):
  folder, _ = runs
  whole, killed = (
    arrays_of(folder / name / str(STEPS)) for name in ("whole", "killed")
  )
  assert whole.keys() == killed.keys()
  assert any("residual" in name for name in whole)
  for name, array in whole.items():
    np.testing.assert_array_equal(array, killed[name], err_msg=name)
