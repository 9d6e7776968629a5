"""Interrupted runs end bit for bit as uninterrupted runs do."""

import shutil

import chex
import numpy as np
import pytest
from helpers import cut_runs
from helpers.cut_runs import config_of, lines_of, newest, run, tensorboard_of


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
  return cut_runs.whole_runs(tmp_path_factory.mktemp("whole"))


@pytest.fixture(scope="module")
def cut_off(tmp_path_factory):
  """Returns the folder of a run of powersgd that was cut off after step 5."""
  folder = tmp_path_factory.mktemp("cut") / "run"
  run(config_of(folder, "powersgd"), cut_after=5)
  return folder


@pytest.mark.parametrize(
  "reducer, backend, cuts",
  [
    # Warm-up is steps 1 and 2, and every window ends with an even one.
    ("edgc", "pmap", (1, 2, 5, 6)),
    ("edgc", "jit", (3,)),
    ("allreduce", "jit", (5,)),
  ],
)
def test_a_resumed_run_is_the_same(tmp_path, whole, reducer, backend, cuts):
  expected = whole(reducer, backend)  # runs that are cut off take its step
  config = config_of(tmp_path / "run", reducer, backend)
  for step in cuts:
    run(config, cut_after=step)
  trainer = run(config, compiles=(reducer, backend) == ("edgc", "jit"))
  assert trainer.parallel.traces == 1
  assert lines_of(trainer) == lines_of(expected)
  assert tensorboard_of(trainer) == tensorboard_of(expected)
  for name, value in expected.folder.summary().items():
    if name not in (*cut_runs.CLOCK, "environment"):
      assert trainer.folder.summary()[name] == value, name
  step, arrays = newest(trainer)
  assert step == config.steps
  chex.assert_trees_all_equal(arrays, newest(expected)[1])


@pytest.mark.parametrize(
  ("backend", "replicas", "rtol"),
  [("jit", 4, 1e-5), ("pmap", 1, 1e-4), ("pmap", 8, 1e-4)],
)
def test_resumes_elsewhere(
  tmp_path, whole, cut_off, backend, replicas, rtol, capfd
):
  """Both backends store the same arrays.

  The mean of gradients and residuals is the same on any replicas, and so are
  the updates.
  """
  shutil.copytree(cut_off, tmp_path / "run")
  config = config_of(tmp_path / "run", "powersgd", backend)
  config.mesh.data = replicas
  trainer = run(config)
  said = f"step 4 on {replicas} replicas, 4 before" in capfd.readouterr().out
  assert said == (replicas != 4)
  expected = lines_of(whole("powersgd", "pmap"))
  for line, other in zip(lines_of(trainer), expected, strict=True):
    np.testing.assert_allclose(line["loss"], other["loss"], rtol=rtol)


def budget_of(trainer, step):
  """Returns scalar fields of the budget by name."""
  shapes = trainer.parallel.stored.template(trainer.config.mesh.data)
  trees = trainer.checkpoints.load(step, {"opt_state": shapes["opt_state"]})
  return {
    path.rsplit("budget.")[-1]: np.asarray(x).item()
    for path, x in trees["opt_state"].items()
    if "budget." in path and np.size(x) == 1
  }


def test_larger_batches_move_the_reference(tmp_path):
  """It moves by the change of entropy in the first whole window after it."""
  before = run(config_of(tmp_path / "run", "edgc"), cut_after=5)
  reference = budget_of(before, 4)["reference_entropy"]
  config = config_of(tmp_path / "run", "edgc")
  config.mesh.data = 2
  trainer = run(config)
  # Steps 5 and 6 are the first whole window; it is closed with step 7.
  before, after = (budget_of(trainer, step) for step in (6, 8))
  assert before["reference_entropy"] == reference
  assert before["restarts"] and not after["restarts"]
  change = after["window_entropy"] - before["window_entropy"]
  assert abs(change) > 1e-3
  np.testing.assert_allclose(
    after["reference_entropy"] - reference, change, atol=1e-5
  )
