"""Where a run folder is: on a disk, or in a bucket that fsspec reaches.

An object in a bucket can be neither appended to nor renamed nor locked. So a
run writes its files to a local copy of the folder, and uploads those that have
changed, whole: every minute, before each checkpoint and at the end. A killed
run resumes from its newest checkpoint, and loses no line before it.

Orbax writes checkpoints to `gs://` by itself, from all processes. It knows no
other store: in any other, a checkpoint is written to the local copy first,
which one process can do and several hosts cannot.
"""

import atexit
import fcntl
import os
import pathlib
import shutil
import socket
import tempfile
import uuid
from collections.abc import Callable, Sequence

import fsspec
import jax
from etils import epath

SCRATCH, LOCK = ".tmp", "lock"
SUMS = "sha256.json"  # of a checkpoint
_CHECKPOINTS = "checkpoints"


class RunInUse(RuntimeError):
  """Raised if another process writes to the folder."""


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
      ValueError: if fsspec cannot reach the store, or there are several
        processes and Orbax does not write to it.
    """
    self._url = url.rstrip("/")
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
      self._files, self._root = fsspec.core.url_to_fs(self._url)
    except (ImportError, ValueError) as error:  # no package, or no such scheme
      raise ValueError(
        "A run folder must be on a disk, or in a bucket of a store that fsspec"
        f" reaches, got {url}: {error}; install that package, or give another"
        " folder."
      ) from error
    folder = tempfile.mkdtemp(prefix="run-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    self.path = pathlib.Path(folder, self._url.rpartition("/")[2])
    self.path.mkdir()
    self.checkpoints = self.path / _CHECKPOINTS
    if is_written_by_orbax:
      self.checkpoints = epath.Path(self._url, _CHECKPOINTS)
    self._owner: str | None = None
    names = self._names()
    for name in filter(self._is_whole(names), names):
      file = self.path / name
      file.parent.mkdir(parents=True, exist_ok=True)
      self._files.get_file(f"{self._root}/{name}", str(file))
    # The next upload deletes what was left out.
    self._uploaded = dict.fromkeys(names) | self._versions()

  def lock(self) -> None:
    """Takes the folder over: `upload` fails for whoever had it before."""
    self._owner = f"{_this_process()} ({uuid.uuid4()})"
    self._files.pipe_file(f"{self._root}/{LOCK}", self._owner.encode())

  def upload(self) -> None:
    """Uploads changed files, and deletes those that are no longer there.

    Raises:
      RunInUse: if another process has locked the folder since.
    """
    if self._owner:
      owner = self._files.cat_file(f"{self._root}/{LOCK}").decode()
      if owner != self._owner:
        raise RunInUse(
          f"`run_dir` must not be in use, got {self._url}, which {owner} has"
          " taken over; let that run end, or stop it and start this one again."
        )
    versions = self._versions()
    # A checkpoint is whole while its checksums are there.
    for name in sorted(versions, key=_is_sums):
      if self._uploaded.get(name) != versions[name]:
        self._files.put_file(str(self.path / name), f"{self._root}/{name}")
        self._uploaded[name] = versions[name]
    gone = self._uploaded.keys() - versions.keys()
    for name in sorted(gone, key=_is_sums, reverse=True):
      self._files.rm_file(f"{self._root}/{name}")
      del self._uploaded[name]

  def unlock(self) -> None:
    """Does nothing: whoever comes next takes the folder over."""

  def _names(self) -> list[str]:
    """Returns the names of the objects that the local copy holds, too."""
    self._files.invalidate_cache()
    if not self._files.exists(self._root):
      return []
    start = len(self._root) + 1
    names = (found[start:] for found in self._files.find(self._root))
    return [name for name in names if self._is_copied(name)]

  def _is_whole(self, names: Sequence[str]) -> Callable[[str], bool]:
    """Returns whether a file belongs to no checkpoint, or to a whole one."""
    whole = tuple(name.removesuffix(SUMS) for name in names if _is_sums(name))
    return lambda name: (
      not name.startswith(f"{_CHECKPOINTS}/") or name.startswith(whole)
    )

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
  """
  files, root = fsspec.core.url_to_fs(os.fspath(folder))
  files.invalidate_cache()
  found = files.find(root, detail=True)
  return {
    name[len(root) + 1 :]: about["crc32c"] for name, about in found.items()
  }


def _is_sums(name: str) -> bool:
  return name.endswith(f"/{SUMS}")


def _this_process() -> str:
  return f"process {os.getpid()} on {socket.gethostname()}"
