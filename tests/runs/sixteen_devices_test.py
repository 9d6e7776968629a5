"""Four stages of two replicas of two devices train as one device does."""

import numpy as np
import pytest
from helpers import soak
from helpers.processes import finish, start


@pytest.mark.soak("experiments/trainer/parallel", "experiments/trainer/models")
def test_four_stages_of_two_replicas_of_two_devices(tmp_path):
  mesh = {"stage": 4, "data": 2, "tensor": 2, "fsdp": 1, "backend": "jit"}
  options = [f"--config.mesh.{name}={size}" for name, size in mesh.items()]
  options += ["--config.pipeline.align=none"]
  runs = {"sixteen": options, "one": ["--config.mesh.data=1"]}
  losses = {}
  for name, own in runs.items():
    # Full rank: the factors lose nothing, and all collectives run.
    process = start(
      tmp_path / name, "--config.model.num_layers=4", "--config.log_every=1",
      "--config.powersgd.rank=128", "--config.powersgd.min_ratio=0.0", *own,
      steps=8,
    )  # fmt: skip
    finish(process)
    losses[name] = [x["loss"] for x in soak.lines_of(tmp_path / name)]
  np.testing.assert_allclose(losses["sixteen"], losses["one"], rtol=1e-4)
  assert losses["sixteen"][-1] < losses["sixteen"][0] - 0.1
