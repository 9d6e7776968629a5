"""Run folders in buckets, here in one that fsspec keeps in memory."""

import chex
import fsspec
import jax
import pytest
from helpers.cut_runs import config_of, lines_of, newest, run, whole_runs

from experiments.runs.storage import RunInUse, storage_of
from experiments.training.trainer import Trainer

URL = "memory://runs/one"


@pytest.fixture
def bucket():
  """Returns the objects of the folder by name, and empties it afterwards."""
  files = fsspec.filesystem("memory")

  def objects():
    found = files.find("/runs/one")
    return {n.removeprefix("/runs/one/"): files.cat_file(n) for n in found}

  yield objects
  files.store.clear()


def test_only_changes_are_uploaded(bucket, monkeypatch):
  storage = storage_of(URL)
  (storage.path / "a").write_text("one")
  (storage.path / "in").mkdir()
  (storage.path / "in" / "b").write_text("two")
  (storage.path / "half.tmp").write_text("never")
  storage.upload()
  assert bucket() == {"a": b"one", "in/b": b"two"}
  uploaded, put_file = [], fsspec.get_filesystem_class("memory").put_file
  monkeypatch.setattr(
    fsspec.get_filesystem_class("memory"),
    "put_file",
    lambda self, *names: uploaded.append(names) or put_file(self, *names),
  )
  (storage.path / "a").write_text("new")
  (storage.path / "in" / "b").unlink()
  storage.upload()
  assert bucket() == {"a": b"new"}
  assert len(uploaded) == 1
  assert (storage_of(URL).path / "a").read_text() == "new"


def test_whoever_comes_last_has_the_folder(bucket):
  first, second = storage_of(URL), storage_of(URL)
  first.lock()
  (first.path / "a").write_text("first")
  first.upload()
  second.lock()
  with pytest.raises(RunInUse, match=rf"got {URL}, which process \d+ on"):
    first.upload()
  (second.path / "a").write_text("second")
  second.upload()
  assert bucket()["a"] == b"second"


def test_a_folder_without_its_checkpoints(bucket):
  storage = storage_of(URL)
  (storage.path / "checkpoints").mkdir()
  (storage.path / "checkpoints" / "x").write_text("large")
  storage.upload()
  report = storage_of(URL, with_checkpoints=False)
  (report.path / "report.html").write_text("page")
  report.upload()
  assert not (report.path / "checkpoints").exists()
  assert bucket() == {"checkpoints/x": b"large", "report.html": b"page"}


def test_half_a_checkpoint_is_left_out_and_deleted(bucket):
  """A process may be killed while it uploads."""
  storage = storage_of(URL)
  for step in (1, 2):
    folder = storage.checkpoints / str(step)
    folder.mkdir(parents=True)
    (folder / "array").write_text("values")
    (folder / "sha256.json").write_text("{}")
  storage.upload()
  whole = bucket()
  fsspec.filesystem("memory").rm_file("/runs/one/checkpoints/2/sha256.json")
  storage = storage_of(URL)
  assert [path.name for path in storage.checkpoints.iterdir()] == ["1"]
  storage.upload()
  assert bucket().keys() == {n for n in whole if n.startswith("checkpoints/1")}


def test_stores_that_cannot_be_reached(tmp_path):
  config = config_of(tmp_path, "allreduce", run_dir="nowhere://runs/one")
  with pytest.raises(ValueError, match="got nowhere://runs/one: Protocol not"):
    Trainer(config)


def test_several_processes_need_gs(monkeypatch):
  monkeypatch.setattr(jax, "process_count", lambda: 2)
  with pytest.raises(ValueError, match=r"share, or in a bucket gs://.*memory:"):
    storage_of(URL)


@pytest.mark.slow
def test_a_resumed_run_is_the_same(tmp_path, bucket):
  """A run that is cut off resumes on a machine without its local files."""
  expected = whole_runs(tmp_path)("powersgd", "pmap")
  config = config_of(URL, "powersgd")
  run(config, cut_after=5)
  assert "checkpoints/4/sha256.json" in bucket()
  trainer = run(config)
  assert trainer.folder.name == URL
  assert lines_of(trainer) == lines_of(expected)
  step, arrays = newest(trainer)
  assert step == config.steps
  chex.assert_trees_all_equal(arrays, newest(expected)[1])
  local = {p.name for p in expected.folder.path.iterdir()}
  names = {name.partition("/")[0] for name in bucket()}
  without_events = {n for n in local if not n.startswith("events")}
  assert names >= without_events
  assert any(name.startswith("events") for name in names)
  # Only parameters, for a run on a disk.
  config = config_of(tmp_path / "next", "allreduce", init_from=URL)
  loss = trainer.folder.summary()["train_loss"]
  assert abs(lines_of(run(config))[0]["loss"] - loss) < 0.2
