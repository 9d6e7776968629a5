"""Where a run folder is: on a disk, or in a bucket that fsspec reaches.

An object in a bucket can be neither appended to nor renamed nor locked. So a
run writes its files to a local copy of the folder, and uploads those that have
changed, whole: every minute, before each checkpoint and at the end. A killed
run resumes from its newest checkpoint, and loses no line before it. It deletes
from the bucket only what it has itself removed from its copy. It tries a store
that fails again; what the store lacks at the end stays in the copy.

Orbax writes checkpoints to `gs://` by itself, from all processes. It knows no
other store: in any other, a checkpoint is written to the local copy first,
which one process can do and several hosts cannot.
"""

import contextlib
import fcntl
import os
import pathlib
import shutil
import socket
import sys
import tempfile
import urllib.parse
import uuid
from collections.abc import Iterator, Sequence
from typing import Any

import fsspec
import jax
from etils import epath

from experiments.trainer.runtime import hosts
from experiments.trainer.runtime.refusals import one_line

SCRATCH, LOCK = ".tmp", "lock"
SUMS = "sha256.json"  # of a checkpoint
_CHECKPOINTS = "checkpoints"


class RunInUse(RuntimeError):
  """Raised if another process writes to the folder."""


class StorageError(OSError):
  """Raised if a store, or the local copy of a folder in it, fails."""


class StoreError(StorageError):
  """Raised if a store fails; a later try may succeed."""


class Disk:
  """A folder on a disk, perhaps one that several hosts share.

  Attributes:
    path: The folder; it need not exist.
    checkpoints: Where Orbax writes checkpoints.
    copies_checkpoints: Whether `upload` has to follow each checkpoint.
  """

  copies_checkpoints = False

  def __init__(self, path: str | os.PathLike):
    """Changes nothing."""
    self.path = pathlib.Path(path)
    self.checkpoints = self.path / _CHECKPOINTS

  def lock(self) -> None:
    """Creates the folder, and locks it against other processes until `unlock`.

    Raises:
      RunInUse: if another process has locked it.
    """
    self.path.mkdir(parents=True, exist_ok=True)
    self._lock = open(self.path / LOCK, "a+")  # noqa: SIM115
    try:
      fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
      self._lock.seek(0)
      other = self._lock.read() or "another process"
      raise RunInUse(
        f"`run_dir` must not be in use, got {self.path}, where {other} writes;"
        " wait until that run has ended, or stop it."
      ) from None
    except OSError:  # a file system without locks
      return
    self._lock.truncate(0)
    self._lock.write(_this_process())
    self._lock.flush()

  def upload(self) -> None:
    """Does nothing."""

  def note_removal(self, path: str | os.PathLike) -> None:
    """Does nothing: what is removed from a disk is gone."""

  def unlock(self) -> None:
    """Releases the lock."""
    if "_lock" in vars(self):
      vars(self).pop("_lock").close()


class Bucket:
  """A folder in a bucket, of which `path` is a temporary local copy.

  It has the attributes and methods of `Disk`.
  """

  def __init__(self, url: str, with_checkpoints: bool = True):
    """Downloads the folder; checkpoints only if Orbax cannot read them there.

    Args:
      url: Of the folder, which need not exist.
      with_checkpoints: Whether the checkpoints are needed.

    Raises:
      ValueError: if the URL names no bucket, fsspec cannot reach the store, or
        there are several processes and Orbax does not write to it.
      StoreError: if the store does not answer as it should.
    """
    self._url = url.rstrip("/")
    if not urllib.parse.urlsplit(url).netloc:
      raise ValueError(
        "`run_dir` and `init_from` must name a bucket if they are URLs, got"
        f" {url}; give SCHEME://BUCKET/FOLDER, or the path of a folder."
      )
    is_written_by_orbax = url.startswith("gs://")
    self.copies_checkpoints = with_checkpoints and not is_written_by_orbax
    if self.copies_checkpoints and jax.process_count() > 1:
      raise ValueError(
        "`run_dir` and `init_from` must be folders that all hosts share, or in"
        f" a bucket gs://, if there are several processes, got {url}: Orbax"
        " writes arrays to files and to gs:// alone. Mount a shared disk, and"
        " give its folder."
      )
    try:
      with _explained(self._url):
        self._files, self._root = fsspec.core.url_to_fs(self._url)
    except StoreError as error:
      # No package, or no such scheme.
      if not isinstance(error.__cause__, ImportError | ValueError):
        raise
      raise ValueError(
        "A run folder must be on a disk, or in a bucket of a store that fsspec"
        f" reaches, got {url}: {error.__cause__}; install that package, or give"
        " another folder."
      ) from error
    self._owner: str | None = None
    self._is_behind = False  # whether the bucket lacks some of the copy
    folder = tempfile.mkdtemp(prefix="run-")
    hosts.at_exit(lambda: self._remove(folder))
    # systemd removes old files from /tmp, except from locked folders.
    self._folder = os.open(folder, os.O_RDONLY)
    fcntl.flock(self._folder, fcntl.LOCK_SH)
    self.path = pathlib.Path(folder, self._url.rpartition("/")[2])
    self.path.mkdir()
    self.checkpoints = self.path / _CHECKPOINTS
    if is_written_by_orbax:
      self.checkpoints = epath.Path(self._url, _CHECKPOINTS)
    self._removed: set[pathlib.Path] = set()
    self._found = self._objects()
    names = list(filter(self._is_copied, self._found))
    self._download(names)
    # None: in the bucket alone.
    self._uploaded: dict[str, tuple[int, int] | None] = (
      dict.fromkeys(names) | self._versions()
    )

  def lock(self) -> None:
    """Takes the folder over: `upload` fails for whoever had it before.

    Raises:
      RunInUse: if the folder has changed since it was downloaded.
      StoreError: if the store does not answer as it should.
    """
    self._require_unchanged()  # or else the other run may go on
    self._owner = f"{_this_process()} ({uuid.uuid4()})"
    with _explained(self._url):
      self._files.pipe_file(f"{self._root}/{LOCK}", self._owner.encode())
    self._require_unchanged()

  def upload(self) -> None:
    """Uploads changed files, and deletes those that the run has removed.

    Raises:
      RunInUse: if another process has locked the folder since.
      StoreError: if the store does not answer as it should.
      StorageError: if files of the local copy are missing.
    """
    self._is_behind = True
    versions = self._versions()
    gone = self._uploaded.keys() - versions.keys()
    removed = {name for name in gone if self._is_removed(name)}
    lost = [n for n in sorted(gone - removed) if self._uploaded[n]]
    if lost:
      raise StorageError(
        f"`run_dir` must have a local copy that stays whole, got {self._url}"
        f" with {self.path}, which has lost {lost[0]}; set TMPDIR to a folder"
        " that nothing else cleans, and give the same command again."
      )
    self._require_owner()
    # A checkpoint is whole while its checksums are there.
    for name in sorted(versions, key=_is_sums):
      if self._uploaded.get(name) != versions[name]:
        with _explained(self._url):
          self._files.put_file(str(self.path / name), f"{self._root}/{name}")
        self._uploaded[name] = versions[name]
    if removed:
      self._require_owner()  # uploads take long
    for name in sorted(removed, key=_is_sums, reverse=True):
      with _explained(self._url):
        self._files.rm_file(f"{self._root}/{name}")
      del self._uploaded[name]
    self._removed.clear()
    self._is_behind = False

  def note_removal(self, path: str | os.PathLike) -> None:
    """Lets the next upload delete what the run has removed from its copy.

    Args:
      path: A file or a folder of the local copy.
    """
    self._removed.add(pathlib.Path(path))

  def unlock(self) -> None:
    """Does nothing: whoever comes next takes the folder over."""

  def _remove(self, folder: str) -> None:
    """Removes the local copy, unless its last upload has failed."""
    if self._is_behind:
      print(
        f"warning: {self._url} lacks files of this run, which stay in"
        f" {self.path}",
        file=sys.stderr,
      )
    else:
      shutil.rmtree(folder, ignore_errors=True)

  def _download(self, names: Sequence[str]) -> None:
    """Downloads files, but no checkpoints without checksums."""
    whole = tuple(name.removesuffix(SUMS) for name in names if _is_sums(name))
    halves = set()
    for name in names:
      if name.startswith(f"{_CHECKPOINTS}/") and not name.startswith(whole):
        halves.add("/".join(name.split("/")[:2]))
        continue
      file = self.path / name
      file.parent.mkdir(parents=True, exist_ok=True)
      with _explained(self._url):
        self._files.get_file(f"{self._root}/{name}", str(file))
    for half in sorted(halves):
      print(
        f"warning: {self._url}/{half} has no {SUMS}, as if its upload was cut"
        " off, and is not used",
        file=sys.stderr,
      )

  def _require_unchanged(self) -> None:
    """Raises if the folder is not as it was downloaded."""
    if self._objects() != self._found:
      raise RunInUse(
        f"`run_dir` must not be in use, got {self._url}, which has changed"
        " since it was downloaded; let the other run end, or stop it, then give"
        " the same command again."
      )

  def _require_owner(self) -> None:
    """Raises if another process has locked the folder since `lock`."""
    if not self._owner:
      return
    with _explained(self._url):
      owner = self._files.cat_file(f"{self._root}/{LOCK}").decode()
    if owner != self._owner:
      self._is_behind = False  # what is here is no part of that run
      raise RunInUse(
        f"`run_dir` must not be in use, got {self._url}, which {owner} has"
        " taken over; let that run end, or stop it and start this one again."
      )

  def _objects(self) -> dict[str, Any]:
    """Returns what the store says of each object but the lock, by name."""
    start = len(self._root) + 1
    with _explained(self._url):
      self._files.invalidate_cache()
      if not self._files.exists(self._root):
        return {}
      found = self._files.find(self._root, detail=True)
    return {n[start:]: about for n, about in found.items() if n[start:] != LOCK}

  def _versions(self) -> dict[str, tuple[int, int]]:
    """Returns time of change and size of the copied files, by name."""
    found = {}
    for file in sorted(self.path.rglob("*")):
      name = file.relative_to(self.path).as_posix()
      if file.is_file() and self._is_copied(name):
        status = file.stat()
        found[name] = (status.st_mtime_ns, status.st_size)
    return found

  def _is_copied(self, name: str) -> bool:
    if name == LOCK or name.endswith(SCRATCH):
      return False
    return self.copies_checkpoints or not name.startswith(f"{_CHECKPOINTS}/")

  def _is_removed(self, name: str) -> bool:
    file = self.path / name
    return not self._removed.isdisjoint((file, *file.parents))


def storage_of(
  path: str | os.PathLike, with_checkpoints: bool = True
) -> Disk | Bucket:
  """Returns the storage of a run folder.

  Args:
    path: Of a folder on a disk, or the URL of one in a bucket.
    with_checkpoints: Whether the checkpoints are needed.
  """
  if is_bucket(path):
    return Bucket(os.fspath(path), with_checkpoints)
  return Disk(path)


def is_bucket(path: str | os.PathLike) -> bool:
  """Returns whether a path is a URL, as of a folder in a bucket."""
  return "://" in os.fspath(path)


def checksums(folder: epath.Path) -> dict[str, str]:
  """Returns the store's own checksums of the objects in a folder, by name.

  Nothing is downloaded: stores verify what they keep and what they send.

  Raises:
    StoreError: if the store does not answer as it should.
  """
  with _explained(os.fspath(folder)):
    files, root = fsspec.core.url_to_fs(os.fspath(folder))
    files.invalidate_cache()
    found = files.find(root, detail=True)
  return {
    name[len(root) + 1 :]: about["crc32c"] for name, about in found.items()
  }


@contextlib.contextmanager
def _explained(url: str) -> Iterator[None]:
  """Replaces errors of a store, which have types of their own."""
  try:
    yield
  except Exception as error:
    raise StoreError(
      f"`run_dir` and `init_from` must be folders in a store that answers, got"
      f" {url} ({type(error).__name__}: {one_line(error)[:200]}); check the"
      " name, the network, the credentials and the space in TMPDIR, then give"
      " the same command again."
    ) from error


def _is_sums(name: str) -> bool:
  return name.endswith(f"/{SUMS}")


def _this_process() -> str:
  return f"process {os.getpid()} on {socket.gethostname()}"
