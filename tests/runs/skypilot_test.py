"""The commands of examples/skypilot.yaml, for two hosts on loopback.

SkyPilot itself is not needed: it runs the commands on each host, with the
variables that are set here.
"""

import subprocess
import sys

import pytest
import yaml
from helpers import environments, soak
from helpers.local_processes import free_port, run_together

SECONDS = 150
TASK = yaml.safe_load((soak.ROOT / "examples/skypilot.yaml").read_text())


def test_without_a_run_folder(tmp_path):
  """SkyPilot itself asks for variables that are null; "" passes it."""
  assert TASK["envs"]["RUN_DIR"] is None
  done = subprocess.run(
    ["bash", "-c", TASK["run"]],
    cwd=tmp_path, env={"RUN_DIR": ""}, capture_output=True, text=True,
  )  # fmt: skip
  assert done.returncode and "RUN_DIR: must be a folder" in done.stderr
  assert ".venv" not in done.stderr, "nothing has started"


@pytest.mark.soak("examples/skypilot.yaml")
def test_two_hosts(tmp_path):
  # A working directory as SkyPilot copies it, with this environment in it.
  folder = tmp_path / "workdir"
  folder.mkdir()
  for name in ("configs", "edgc_jax", "experiments"):
    (folder / name).symlink_to(soak.ROOT / name)
  (folder / ".venv" / "bin").mkdir(parents=True)
  python = folder / ".venv" / "bin" / "python"
  python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
  python.chmod(0o755)
  settings = soak.SETTINGS | {"steps": 4, "log_every": 1}
  options = (f"--config.{key}={value}" for key, value in settings.items())
  kept = environments.of_users() | environments.QUICK | environments.cache
  variables = kept | TASK["envs"] | {
    "CONFIG": f"{TASK['envs']['CONFIG']}:powersgd",
    "RUN_DIR": str(tmp_path / "run"),
    "OPTIONS": " ".join(options),
    "SKYPILOT_NODE_IPS": "127.0.0.1\n127.0.0.2",
    "SKYPILOT_NUM_NODES": "2",
  }  # fmt: skip
  commands = TASK["run"].replace(":9876", f":{free_port()}")
  assert commands != TASK["run"]
  run_together(
    tmp_path, [["bash", "-c", commands]] * 2,
    [variables | {"SKYPILOT_NODE_RANK": str(rank)} for rank in range(2)],
    SECONDS, cwd=folder,
  )  # fmt: skip
  lines = soak.lines_of(tmp_path / "run")
  assert [line["step"] for line in lines] == [1, 2, 3, 4]
  assert TASK["num_nodes"] > 1 and "requirements.txt" in TASK["setup"]
