"""One of two processes dies: the other ends, and both finish the run later."""

import numpy as np
import pytest
from helpers import soak
from helpers.processes import codes_of, start_two, wait_for

from experiments.trainer.runs.checkpoints import Checkpoints


@pytest.mark.soak(
  "experiments/trainer/runtime/hosts.py",
  "experiments/trainer/runs/checkpoints.py",
)
@pytest.mark.parametrize("backend", ["pmap", "jit"])
def test_one_of_two_processes_dies(backend, whole, tmp_path):
  folder = whole.parent / f"two_{backend}"
  outputs = [tmp_path / f"output_{i}.txt" for i in range(2)]
  options = folder, outputs, f"--config.mesh.backend={backend}"

  first, second = start_two(*options)
  try:
    # Steps are faster than checkpoints are written.
    wait_for(lambda: Checkpoints(folder / "checkpoints", 2).steps(), first)
    second.kill()
    second.wait()
    assert first.wait(timeout=60) != 0
    text = outputs[0].read_text()
    assert "give the same command on all hosts again" in text
  finally:
    first.kill()

  codes = codes_of(start_two(*options))
  texts = [file.read_text() for file in outputs]
  assert codes == [0, 0], texts
  assert "resuming after step" in texts[0]
  assert "step" not in texts[1], "one process speaks for all"
  losses = [
    [line["loss"] for line in soak.lines_of(path)] for path in (folder, whole)
  ]
  np.testing.assert_allclose(losses[0], losses[1], rtol=1e-4)
