"""Four stages of two replicas of two devices train as one device does."""

import json

import numpy as np
from helpers.processes import finish, start


def losses_of(folder):
  lines = (folder / "metrics.jsonl").read_text().splitlines()
  return [json.loads(line)["loss"] for line in lines]


def test_four_stages_of_two_replicas_of_two_devices(tmp_path):
  common = ("--config.model.num_layers=4", "--config.log_every=1")
  mesh = {"stage": 4, "data": 2, "tensor": 2, "fsdp": 1}
  options = [f"--config.mesh.{name}={size}" for name, size in mesh.items()]
  options += ["--config.mesh.backend=jit", "--config.pipeline.align=none"]
  folders = tmp_path / "sixteen", tmp_path / "one"
  # Full rank: the factors lose nothing, and all collectives run.
  full = ("--config.powersgd.rank=128", "--config.powersgd.min_ratio=0.0")
  many = start(folders[0], *common, *options, *full, steps=8)
  finish(many)
  one = start(folders[1], *common, *full, "--config.mesh.data=1", steps=8)
  finish(one)
  losses = [losses_of(folder) for folder in folders]
  np.testing.assert_allclose(losses[0], losses[1], rtol=1e-4)
  assert losses[0][-1] < losses[0][0] - 0.1
