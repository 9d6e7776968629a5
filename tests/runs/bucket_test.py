"""Runs in buckets, killed and resumed, are equal to runs on a disk."""

import signal

import fsspec
import numpy as np
import pytest
from helpers import object_stores, soak
from helpers.processes import codes_of, finish, start, start_two, wait_for

slow_store = pytest.mark.soak("experiments/trainer/runs/storage.py")


def files_of(url):
  """Returns a file system without caches, and the path within."""
  return fsspec.core.url_to_fs(url, skip_instance_cache=True)


def wait_for_checkpoint(url, process):
  """Waits until a run in a bucket has a whole checkpoint."""
  files, root = files_of(url)  # to make another one takes as long as a step

  def is_there():
    files.invalidate_cache()
    names = files.find(f"{root}/checkpoints")
    return any(
      name.replace("sha256.json", "commit_success.txt") in names
      for name in names
      if name.endswith("sha256.json")
    )

  wait_for(is_there, process, every=0.1)


def download(url, folder):
  files, root = files_of(url)
  files.get(root, str(folder), recursive=True)
  return folder


@pytest.mark.parametrize(
  "store",
  [object_stores.gs, pytest.param(object_stores.s3, marks=slow_store)],
)
def test_killed_and_resumed(store, whole, tmp_path):
  """The second process has only what is in the bucket."""
  with store() as bucket:
    url = f"{bucket}/one"

    def begin():
      return start(whole.parent / "bucket", f"--config.run_dir={url}")

    process = begin()
    wait_for_checkpoint(url, process)
    process.kill()
    finish(process, -signal.SIGKILL)
    text = finish(begin())
    assert "resuming after step" in text
    assert f"run folder: {url} (see report.html" in text
    assert "compression ratio" in finish(begin())  # the table, at once
    folder = download(url, tmp_path / "one")
  assert not soak.difference(whole, folder)
  names = {path.name for path in whole.iterdir()} - {"lock"}
  events = {name for name in names if name.startswith("events")}
  assert {path.name for path in folder.iterdir()} >= names - events
  assert len([*folder.glob("events.*")]) == len(events)


@slow_store
def test_two_processes_share_a_bucket(whole, tmp_path):
  """Both write their part of each checkpoint, the first all other files."""
  outputs = [tmp_path / f"output_{i}.txt" for i in range(2)]
  with object_stores.gs() as bucket:
    url = f"{bucket}/two"
    options = f"--config.run_dir={url}", "--config.mesh.backend=jit"
    options = whole.parent / "bucket", outputs, *options
    first, second = start_two(*options)
    wait_for_checkpoint(url, first)
    first.terminate()  # the second is told by the first
    stopped = codes_of([first, second])
    assert stopped == [128 + signal.SIGTERM] * 2, outputs[0].read_text()
    assert codes_of(start_two(*options)) == [0, 0], outputs[0].read_text()
    assert "resuming after step" in outputs[0].read_text()
    folder = download(url, tmp_path / "two")
  losses = [
    [line["loss"] for line in soak.lines_of(path)] for path in (folder, whole)
  ]
  np.testing.assert_allclose(losses[0], losses[1], rtol=1e-4)
