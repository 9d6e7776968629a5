"""Run folders in buckets, here in one that fsspec keeps in memory."""

import contextlib
import fcntl
import os
import shutil
import tempfile

import chex
import fsspec
import jax
import numpy as np
import pytest
from helpers.cut_runs import config_of, lines_of, newest, run, whole_runs

from experiments import report
from experiments.trainer.runs.checkpoints import CheckpointError, Checkpoints
from experiments.trainer.runs.run_folder import RunFolder
from experiments.trainer.runs.storage import (
  RunInUse,
  StorageError,
  StoreError,
  checksums,
  storage_of,
)
from experiments.trainer.runtime import hosts
from experiments.trainer.training.trainer import Trainer

URL = "memory://runs/one"
FILES, MEMORY = (
  find("memory") for find in (fsspec.filesystem, fsspec.get_filesystem_class)
)


@pytest.fixture
def bucket(tmp_path_factory, monkeypatch):
  """Returns the objects of the folder by name, and empties it afterwards."""
  monkeypatch.setattr(tempfile, "tempdir", str(tmp_path_factory.mktemp("copy")))
  monkeypatch.setattr(hosts, "at_exit", lambda clean_up: None)

  def objects():
    found = FILES.find("/runs/one")
    return {n.removeprefix("/runs/one/"): FILES.cat_file(n) for n in found}

  yield objects
  FILES.store.clear()


@contextlib.contextmanager
def failing(name):
  """Has a method of the store fail, as credentials that have expired do."""

  def fail(*arguments, **options):
    raise Exception("no\ncredentials")

  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(MEMORY, name, fail)
    yield


@contextlib.contextmanager
def before(name, call):
  """Calls a function before each call of a method of the store."""
  own = getattr(MEMORY, name)
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(MEMORY, name, lambda *given: (call(), own(*given))[1])
    yield


def uploaded(**files):
  """Returns a locked folder with these files, which are uploaded."""
  storage = storage_of(URL)
  storage.lock()
  for name, text in files.items():
    (storage.path / name).write_text(text)
  storage.upload()
  return storage


def changed(storage):
  """Changes the file `a`, and removes `b`."""
  (storage.path / "a").write_text("new")
  (storage.path / "b").unlink()
  storage.note_removal(storage.path / "b")
  return storage


def test_only_changes_are_uploaded(bucket):
  storage, puts = storage_of(URL), []
  (storage.path / "a").write_text("one")
  (storage.path / "in").mkdir()
  (storage.path / "in" / "b").write_text("two")
  (storage.path / "half.tmp").write_text("never")
  storage.upload()
  assert bucket() == {"a": b"one", "in/b": b"two"}
  (storage.path / "a").write_text("new")
  (storage.path / "in" / "b").unlink()
  storage.note_removal(storage.path / "in")
  with before("put_file", lambda: puts.append(1)):
    storage.upload()
  assert bucket() == {"a": b"new"} and len(puts) == 1
  assert (storage_of(URL).path / "a").read_text() == "new"


@pytest.mark.parametrize("lost", ["config.json", "."])
def test_what_others_delete_here_stays_in_the_bucket(bucket, lost):
  """As cleaners of /tmp do."""
  storage = storage_of(URL)
  (storage.path / "config.json").write_text("{}")
  (storage.path / "metrics.jsonl").write_text("")
  storage.upload()
  whole = bucket()
  path = storage.path / lost
  shutil.rmtree(path) if path.is_dir() else path.unlink()
  with pytest.raises(StorageError, match=rf"got {URL} .*config.json; set TMP"):
    storage.upload()
  assert bucket() == whole


def test_cleaners_find_the_local_copy_locked(bucket):
  folder = os.open(storage_of(URL).path.parent, os.O_RDONLY)
  with pytest.raises(BlockingIOError):
    fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
  os.close(folder)


def test_urls_that_name_no_store(tmp_path, monkeypatch):
  for url in ("gs://", "s3:///runs/one", "memory://"):
    with pytest.raises(ValueError, match=f"must name a bucket .*got {url}; g"):
      storage_of(url)
  config = config_of(tmp_path, "allreduce", run_dir="nowhere://runs/one")
  with pytest.raises(ValueError, match="got nowhere://runs/one: Protocol not"):
    Trainer(config)
  monkeypatch.setattr(jax, "process_count", lambda: 2)
  with pytest.raises(ValueError, match=r"share, or in a bucket gs://.*memory:"):
    storage_of(URL)


@pytest.mark.parametrize(
  "broken, call",
  [
    ("find", lambda storage: storage_of(URL)),
    ("get_file", lambda storage: storage_of(URL)),
    ("pipe_file", lambda storage: storage.lock()),
    ("cat_file", lambda storage: storage.upload()),
    ("put_file", lambda storage: storage.upload()),
    ("rm_file", lambda storage: storage.upload()),
    ("find", lambda storage: checksums(URL)),
  ],
)
def test_errors_of_a_store(bucket, broken, call):
  """Their types are any, and their messages name nothing that users know."""
  storage = changed(uploaded(a="old", b="old"))
  if broken == "pipe_file":
    storage = storage_of(URL)
  with (
    failing(broken),
    pytest.raises(
      StoreError, match=rf"got {URL} \(Exception: no credentials\); check"
    ),
  ):
    call(storage)


def test_a_report_of_a_store_that_fails():
  with (
    failing("exists"),
    pytest.raises(SystemExit, match=f"error: .*got {URL}"),
  ):
    report.main(["report.py", URL])


def test_whoever_comes_last_has_the_folder(bucket):
  first, second = uploaded(a="first"), uploaded(a="second")
  with pytest.raises(RunInUse, match=rf"got {URL}, which process \d+ on"):
    first.upload()
  second.upload()
  assert bucket()["a"] == b"second"


def test_deletions_ask_again_who_has_the_folder(bucket):
  first = changed(uploaded(a="first", b="first"))
  second = storage_of(URL)
  with before("put_file", second.lock), pytest.raises(RunInUse):
    first.upload()
  assert bucket()["b"] == b"first"


def test_a_folder_that_changes_before_or_while_it_is_locked(bucket):
  late = storage_of(URL)
  first = uploaded(a="first")
  in_use = f"got {URL}, which has changed since"
  with pytest.raises(RunInUse, match=in_use):
    late.lock()
  first.upload()  # goes on
  (first.path / "a").write_text("changed")
  late = storage_of(URL)
  with (
    before("pipe_file", first.upload),
    pytest.raises(RunInUse, match=in_use),
  ):
    late.lock()


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


def test_half_a_checkpoint_is_left_out_until_it_is_replaced(bucket, capsys):
  """A process may be killed while it uploads."""

  def write(storage, step, array):
    folder = storage.checkpoints / str(step)
    folder.mkdir(parents=True)
    (folder / array).write_text("values")
    (folder / "sha256.json").write_text("{}")

  storage = storage_of(URL)
  for step in (1, 2):
    write(storage, step, "array")
  storage.upload()
  FILES.rm_file("/runs/one/checkpoints/2/sha256.json")
  FILES.pipe_file("/runs/one/checkpoints/notes/a", b"of someone")
  before = bucket()
  storage = storage_of(URL)
  assert [path.name for path in storage.checkpoints.iterdir()] == ["1"]
  assert (
    f"warning: {URL}/checkpoints/2 has no sha256" in capsys.readouterr().err
  )
  storage.upload()
  assert bucket() == before
  storage.lock()
  write(storage, 2, "other")
  storage.note_removal(storage.checkpoints / "2")
  storage.upload()
  after = {name for name in bucket() if name.startswith("checkpoints/2/")}
  assert after == {"checkpoints/2/other", "checkpoints/2/sha256.json"}
  assert bucket()["checkpoints/notes/a"] == b"of someone"


def checkpoints_of(storage):
  return Checkpoints(
    storage.checkpoints, 1, f"{URL}/checkpoints", storage.note_removal
  )


def save(*steps):
  """Saves checkpoints of which the newest is kept, as the trainer does."""
  storage = storage_of(URL)
  storage.lock()
  checkpoints = checkpoints_of(storage)
  for step in steps:
    array = jax.device_put(np.float32(step))
    checkpoints.save(step, {"params": {"w": array}}, {"step": step}, None)
    checkpoints.wait()
    storage.upload()
  checkpoints.close()


def test_older_and_damaged_checkpoints(bucket):
  """The older ones are deleted, and damaged ones are set aside."""

  def steps():
    names = [name.split("/") for name in bucket()]
    return {name[1] for name in names if name[0] == "checkpoints"}

  save(1, 2)
  assert steps() == {"2"}
  save(3)
  assert steps() == {"3"}
  FILES.rm_file("/runs/one/checkpoints/3/params/_METADATA")
  damaged = bucket()
  storage = storage_of(URL)
  storage.lock()
  checkpoints = checkpoints_of(storage)
  with pytest.raises(
    CheckpointError, match=f"in {URL}/checkpoints are damaged"
  ):
    checkpoints.newest()
  checkpoints.set_aside()
  storage.upload()
  for name in damaged.keys() - {"lock"}:
    aside = name.replace("checkpoints/3/", "checkpoints/damaged-3/")
    assert bucket()[aside] == damaged[name]
  assert steps() == {"damaged-3"}


@pytest.fixture
def folder(bucket):
  """Returns the folder of a run that has begun."""
  folder = RunFolder(URL, {"steps": 2})
  folder.lock()
  folder.start()
  folder.log({"step": 1, "loss": 1.0})
  folder._write_due = 0.0
  yield folder
  folder.close()


def test_a_run_that_is_superseded_ends_at_its_next_line(folder, capsys):
  storage_of(URL).lock()
  with pytest.raises(RunInUse):
    folder.log({"step": 2, "loss": 1.0})
  folder.close()
  said = capsys.readouterr().err
  assert f"warning: {URL} could not be written: `run_dir` must not be" in said


def test_lines_outlive_a_failure_of_the_store(folder, bucket, capsys):
  with failing("put_file"):
    folder.log({"step": 2, "loss": 1.0})
    assert "Exception: no credentials" in capsys.readouterr().err
    folder.sync()  # a store that is away for a while ends no run
    assert "Exception: no credentials" in capsys.readouterr().err
  folder.sync()
  assert b'"step": 2' in bucket()["metrics.jsonl"]


def test_what_a_store_lacks_at_the_end_stays_here(folder, bucket, capsys):
  storage, copy = folder.storage, folder.storage.path.parent
  with failing("put_file"):
    folder.log({"step": 2, "loss": 1.0})
    with pytest.raises(StoreError):
      folder.finish({"steps": 2})
    folder.close()
  storage._remove(copy)
  assert f"{URL} lacks files of this run, which stay in {copy}" in (
    capsys.readouterr().err
  )
  assert (storage.path / "summary.json").exists()
  storage.upload()
  storage._remove(copy)
  assert not copy.exists() and "summary.json" in bucket()


def test_old_events_are_deleted(folder, bucket):
  folder.stop("because")
  folder.close()
  assert bucket()["stopped.txt"] == b"because\n"
  FILES.pipe_file("/runs/one/events.out.tfevents.0.host", b"old")
  again = RunFolder(URL, {"steps": 2})
  again.lock()
  again.start()
  again.close()
  names = [name for name in bucket() if name.startswith("events")]
  assert len(names) == 1 and not names[0].endswith(".0.host")
  assert "stopped.txt" not in bucket()


def test_damaged_files_are_named_as_in_the_bucket(folder, bucket):
  folder.finish({"steps": 2})
  for text, rule in (("{}", "without steps"), ("[", "which is damaged")):
    FILES.pipe_file("/runs/one/summary.json", text.encode())
    with pytest.raises(ValueError, match=f"got {URL}/summary.json,? {rule}"):
      RunFolder(URL, {"steps": 2}).summary()


@pytest.mark.slow
def test_a_resumed_run_is_the_same(tmp_path, bucket):
  """A run that is cut off resumes on a machine without its local files."""
  expected = whole_runs(tmp_path)("allreduce", "vmap")
  config = config_of(URL, "allreduce", "vmap")
  run(config, cut_after=5)
  assert "checkpoints/4/sha256.json" in bucket()
  trainer = run(config, compiles=False)
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
  config = config_of(tmp_path / "next", "allreduce", "vmap", init_from=URL)
  loss = trainer.folder.summary()["train_loss"]
  assert abs(lines_of(run(config, cut_after=1))[0]["loss"] - loss) < 0.2
