"""Runs on shards continue on the same number, others, and the other backend."""

import functools
import shutil

import numpy as np
import pytest
from helpers import cut_runs

pytestmark = pytest.mark.usefixtures("without_cache")

CASES = [
  ("edgc", (2, 2), (2, 2), "jit"),
  ("edgc", (2, 2), (2, 1), "jit"),
  ("edgc", (2, 1), (2, 2), "jit"),
  ("powersgd", (2, 2), (4, 1), "pmap"),
  ("powersgd", (4, 1), (2, 2), "jit"),
]


def config_of(folder, reducer, mesh):
  config = cut_runs.config_of(folder, reducer, backend="jit")
  config.mesh.update(data=mesh[0], fsdp=mesh[1])
  return config


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
  """Returns a cache: a whole run, and the folder of one that was cut off."""

  @functools.cache
  def get(reducer, mesh):
    folder = tmp_path_factory.mktemp("runs")
    whole = config_of(folder / "whole", reducer, mesh)
    whole = cut_runs.run(whole, compiles=False)
    cut_runs.run(config_of(folder / "cut", reducer, mesh), cut_after=5)
    return whole, folder / "cut"

  return get


@pytest.mark.parametrize(("reducer", "before", "after", "backend"), CASES)
def test_resumes(tmp_path, capsys, runs, reducer, before, after, backend):
  """The held-out loss is that of a run that was not cut off."""
  expected, cut = runs(reducer, before)
  shutil.copytree(cut, tmp_path / "run")
  config = config_of(tmp_path / "run", reducer, after)
  config.mesh.backend = backend
  resumed = cut_runs.run(config, compiles=False)
  assert resumed.parallel.traces == 1, "of other shapes or placements"
  if before == after:  # bit for bit
    assert cut_runs.lines_of(resumed) == cut_runs.lines_of(expected)
    assert (resumed.folder.path / "report.html").exists() == (
      expected.folder.path / "report.html"
    ).exists()
    return
  losses = [
    cut_runs.lines_of(run)[-1]["val_loss"] for run in (resumed, expected)
  ]
  assert np.isclose(*losses, rtol=0.01)
  text = capsys.readouterr().out
  if before[0] != after[0]:
    assert f"on {after[0]} replicas, {before[0]} before" in text
  if before[1] != after[1]:
    assert f"on {after[1]} shards of a replica, {before[1]} before" in text
