"""The folder of a run: its files, and what they hold."""

import json
import math
import os
import pathlib
import platform
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from importlib import metadata
from typing import Any

import jax
from flax import traverse_util
from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import Event
from tensorboardX.proto.summary_pb2 import Summary

import edgc_jax
from experiments.trainer.runs.storage import (
  LOCK,
  SCRATCH,
  StoreError,
  storage_of,
)
from experiments.trainer.runtime import hosts
from experiments.trainer.runtime.json_files import read_json

_STOPPED = "stopped.txt"
_SECONDS = 60  # between two writes of events, and two uploads to a bucket
_LIBRARIES = ("jax", "jaxlib", "flax", "optax", "numpy", "grain")

# Keys that may differ between a run and the command that resumes it.
_FREE = ("run_dir", "resume", "log_every", "checkpoint.", "sentinel.",
         "mesh.data", "mesh.fsdp", "mesh.backend", "site.patience",
         "site.least")  # fmt: skip


class RunFolder:
  """A run's folder of config, metrics, TensorBoard events and summary.

  Of several processes the first one writes, to a folder that all can read.
  From its first logged line on, a folder belongs to one configuration. A
  finished run is kept. An interrupted run resumes from its last checkpoint, or
  starts again from the first step if it has none.

  Attributes:
    name: The folder as the user named it.
    storage: Where it is.
    path: The folder itself, or the local copy of one in a bucket.
    checkpoints: Where Orbax writes checkpoints.
    config: The whole configuration.
  """

  def __init__(self, path: str | os.PathLike, config: Mapping[str, Any]):
    """Raises if this run must not use the folder; changes nothing.

    Args:
      path: The folder, or its URL in a bucket; it need not exist.
      config: The whole configuration, as plain nested dictionaries.

    Raises:
      ValueError: if the folder holds a run of another configuration.
      FileExistsError: if it holds other files and no run.
    """
    self.name = os.fspath(path)
    self.storage = storage_of(path)
    self.path = self.storage.path
    self.checkpoints = self.storage.checkpoints
    self.config = config
    self._write_due = 0.0
    if os.path.lexists(self.path) and not self.path.is_dir():
      raise FileExistsError(
        f"`run_dir` must be new or a folder, got {self.name}, which is none;"
        " give another folder with --config.run_dir=FOLDER."
      )
    file = self.path / "config.json"
    if file.exists() and self.is_claimed():
      changes = _differences(self._read("config.json"), _plain(config))
      if changes:
        raise ValueError(
          f"`run_dir` must be new or hold a run of the same configuration, got"
          f" {self.name}, where {'; '.join(changes[:4])}; give another folder"
          " with --config.run_dir=FOLDER, or remove that one. To load only its"
          " parameters, use --config.init_from=FOLDER."
        )
    elif not file.exists() and self.is_claimed():
      raise FileExistsError(
        f"`run_dir` must be new or hold a run, got {self.name}, whose"
        " config.json is missing; restore it, or give another folder with"
        " --config.run_dir=FOLDER."
      )
    elif not file.exists() and self._has_foreign_files():
      raise FileExistsError(
        f"`run_dir` must be new or hold a run, got {self.name}, which holds"
        " other files; give another folder with --config.run_dir=FOLDER."
      )

  def summary(self) -> dict[str, Any] | None:
    """Returns the summary of a finished run, or None."""
    name = "summary.json"
    found = self._read(name) if (self.path / name).exists() else None
    if found is not None and "steps" not in found:
      raise ValueError(
        f"`run_dir` must hold intact files, got {self.name}/{name} without"
        " steps; remove it to continue the run, or give another"
        " --config.run_dir=FOLDER."
      )
    return found

  def lock(self) -> None:
    """Creates the folder, and locks it against other processes until `close`.

    Raises:
      RunInUse: if another process has locked it.
    """
    if hosts.is_first():
      self.storage.lock()

  def start(self, step: int = 0, last_line: int = 0, leaves: str = "") -> None:
    """Removes the lines of later steps, and opens the files.

    Args:
      step: Number of steps done, from which the run resumes.
      last_line: Step of the newest line that was logged by then.
      leaves: Tells how each leaf of the gradient is sent: leaves.txt.
    """
    if not hosts.is_first():
      return
    self.path.mkdir(parents=True, exist_ok=True)
    file = self.path / "metrics.jsonl"
    kept = _lines_up_to(file, step, f"{self.name}/metrics.jsonl")
    newest = json.loads(kept[-1])["step"] if kept else 0
    if newest < last_line:
      print(
        f"warning: {self.name}/metrics.jsonl has lost its lines from step"
        f" {newest} to {last_line}; the run itself is complete",
        file=sys.stderr,
      )
    events = self.path.glob("events.out.tfevents.*")
    for old in (*events, self.path / _STOPPED):
      old.unlink(missing_ok=True)
      self.storage.note_removal(old)
    _write_json(self.path / "config.json", _plain(self.config))
    write(self.path / "leaves.txt", f"{leaves}\n")
    write(file, "".join(kept))
    self._lines = open(file, "a")  # noqa: SIM115
    # Without the queue of `FileWriter`, which hangs the run on a full disk.
    self._events = EventsWriter(str(self.path / "events"))
    for line in kept:  # events of a killed run may be missing
      self._add_event(json.loads(line))

  def is_claimed(self) -> bool:
    """Returns whether a run in this folder has logged its first line."""
    lines = self.path / "metrics.jsonl"
    return self.checkpoints.exists() or (
      lines.exists() and lines.stat().st_size > 0
    )

  def log(self, line: Mapping[str, Any]) -> None:
    """Appends a line to metrics.jsonl and adds its numbers to TensorBoard.

    Raises:
      RunInUse: if another process has taken over a folder in a bucket.
      StorageError: if the local copy of such a folder is no longer whole.
    """
    if hosts.is_first():
      self._log(line)

  def _log(self, line: Mapping[str, Any]) -> None:
    line = _plain(line)
    self._lines.write(json.dumps(line, allow_nan=False) + "\n")
    self._lines.flush()
    self._add_event(line)
    began = time.monotonic()
    if began >= self._write_due:
      self._events.flush()
      self.upload()
      now = time.monotonic()
      # A slow store takes a hundredth of the time at most.
      self._write_due = now + max(_SECONDS, 100 * (now - began))

  def _has_foreign_files(self) -> bool:
    """Returns whether there are files that no run leaves without its config."""
    return self.path.exists() and any(
      p.suffix != SCRATCH and p.name != LOCK for p in self.path.iterdir()
    )

  def _add_event(self, line: Mapping[str, Any]) -> None:
    values = [
      Summary.Value(tag=tag, simple_value=number)
      for name, value in line.items()
      if name != "step"
      for tag, number in _scalars(name, value)
    ]
    self._events.write_event(
      Event(
        wall_time=time.time(), step=line["step"], summary=Summary(value=values)
      )
    )

  def finish(self, summary: Mapping[str, Any]) -> None:
    """Writes the summary, which marks a run as finished."""
    if hosts.is_first():
      _write_json(self.path / "summary.json", _plain(summary))
      self.storage.upload()

  def stop(self, reason: str) -> None:
    """Writes down why the run could not continue."""
    if hosts.is_first():
      write(self.path / _STOPPED, f"{reason}\n")

  def sync(self) -> None:
    """Makes all lines so far survive a crash of the host, if a store answers.

    All processes call it, and none goes on before that.

    Raises:
      RunInUse: if another process has taken over a folder in a bucket.
      StorageError: if the local copy of such a folder is no longer whole.
    """
    if hosts.is_first():
      os.fsync(self._lines.fileno())
      self._events.flush()
      self.upload()
    hosts.wait_for_all("synced")

  def upload(self) -> None:
    """Uploads what has changed; if the store fails, a later call tries again.

    Raises:
      RunInUse: if another process has taken over a folder in a bucket.
      StorageError: if the local copy of such a folder is no longer whole.
    """
    try:
      self.storage.upload()
    except StoreError as error:
      self._warn(error)

  def close(self) -> None:
    """Closes the files and releases the lock."""
    is_open = "_lines" in vars(self)
    for name in ("_lines", "_events"):
      if name in vars(self):
        vars(self).pop(name).close()
    try:
      if is_open:
        self.storage.upload()
    except Exception as error:  # must not hide why the run ends
      self._warn(error)
    self.storage.unlock()

  def _warn(self, error: Exception) -> None:
    print(
      f"warning: {self.name} could not be written: {error}", file=sys.stderr
    )

  def _read(self, name: str) -> dict[str, Any]:
    return read_file(self.path / name, f"{self.name}/{name}")


def stopped(folder: pathlib.Path) -> str:
  """Returns why the run of a folder could not continue, or ""."""
  file = folder / _STOPPED
  return file.read_text().strip() if file.exists() else ""


def environment() -> dict[str, Any]:
  """Returns versions, hardware and commit, to be recorded with a run."""
  device = jax.devices()[0]
  versions = {"edgc-jax": edgc_jax.__version__}
  versions |= {name: metadata.version(name) for name in _LIBRARIES}
  return {
    "python": platform.python_version(),
    "versions": versions,
    # On CPUs both are "cpu".
    "device": " ".join(dict.fromkeys([device.platform, device.device_kind])),
    "cores": os.cpu_count(),
    # Products of matrices that name no precision have this one; "default" is
    # the device's own.
    "matmul_precision": jax.config.jax_default_matmul_precision or "default",
    "commit": commit_of(pathlib.Path(__file__).parent),
  }


def commit_of(folder: pathlib.Path) -> str:
  """Returns the commit of the code, with "-dirty" if files were changed.

  Changes in docs/ and results/ do not count, because results are written there.
  """

  def git(*arguments: str) -> str:
    done = subprocess.run(
      ["git", *arguments], cwd=folder, capture_output=True, text=True,
      check=True,
    )  # fmt: skip
    return done.stdout.strip()

  try:
    commit = git("rev-parse", "--short=12", "HEAD")
    changed = git(
      "diff", "--name-only", "HEAD", "--", ":/", ":(top,exclude)docs",
      ":(top,exclude)results",
    )  # fmt: skip
  except (OSError, subprocess.CalledProcessError):
    return "unknown"
  return f"{commit}-dirty" if changed else commit


def _plain(value: Any) -> Any:
  """Converts to JSON's types; leaves out keys with non-finite numbers."""
  if isinstance(value, Mapping):
    items = {str(k): _plain(v) for k, v in value.items()}
    return {k: v for k, v in items.items() if v is not None}
  if isinstance(value, list | tuple):
    return [_plain(v) for v in value]
  if isinstance(value, str | bool | int) or value is None:
    return value
  number = float(value)
  return number if math.isfinite(number) else None


def _differences(old: dict, new: dict) -> list[str]:
  """Describes each key that differs between two configurations."""
  old, new = (traverse_util.flatten_dict(tree, sep=".") for tree in (old, new))
  return [
    f"{key} is {old.get(key)!r} and not {new.get(key)!r}"
    if key in new
    else f"{key}, which is {old[key]!r}, is no key any more"
    for key in sorted(old.keys() | new.keys())
    if old.get(key) != new.get(key) and not key.startswith(_FREE)
  ]


def _lines_up_to(file: pathlib.Path, step: int, name: str = "") -> list[str]:
  """Returns the complete lines of metrics.jsonl up to and including `step`."""
  if not step or not file.exists():
    return []
  kept, lost = [], 0
  for line in file.read_text(errors="replace").splitlines(keepends=True):
    # A host that crashes may leave half a line, or a line of zeros.
    if not line.endswith("\n"):
      continue
    try:
      if json.loads(line)["step"] <= step:
        kept.append(line)
    except (ValueError, TypeError, KeyError, RecursionError):
      lost += 1
  if lost:
    print(
      f"warning: {name or file} has {lost} damaged lines, which are left out;"
      " the run itself is complete",
      file=sys.stderr,
    )
  return kept


def read_file(file: pathlib.Path, name: str = "") -> dict[str, Any]:
  """Reads a JSON file of a run folder; ValueError if it is damaged.

  Args:
    file: The file, which may be of the local copy of a folder in a bucket.
    name: What the user calls it.
  """
  remedy = "restore it, or give another --config.run_dir=FOLDER"
  return read_json(file, "run_dir", remedy, name=name)


def _write_json(file: pathlib.Path, value: Any) -> None:
  write(file, json.dumps(value, indent=2, allow_nan=False) + "\n")


def write(file: pathlib.Path, text: str) -> None:
  """Writes a temporary file first, so that `file` is never incomplete."""
  scratch = file.with_suffix(SCRATCH)
  with open(scratch, "w", encoding="utf-8") as out:
    out.write(text)
    out.flush()
    os.fsync(out.fileno())
  scratch.replace(file)


def _scalars(name: str, value: Any) -> Iterator[tuple[str, float]]:
  """Yields a value's numbers with tags of their path, stage and matrix."""
  if isinstance(value, dict):
    for path, numbers in value.items():
      yield from _scalars(f"{name}/{path}", numbers)
    return
  by_stage = value if isinstance(value, list) else [value]
  for stage, numbers in enumerate(by_stage):
    tag = f"{name}/stage_{stage}" if len(by_stage) > 1 else name
    if isinstance(numbers, list):
      for matrix, number in enumerate(numbers):
        yield f"{tag}/{matrix}", number
    else:
      yield tag, numbers
