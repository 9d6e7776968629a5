"""Runs, from the command to the folder, and their errors."""

import json
import re

import jax
import numpy as np
import pytest
from helpers.small_runs import small

from configs import gpt2_124m
from experiments import train_gpt2
from experiments.trainer.reporting import key_numbers, run_page
from experiments.trainer.runs import run_folder
from experiments.trainer.runs.run_folder import RunFolder
from experiments.trainer.runtime import hosts
from experiments.trainer.training.progress_check import ProgressCheck
from experiments.trainer.training.trainer import Trainer, TrainingStopped

pytestmark = pytest.mark.slow


def test_a_finished_run(tmp_path):
  folder = tmp_path / "edgc"
  summary = Trainer(small(folder)).run()
  names = {path.name for path in folder.iterdir()}
  assert {"config.json", "metrics.jsonl", "summary.json"} <= names
  assert any(name.startswith("events.out.tfevents") for name in names)
  assert json.loads((folder / "summary.json").read_text()) == summary
  needed = {
    "reducer", "steps", "params", "replicas", "stages", "train_loss",
    "val_loss", "dense_bytes_per_step", "wire_bytes_per_step",
    "compression_ratio", "rank_history", "traces", "seconds",
    "tokens_per_second", "corpus",
  }  # fmt: skip
  assert needed <= summary.keys()
  assert "null" not in (folder / "summary.json").read_text()
  assert summary["traces"] == 1
  assert summary["rank_history"][:2] == [[1, [0]], [3, [8]]]
  assert summary["compression_ratio"] > 1
  # The lines agree with the summary.
  file = folder / "metrics.jsonl"
  lines = [json.loads(line) for line in file.read_text().splitlines()]
  assert [line["step"] for line in lines] == [1, 3, 4, 6, 8]
  assert [line["step"] for line in lines if "val_loss" in line] == [4, 8]
  for name in ("val_loss", "compression_ratio"):
    np.testing.assert_allclose(lines[-1][name], summary[name], rtol=1e-6)
  # Warm-up is dense, and so is the peak, plus a few bytes of control.
  peak = summary["peak_wire_bytes_per_step"]
  assert peak >= max(sum(line["wire_bytes"]) for line in lines)
  assert 1 <= peak / summary["dense_bytes_per_step"] < 1.01
  assert 0 < summary["step_seconds"] < summary["seconds"]
  assert summary["peak_memory_bytes"] > 1e8
  for line in lines:
    for name in ("entropy", "rank", "wire_bytes", "relative_error"):
      assert len(line[name]) == 1
    assert np.isfinite(line["loss"]) and line["seconds"] > 0
    ranks = line["matrix_rank"]["blocks/mlp_in/kernel"]
    assert np.shape(ranks) == (1, 1)  # stages, layers
    assert (ranks[0][0] == 0) == (line["rank"] == [0])
  # The same command keeps it.
  before = file.stat().st_mtime_ns
  assert Trainer(small(folder)).folder.summary() == summary
  assert file.stat().st_mtime_ns == before
  assert "edgc" in key_numbers.summary_table(summary)


def test_the_command_writes_a_report(tmp_path, capsys, monkeypatch):
  page, states = tmp_path / "run" / "report.html", []
  live = run_page.LivePage.update

  def update(self):
    live(self)
    states.extend(re.findall("not finished: .* steps", page.read_text()))

  monkeypatch.setattr(run_page.LivePage, "update", update)
  config = small(tmp_path / "run", "topk")
  config.steps = 2
  train_gpt2.main(config)
  assert "held-out loss" in capsys.readouterr().out
  # The second line comes too early for another page.
  assert states == ["not finished: 1 of 2 steps"] * 2
  assert "<td>finished" in page.read_text()


def test_a_run_cut_off_before_a_checkpoint_starts_again(tmp_path):
  folder = tmp_path / "run"
  trainer = Trainer(small(folder, "allreduce"))
  trainer.folder.start()
  trainer.folder.log({"step": 1, "loss": 1.0})
  trainer.folder.close()
  summary = Trainer(small(folder, "allreduce")).run()
  lines = (folder / "metrics.jsonl").read_text().splitlines()
  assert json.loads(lines[0])["loss"] != 1.0
  assert summary["rank_history"] == [[1, [0]]]
  again = Trainer(small(tmp_path / "again", "allreduce")).run()
  for name in ("train_loss", "val_loss", "compression_ratio"):
    assert again[name] == summary[name], "the same seed gives the same run"


def test_a_run_that_stops_says_why(tmp_path):
  folder = tmp_path / "run"
  config = small(folder, "allreduce")
  config.optimizer.update(max_consecutive_skips=2, lr=1e38, clip_norm=1e38)
  with pytest.raises(SystemExit, match="steps in a row up to step") as stopped:
    train_gpt2.main(config)
  assert not (folder / "summary.json").exists()
  line = json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])
  assert line["consecutive_skips"] >= 2
  reason = run_folder.stopped(folder)
  assert f"up to step {line['step']} had" in reason
  assert reason in str(stopped.value)
  page = (folder / "report.html").read_text()
  assert re.search("stopped after . of 8 steps: . steps in a row up", page)
  assert "http-equiv" not in page


def test_few_steps_are_under_way(tmp_path, monkeypatch):
  """Or a signal to stop would have to wait for all that are."""

  class Loss:
    is_waited_for = False

    def block_until_ready(self):
      self.is_waited_for = True

  config = small(tmp_path / "run", "allreduce")
  config.mesh.backend = "vmap"
  backend = Trainer(config).parallel
  losses = [Loss() for _ in range(10)]
  left = iter(losses)
  monkeypatch.setattr(backend, "_placed", lambda batch: batch)
  monkeypatch.setattr(
    backend, "_step", lambda *_: (None, None, {}, {"loss": next(left)})
  )
  for step in range(1, 11):
    backend.step(None, None, None, step)
  waited = [loss.is_waited_for for loss in losses]
  assert waited == [True] * 6 + [False] * 4


def test_hosts_wait_until_the_first_one_has_logged(tmp_path, monkeypatch):
  """A collective fails if one is late, as by its disk or its page."""
  order, wait = [], hosts.wait_for_all
  monkeypatch.setattr(
    hosts, "wait_for_all", lambda name: order.append(name) or wait(name)
  )
  monkeypatch.setattr(RunFolder, "upload", lambda self: order.append("upload"))
  config = small(tmp_path / "run", "allreduce")
  config.steps, config.log_every, config.checkpoint.every = 2, 2, 2
  Trainer(config).run(lambda: order.append("line"))
  assert order[order.index("line") :][:2] == ["line", "logged"]
  assert order[-2:] == ["upload", "synced"]


def test_other_replicas_have_other_counts_of_skipped_steps():
  config = small("run", "allreduce")
  config.mesh.data, config.optimizer.max_consecutive_skips = 4, 10
  line = {"step": 100, "skipped_inner_steps": 50, "identical_gradients": 0}

  def check_of(replicas):
    check = ProgressCheck(config, line, replicas)
    check.check(line | {"step": 110, "skipped_inner_steps": 100})

  check_of(2)  # 25 steps of each of 2 are 25 of each of 4
  with pytest.raises(TrainingStopped, match="10 steps in a row up to step 110"):
    check_of(4)


def test_a_residual_that_grows_is_warned_of_once(capsys):
  check = ProgressCheck(small("run", "topk"))
  for step, windows in ((100, 0), (200, 1), (300, 3)):
    line = {"step": step, "identical_gradients": 0}
    check.check(line | {"new_diverging_windows": windows})
    check.check(line | {"new_diverging_windows": windows})
  (warning,) = capsys.readouterr().err.splitlines()
  assert "by step 300 the residual has grown for 3 windows" in warning


def test_the_larger_config_is_valid(tmp_path):
  """All of gpt2_124m is checked but its devices and token files."""
  config = gpt2_124m.get_config()
  config.run_dir = str(tmp_path / "run")
  config.model.context = 128  # the default corpus is text
  trainer = Trainer(config)
  params = jax.eval_shape(trainer.task.init, jax.random.key(0))
  jax.eval_shape(trainer.tx.init, params)


def diverged_at(trainer, step):
  """Changes one leaf of one replica before a step."""
  run, calls = trainer.parallel.step, []

  def diverging(params, opt_state, batch, number):
    calls.append(number)
    if len(calls) == step:
      leaves, structure = jax.tree.flatten(params)
      parts = [shard.data for shard in leaves[0].addressable_shards]
      parts[1] += 10.0
      leaves[0] = jax.make_array_from_single_device_arrays(
        leaves[0].shape, leaves[0].sharding, parts
      )
      params = jax.tree.unflatten(structure, leaves)
    return run(params, opt_state, batch, number)

  trainer.parallel.step = diverging
  return trainer


def test_replicas_that_diverge_stop_the_run(tmp_path):
  config = small(tmp_path / "run", "allreduce")
  config.sentinel.every = 2
  config.checkpoint.every = 2
  with pytest.raises(TrainingStopped, match=r"At step 5 replicas .*=follow"):
    diverged_at(Trainer(config), step=4).run()
  config.sentinel.action = "follow"  # the remedy that the message names
  Trainer(config).run()


def test_replicas_that_diverge_follow_the_first(tmp_path, capsys):
  config = small(tmp_path / "run", "allreduce")
  config.sentinel.update(every=1, action="follow")
  config.log_every = 1
  diverged_at(Trainer(config), step=4).run()
  assert "At step 4 replicas held different" in capsys.readouterr().out
  lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
  diverged = [json.loads(line)["diverged_steps"] for line in lines]
  assert diverged == [0, 0, 0, 1, 1, 1, 1, 1]
