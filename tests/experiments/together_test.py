"""Runs that share a program are the runs that they are alone."""

import json

import numpy as np
import pytest
from helpers import cut_runs

from experiments.lab.study.together import prepare
from experiments.trainer.runs.run_folder import RunFolder, stopped

pytestmark = pytest.mark.slow
LANES = {
  "edgc": [{"seed": 0}, {"seed": 3, "optimizer.lr": 3e-3}],
  "quantize": [
    {"local.every": 3, "local.momentum": 0.0},
    {"local.every": 3, "local.momentum": 0.8, "local.lr": 0.7, "seed": 1},
  ],
}


def config_of(folder, reducer, settings=()):
  config = cut_runs.config_of(folder, reducer, "vmap")
  config.log_every = 1
  config.checkpoint.every = 0
  config.update_from_flattened_dict(dict(settings))
  return config


@pytest.mark.parametrize("reducer", LANES)
def test_lanes_are_the_runs_alone(tmp_path, reducer):
  lanes = LANES[reducer]
  prepare([
    config_of(tmp_path / f"lane{i}", reducer, own)
    for i, own in enumerate(lanes)
  ])()  # fmt: skip
  for i, own in enumerate(lanes):
    trainer = cut_runs.run(config_of(tmp_path / f"alone{i}", reducer, own))
    alone, folder = cut_runs.lines_of(trainer), tmp_path / f"lane{i}"
    text = (folder / "metrics.jsonl").read_text()
    lane = [json.loads(line) for line in text.splitlines()]
    assert len(lane) == len(alone)
    for key in ("loss", "rank", "wire_bytes", "learning_rate", "entropy"):
      of_both = [[line.get(key, 0) for line in x] for x in (lane, alone)]
      np.testing.assert_allclose(*of_both, rtol=1e-4, err_msg=key)
    summary = json.loads((folder / "summary.json").read_text())
    whole = trainer.folder.summary()
    assert summary.pop("together") == len(lanes)
    assert summary.keys() == whole.keys()
    np.testing.assert_allclose(
      summary["val_loss"], whole["val_loss"], rtol=1e-4
    )
    assert summary["wire_bytes_per_step"] == whole["wire_bytes_per_step"]


def test_a_lane_that_is_stopped_leaves_the_others(tmp_path):
  configs = [
    config_of(tmp_path / name, "allreduce", {
      "optimizer.lr": rate, "optimizer.max_consecutive_skips": 3,
    })
    for name, rate in (("fine", 1e-3), ("wild", 1e38))
  ]  # fmt: skip
  prepare(configs)()
  assert "steps in a row" in stopped(tmp_path / "wild")
  assert not (tmp_path / "wild/summary.json").exists()
  assert not stopped(tmp_path / "fine")
  assert json.loads((tmp_path / "fine/summary.json").read_text())["val_loss"]
  # Another call keeps the finished run, and tries the other again.
  before = (tmp_path / "fine/metrics.jsonl").stat().st_mtime_ns
  prepare(configs)()
  assert (tmp_path / "fine/metrics.jsonl").stat().st_mtime_ns == before
  assert "steps in a row" in stopped(tmp_path / "wild")
  folder = RunFolder(tmp_path / "wild", configs[1].to_dict())
  folder.start()
  folder.close()
  assert not stopped(tmp_path / "wild")


def test_runs_of_other_programs_are_refused(tmp_path):
  configs = [
    config_of(tmp_path / f"{bits}", "quantize", {"quantize.bits": bits})
    for bits in (8, 4)
  ]
  with pytest.raises(
    ValueError, match=r"differ only in seed, .* quantize.bits"
  ):
    prepare(configs)
  configs[1].quantize.bits = 8
  for backend, init_from, message in (
    ("pmap", "", r"must have mesh.backend=vmap.* pmap"),
    ("vmap", "runs/other", r"no init_from.* 'runs/other'"),
  ):
    for config in configs:
      config.mesh.backend, config.init_from = backend, init_from
    with pytest.raises(ValueError, match=message):
      prepare(configs)
