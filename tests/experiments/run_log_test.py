"""Logs of steps and of their times."""

import subprocess
import types

import numpy as np
import pytest

from configs import gpt2_tiny
from experiments.trainer import tasks
from experiments.trainer.runs.run_folder import RunFolder, commit_of
from experiments.trainer.training import run_log

CONFIG = gpt2_tiny.get_config("powersgd")
TASK = tasks.make(CONFIG)


@pytest.fixture
def log_of(tmp_path, monkeypatch):
  """Makes a log whose clock is moved by hand, as `now`."""
  clock = types.SimpleNamespace(now=100.0, monotonic=lambda: clock.now)
  monkeypatch.setattr(run_log, "time", clock)
  folder = RunFolder(tmp_path, CONFIG.to_dict())
  return lambda *state: (run_log.RunLog(folder, CONFIG, TASK, *state), clock)


def take_steps(log, clock, count, seconds, sent=1.0):
  for _ in range(count):
    log.begin_step()
    clock.now += seconds
    values = {"loss": 2.0, "diverged_steps": 0, "rank": [8, 8]}
    values["wire_bytes"] = [sent, 2 * sent]
    log.add({name: np.array(x) for name, x in values.items()})
  return log.state()


def test_step_time_excludes_the_time_between_steps(log_of):
  log, clock = log_of()
  take_steps(log, clock, 1, 50.0)  # compiles
  assert "step_seconds" not in log.summary()
  for seconds in (2.0, 3.0, 9.0):
    take_steps(log, clock, 4, seconds)
    clock.now += 1000.0  # evaluates
    log.state()  # a checkpoint with nothing new
  assert log.summary()["step_seconds"] == 3.0


def test_totals_survive_a_restart(log_of):
  log, clock = log_of()
  take_steps(log, clock, 2, 50.0)
  state = take_steps(log, clock, 2, 3.0, sent=5.0)
  log, _ = log_of(state)
  take_steps(log, clock, 4, 50.0)  # compiles again
  summary = log.summary()
  assert summary["peak_wire_bytes_per_step"] == 15.0
  assert summary["wire_bytes_per_step"] == [16 / 8, 32 / 8]
  assert summary["step_seconds"] == 3.0


def test_steps_that_are_not_finite_are_no_part_of_a_mean():
  assert run_log._mean([1.0, np.nan, 3.0, np.inf]) == 2.0
  assert np.isnan(run_log._mean([np.nan, np.inf]))


def test_the_commit_is_of_the_code(tmp_path):
  """Results and pages do not make it dirty."""
  git = ("git", "-c", "user.name=a", "-c", "user.email=a@b")
  for name in ("code/a.py", "docs/page.md", "results/new.json"):
    (tmp_path / name).parent.mkdir()
    (tmp_path / name).write_text("before")
  assert commit_of(tmp_path / "code") == "unknown"
  for arguments in (["init"], ["add", "."], ["commit", "-m", "first"]):
    subprocess.run([*git, *arguments], cwd=tmp_path, check=True)
  commit = commit_of(tmp_path / "code")
  assert len(commit) == 12
  for name in ("docs/page.md", "results/new.json"):
    (tmp_path / name).write_text("after")
  assert commit_of(tmp_path / "code") == commit
  (tmp_path / "code/a.py").write_text("after")
  assert commit_of(tmp_path / "code") == f"{commit}-dirty"
