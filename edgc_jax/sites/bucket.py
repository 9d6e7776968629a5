"""Objects that several sites read and write: in a bucket, or in a folder.

An object is written once, whole, and never changed; who reads one sees all of
it or nothing. Creation is exclusive: of several sites that create an object,
one succeeds and the others learn of it.
"""

import contextlib
import errno
import logging
import os
import pathlib
import re
import shutil
import time
import uuid
from collections.abc import Callable, Iterable
from typing import Any, Protocol, TypeVar

_LOG = logging.getLogger(__name__)
_FIRST, _LONGEST = 0.5, 30.0  # seconds between two tries
_IN_ALL, _AT_FIRST = 3600.0, 60.0  # seconds of trying, and before any success
_SCRATCH = ".tmp-"
# Trying again changes none of these.
_FINAL = (
  FileExistsError, FileNotFoundError, ImportError, NotImplementedError,
  NotADirectoryError, PermissionError, TypeError, ValueError,
)  # fmt: skip
_FINAL_CODES = (errno.ENOTSUP, errno.EOPNOTSUPP, errno.EROFS)
_Result = TypeVar("_Result")


class Bucket(Protocol):
  """What sites need of a store; paths are relative, with slashes."""

  poll: float  # seconds between two looks

  def create(self, path: str, data: bytes) -> None:
    """Writes a new object; FileExistsError if there is one."""

  def read(self, path: str) -> bytes:
    """Returns an object; FileNotFoundError if there is none."""

  def sizes(self, folder: str) -> dict[str, int]:
    """Returns the bytes of each object of a folder, by its name."""

  def folders(self, folder: str) -> list[str]:
    """Returns the names of the folders in a folder."""

  def remove(self, path: str) -> None:
    """Removes an object or a folder, if it is there."""


class Folder:
  """Objects as files of a folder, perhaps one that several hosts mount."""

  poll = 0.05

  def __init__(self, path: str | os.PathLike):
    """Creates nothing yet."""
    self._root = pathlib.Path(path).absolute()

  def create(self, path: str, data: bytes) -> None:
    final = self._root / path
    final.parent.mkdir(parents=True, exist_ok=True)
    # In the root, which nobody removes.
    scratch = self._root / f"{_SCRATCH}{uuid.uuid4().hex}"
    try:
      with scratch.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
      try:
        os.link(scratch, final)  # unlike a rename it never replaces
      except FileNotFoundError:  # its folder was removed just now
        final.parent.mkdir(parents=True, exist_ok=True)
        os.link(scratch, final)
    finally:
      scratch.unlink(missing_ok=True)

  def read(self, path: str) -> bytes:
    return (self._root / path).read_bytes()

  def sizes(self, folder: str) -> dict[str, int]:
    found = {}
    with contextlib.suppress(FileNotFoundError):
      for entry in os.scandir(self._root / folder):
        if entry.is_file(follow_symlinks=False):
          with contextlib.suppress(FileNotFoundError):  # removed just now
            found[entry.name] = entry.stat().st_size
    return found

  def folders(self, folder: str) -> list[str]:
    with contextlib.suppress(FileNotFoundError):
      entries = os.scandir(self._root / folder)
      return [x.name for x in entries if x.is_dir(follow_symlinks=False)]
    return []

  def remove(self, path: str) -> None:
    target = self._root / path
    if target.is_dir() and not target.is_symlink():
      shutil.rmtree(target, ignore_errors=True)  # follows no links
    else:
      target.unlink(missing_ok=True)


class Store:
  """Objects of a store that fsspec reaches, and that can create exclusively."""

  poll = 1.0

  def __init__(self, url: str):
    """Connects to nothing yet.

    Raises:
      ImportError: if fsspec, or its package for this store, is missing.
    """
    try:
      import fsspec  # only for URLs
    except ImportError as error:
      raise ImportError(
        f"`url` needs fsspec to be in a bucket, got {url}; install"
        " edgc-jax[buckets], or give a folder."
      ) from error
    self._files, self._root = fsspec.core.url_to_fs(
      url.rstrip("/"), skip_instance_cache=True
    )

  def create(self, path: str, data: bytes) -> None:
    self._files.pipe_file(f"{self._root}/{path}", data, mode="create")

  def read(self, path: str) -> bytes:
    return self._files.cat_file(f"{self._root}/{path}")

  def sizes(self, folder: str) -> dict[str, int]:
    return {
      name: about["size"]
      for name, about in self._entries(folder)
      if about["type"] == "file"
    }

  def folders(self, folder: str) -> list[str]:
    found = self._entries(folder)
    return [name for name, about in found if about["type"] == "directory"]

  def remove(self, path: str) -> None:
    with contextlib.suppress(FileNotFoundError):
      self._files.rm(f"{self._root}/{path}", recursive=True)

  def _entries(self, folder: str) -> list[tuple[str, Any]]:
    where = f"{self._root}/{folder}"
    self._files.invalidate_cache()
    with contextlib.suppress(FileNotFoundError):
      found = self._files.ls(where, detail=True)
      named = [(x["name"].rstrip("/").rpartition("/")[2], x) for x in found]
      return [pair for pair in named if pair[0]]
    return []


class Patient:
  """A bucket that tries again if the store fails, for an hour at most."""

  def __init__(self, bucket: Bucket):
    """Wraps a bucket."""
    self._bucket, self.poll = bucket, bucket.poll
    self._has_worked = False

  def create(self, path: str, data: bytes) -> None:
    """As `Bucket.create`; after a lost answer the object may be our own."""
    self._try(f"writing {path}", lambda: self._bucket.create(path, data))

  def read(self, path: str) -> bytes:
    return self._try(f"reading {path}", lambda: self._bucket.read(path))

  def sizes(self, folder: str) -> dict[str, int]:
    return self._try(f"listing {folder}", lambda: self._bucket.sizes(folder))

  def folders(self, folder: str) -> list[str]:
    return self._try(f"listing {folder}", lambda: self._bucket.folders(folder))

  def remove(self, paths: Iterable[str]) -> None:
    """Removes objects or folders; what fails is left, and costs only space."""
    for path in paths:
      try:
        self._bucket.remove(path)
      except Exception as error:
        _LOG.warning("%s could not be removed (%s)", path, error)

  def require_exclusive(self) -> None:
    """Raises a ValueError if the store lets two writers create one object."""
    probe = f"probes/{uuid.uuid4().hex}"
    self.create(probe, b"1")
    try:
      self.create(probe, b"2")
    except FileExistsError:
      return
    finally:
      self.remove([probe])
    raise ValueError(
      "`url` must be of a store that creates objects exclusively, as S3, GCS"
      " and folders do; this one lets two sites write the same object."
    )

  def _try(self, what: str, act: Callable[[], _Result]) -> _Result:
    began, pause = time.monotonic(), _FIRST
    while True:
      try:
        result = act()
      except _FINAL:
        raise
      except Exception as error:  # stores have types of their own
        most = _IN_ALL if self._has_worked else _AT_FIRST
        is_final = getattr(error, "errno", None) in _FINAL_CODES
        if is_final or time.monotonic() - began > most:
          raise
        if pause == _FIRST:
          text = " ".join(f"{type(error).__name__}: {error}".split())[:200]
          _LOG.warning(
            "%s failed and is tried again for up to %.0f s (%s)",
            what, most, text,
          )  # fmt: skip
      else:
        self._has_worked = True
        return result
      time.sleep(pause)
      pause = min(2 * pause, _LONGEST)


def open_bucket(url: str | os.PathLike) -> Patient:
  """Returns the objects below a URL, or below the path of a folder."""
  text = os.fspath(url).removeprefix("file://")
  scheme, colon, rest = text.partition(":")
  if colon and scheme.isalnum() and not re.match("//[^/]", rest):
    raise ValueError(
      f"`url` must be SCHEME://BUCKET/FOLDER or the path of a folder, got"
      f" {text!r}; write ./ before a folder whose name has a colon."
    )
  return Patient(Store(text) if "://" in text else Folder(text))
