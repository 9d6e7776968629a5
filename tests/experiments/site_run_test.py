"""Runs of the trainer at several sites."""

import concurrent.futures
import contextlib
import json

import numpy as np
import pytest
from helpers import cut_runs
from helpers.small_runs import small

from edgc_jax.sites import bucket
from experiments.trainer.reporting import key_numbers, logged_run, run_page
from experiments.trainer.training import optimizer, site_rounds, trainer
from experiments.trainer.training.trainer import Trainer

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def without_pauses(monkeypatch):
  monkeypatch.setattr(bucket.Folder, "poll", 0.002)


class NoSignals(contextlib.nullcontext):
  """Of a run in a thread, which gets none."""

  def __enter__(self):
    return self

  def wants_stop(self, step):
    del step
    return False


def config_of(folder, name, **options):
  config = small(folder / name, "allreduce")
  config.mesh.update(data=1, backend="vmap")
  config.log_every, config.checkpoint.every = 1, 0
  config.site.update(url=str(folder / "bucket"), name=name, every=2)
  config.site.update(density=None, bits=8, **options)
  return config


def lines_of(folder):
  text = (folder / "metrics.jsonl").read_text()
  return [json.loads(line) for line in text.splitlines()]


def test_two_sites_end_equal(tmp_path, monkeypatch):
  """Each with data of its own; evaluated at common parameters."""
  monkeypatch.setattr(trainer, "StopSignals", NoSignals)
  configs = [config_of(tmp_path, name) for name in "ab"]
  with concurrent.futures.ThreadPoolExecutor() as pool:
    runs = [pool.submit(Trainer(config).run) for config in configs]
    a, b = (run.result() for run in runs)
  assert a["val_loss"] == b["val_loss"] and a["train_loss"] != b["train_loss"]
  assert a["site_rounds"] == b["site_rounds"] == 4 and a["site_members"] == 2
  assert a["site_received"] == b["site_sent"] > 0 and a["site_late"] == {}
  lines = lines_of(tmp_path / "a")
  assert [line.get("site_rounds", 0) for line in lines] == [
    0, 1, 1, 2, 2, 3, 3, 4,
  ]  # fmt: skip
  table = key_numbers.summary_table(a)
  assert "rounds of sites" in table and "4 (" in table
  assert "bytes a step" not in table, "within a site of one replica"
  page = run_page.write_report([tmp_path / "a"]).read_text()
  assert "Sites of a round" in page and "rounds of sites" in page
  assert "Bytes a step" not in page
  *_, sent = logged_run.load(tmp_path / "a").lines["bytes"]
  assert sent == a["site_sent"]


@pytest.mark.parametrize(
  ("backend", "replicas"), [("vmap", 1), ("pmap", 2), ("jit", 2)]
)
def test_a_site_that_comes_later_goes_on_with_the_run(
  backend, replicas, tmp_path, monkeypatch
):
  """At the step that the others have reached; two rounds are left."""
  config = config_of(tmp_path, "a")
  Trainer(config).run()
  late = config_of(tmp_path, "b")
  late.mesh.update(data=replicas, backend=backend)
  late.steps, moved = 12, []

  def at_step(opt_state, step):
    moved.append(step)
    return optimizer.at_step(opt_state, step)

  monkeypatch.setattr(site_rounds, "at_step", at_step)
  summary = Trainer(late).run()
  assert moved == [8], "its learning rate is that of the others"
  assert summary["traces"] == 1
  assert [line["step"] for line in lines_of(tmp_path / "b")] == [9, 10, 11, 12]
  assert summary["site_rounds"] == 2
  if replicas == 1:
    assert summary["compression_ratio"] == 1
  expected = summary["dense_bytes_per_step"] / summary["compression_ratio"]
  np.testing.assert_allclose(summary["wire_bytes_per_step"], expected)


def test_a_site_that_comes_after_the_end_ends_alike(tmp_path):
  """It adds no round to the run."""
  first = Trainer(config_of(tmp_path, "a")).run()
  late = Trainer(config_of(tmp_path, "b")).run()
  assert late["val_loss"] == first["val_loss"] and "site_rounds" not in late
  rounds = tmp_path / "bucket" / "rounds"
  assert len(list(rounds.iterdir())) == first["site_rounds"]


def test_rounds_are_counted_over_a_resume(tmp_path):
  """Of all rounds, their bytes and who was late."""
  whole = Trainer(config_of(tmp_path / "one", "a")).run()
  config = config_of(tmp_path / "two", "a")
  config.checkpoint.every = 4
  cut_runs.run(config, cut_after=5, compiles=False)
  resumed = Trainer(config).run()
  for key in ("site_rounds", "site_sent", "site_received", "site_late"):
    assert resumed[key] == whole[key]
