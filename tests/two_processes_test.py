"""Two processes as one run, of which one dies."""

import numpy as np
import pytest
import soak
from four_processes_test import free_port
from processes import SECONDS, finish, lines_written, start, wait_for


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
  """A run that nothing happened to."""
  folder = tmp_path_factory.mktemp("two") / "whole"
  finish(start(folder))
  return folder


def test_one_of_two_processes_dies(whole):
  """The other ends with an error; both again go on to the same end."""
  folder = whole.parent / "two"

  def both():
    address = f"--coordinator_address=127.0.0.1:{free_port()}"
    return [
      start(
        folder, "--config.mesh.backend=shard_map", address,
        "--num_processes=2", f"--process_id={i}", "--heartbeat_timeout=10",
        output=folder.parent / f"output_{i}.txt",
      )
      for i in range(2)
    ]  # fmt: skip

  first, second = both()
  try:
    wait_for(lambda: lines_written(folder) >= 4, first)
    second.kill()
    second.wait()
    first.wait(timeout=60)
    assert first.returncode not in (0, None)
    text = (folder.parent / "output_0.txt").read_text()
    assert "give the same command on all hosts again" in text
  finally:
    first.kill()

  processes = both()
  try:
    for process in processes:
      process.wait(timeout=SECONDS)
  finally:
    for process in processes:
      process.kill()
  texts = [(folder.parent / f"output_{i}.txt").read_text() for i in range(2)]
  assert [p.returncode for p in processes] == [0, 0], texts
  assert "going on after step" in texts[0]
  assert "step" not in texts[1], "one process speaks for all"
  losses = [
    [line["loss"] for line in soak.lines_of(path)] for path in (folder, whole)
  ]
  np.testing.assert_allclose(losses[0], losses[1], rtol=1e-4)
