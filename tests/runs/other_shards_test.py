"""Runs continue on other numbers of shards, and with the other backend."""

import numpy as np
import pytest
from helpers import cut_runs

pytestmark = pytest.mark.usefixtures("without_cache")

CASES = [
  ("edgc", (2, 2), (2, 1), "jit"),
  ("edgc", (4, 2), (2, 4), "jit"),
  ("edgc", (2, 1), (2, 4), "jit"),
  ("powersgd", (2, 2), (4, 1), "pmap"),
  ("powersgd", (2, 2), (4, 2), "jit"),
  ("powersgd", (2, 2), (2, 2), "jit"),
  ("allreduce", (4, 2), (2, 4), "jit"),
]


@pytest.mark.parametrize(("reducer", "before", "after", "backend"), CASES)
def test_resumes(tmp_path, reducer, before, after, backend):
  """The held-out loss is that of a run that was not cut off."""

  def config_of(name):
    config = cut_runs.config_of(tmp_path / name, reducer, backend="jit")
    config.mesh.update(data=before[0], fsdp=before[1])
    return config

  whole, config = cut_runs.run(config_of("whole")), config_of("cut")
  cut_runs.run(config, cut_after=5)
  config.mesh.update(data=after[0], fsdp=after[1], backend=backend)
  resumed = cut_runs.run(config)
  found, expected = (
    cut_runs.lines_of(trainer)[-1]["val_loss"] for trainer in (resumed, whole)
  )
  assert np.isclose(found, expected, rtol=0.01 if before != after else 0)
