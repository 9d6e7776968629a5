"""Checkpoints of a run: saved during training, and verified when read.

Orbax writes a checkpoint to a temporary folder and renames it once it is
complete, or, in a bucket, marks it as complete; so a killed run keeps the
earlier ones. Each checkpoint holds the SHA-256 of its files, or the checksums
of its objects. They detect damaged checkpoints; training falls back to the
previous one.
"""

import contextlib
import copy
import functools
import hashlib
import itertools
import json
import math
import os
import pathlib
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from jax.experimental import multihost_utils
from orbax.checkpoint import checkpoint_managers

from experiments.trainer.parallel.stored_state import Stored
from experiments.trainer.runs import storage
from experiments.trainer.runtime import hosts

_NONE, _ALL_DAMAGED = -1, -2  # instead of a step
_ABOUT = "about/metadata"
_TIMES = "_CHECKPOINT_METADATA"  # orbax rewrites it after the checksums


class CheckpointError(RuntimeError):
  """Raised if a checkpoint cannot be written or read."""


class Checkpoints:
  """The checkpoints of one run, newest last.

  All processes of a run create this object and call the same methods in the
  same order.
  """

  def __init__(
    self,
    path: str | os.PathLike,
    keep: int,
    name: str = "",
    note_removal: Callable[[epath.Path], None] = lambda folder: None,
  ):
    """Writes nothing yet.

    Args:
      path: The folder of the checkpoints, which may be in a bucket that Orbax
        writes to; created with the first.
      keep: Number of newest checkpoints to keep, in addition to the one with
        the lowest score.
      name: What the user calls the folder, if `path` is its local copy.
      note_removal: Called with the folder of each checkpoint that is removed,
        renamed or about to be replaced.
    """
    self.path = epath.Path(
      path if storage.is_bucket(path) else os.path.abspath(path)
    )
    self._keep = keep
    self._name = name or str(self.path)
    self._note_removal = note_removal
    self._saving: int | None = None
    self._items: set[str] = set()
    self._damaged: list[int] = []

  def steps(self) -> list[int]:
    """Returns the steps of the complete checkpoints, newest first."""
    if not self.path.is_dir():
      return []
    # Neither other files nor other ways to write a number.
    found = [
      entry
      for entry in self.path.iterdir()
      if entry.is_dir() and re.fullmatch(r"0|[1-9][0-9]*", entry.name)
    ]
    steps = (int(e.name) for e in found if ocp.utils.is_checkpoint_finalized(e))
    return sorted(steps, reverse=True)

  def save(
    self,
    step: int,
    trees: Mapping[str, Stored],
    about: Mapping[str, Any],
    score: float | None,
  ) -> None:
    """Starts to save; returns once the arguments may be changed.

    Args:
      step: Number of steps done.
      trees: Trees of arrays on this process's devices, by name.
      about: Values that JSON can hold, the same in all processes.
      score: The best checkpoint has the least; None if not evaluated.

    Raises:
      CheckpointError: if this checkpoint or the previous one cannot be written.
    """
    self.wait()
    self._saving, self._items = step, {"about", *trees}
    is_known = score is not None and math.isfinite(score)
    metrics = {"score": score} if is_known else None
    about = copy.deepcopy(dict(about))  # Orbax's thread reads it later.
    with _explained(self.path, step):
      before = set(self._manager.all_steps())
      self._manager.save(
        step,
        args=ocp.args.Composite(
          about=ocp.args.JsonSave(about),
          **{k: ocp.args.PyTreeSave(dict(v)) for k, v in trees.items()},
        ),
        metrics=metrics,
        force=True,
      )
    removed = before - set(self._manager.all_steps())
    for old in removed | {step}:
      self._note_removal(self.path / str(old))

  def wait(self) -> None:
    """Waits until the checkpoint being saved is on disk.

    Raises:
      CheckpointError: if it could not be written.
    """
    if self._saving is not None:
      try:
        with _explained(self.path, self._saving):
          self._manager.wait_until_finished()
      finally:
        self._saving = None

  def close(self) -> None:
    """Waits, and ends Orbax's threads."""
    self.wait()
    if "_manager" in vars(self):
      self._manager.close()

  def newest(self) -> tuple[int, Mapping[str, Any]] | None:
    """Verifies all checkpoints and finds the newest undamaged one.

    Returns:
      Its step and `about`, or None if there are no checkpoints.

    Raises:
      CheckpointError: if all checkpoints are damaged.
    """
    step = self._newest_step() if hosts.is_first() else 0
    if jax.process_count() > 1:  # one process reads the files for all
      hosts.wait_for_all("checked")
      step = int(multihost_utils.broadcast_one_to_all(np.int32(step)))
    if step == _ALL_DAMAGED:
      raise CheckpointError(
        f"All checkpoints in {self._name} are damaged; train again in another"
        " folder."
      )
    if step == _NONE:
      return None
    return step, json.loads((self.path / str(step) / _ABOUT).read_text())

  def load(
    self, step: int, shapes: Mapping[str, Stored]
  ) -> Mapping[str, Stored]:
    """Loads arrays of a checkpoint.

    Args:
      step: From `newest`.
      shapes: Shapes of the arrays to load, by tree.

    Returns:
      The arrays, by tree.

    Raises:
      CheckpointError: if the checkpoint's arrays have other shapes.
    """
    self.require_shapes(step, shapes)
    folder = self.path / str(step)
    with ocp.PyTreeCheckpointer() as reader:
      return {
        name: reader.restore(
          folder / name,
          item=dict(wanted),
          restore_args={k: _restore_args(x) for k, x in wanted.items()},
        )
        for name, wanted in shapes.items()
      }

  def require_shapes(self, step: int, shapes: Mapping[str, Stored]) -> None:
    """Raises unless a checkpoint's arrays have these shapes.

    Orbax would cut or pad the arrays.

    Args:
      step: From `newest`.
      shapes: Required shapes, by tree.

    Raises:
      CheckpointError: if the checkpoint's arrays have other shapes.
    """
    handler = ocp.PyTreeCheckpointHandler()
    for name, wanted in shapes.items():
      folder = self.path / str(step) / name
      found = handler.metadata(epath.Path(folder)).tree
      place = f"{self._name}/{step}/{name}"
      for path in sorted({*found, *wanted}):
        has, wants = (
          tuple(tree[path].shape) if path in tree else "none"
          for tree in (found, wanted)
        )
        if has != wants:
          raise CheckpointError(
            f"The checkpoint {place} must have the arrays of this"
            f" configuration, got {path} of shape {has} instead of {wants};"
            " give the model and reducer it was made with, or another"
            " --config.run_dir=FOLDER."
          )

  def set_aside(self) -> None:
    """Renames the checkpoints that `newest` found damaged.

    Their steps can then be saved again.
    """
    for step in self._damaged:
      names = (f"damaged-{step}-{i}" for i in itertools.count(2))
      names = itertools.chain([f"damaged-{step}"], names)
      free = (self.path / n for n in names if not (self.path / n).exists())
      (self.path / str(step)).rename(next(free))
      self._note_removal(self.path / str(step))
    self._damaged = []

  @functools.cached_property
  def _manager(self) -> ocp.CheckpointManager:
    policies = checkpoint_managers
    return _Manager(
      self.path,
      options=ocp.CheckpointManagerOptions(
        cleanup_tmp_directories=True,
        best_fn=lambda metrics: metrics["score"],
        best_mode="min",
        async_options=ocp.options.AsyncOptions(
          post_finalization_callback=self._write_sums
        ),
        preservation_policy=policies.AnyPreservationPolicy(
          [
            policies.LatestN(self._keep),
            policies.BestN(
              get_metric_fn=lambda metrics: metrics["score"],
              reverse=True,
              n=1,
              keep_checkpoints_without_metrics=False,
            ),
          ]
        ),
      ),
      handler_registry=_handlers(),
    )

  def _write_sums(self) -> None:
    """Writes the checksums; orbax completes the checkpoint after it."""
    if hosts.is_first():
      final = self.path / str(self._saving)
      temporary = self.path.glob(f"{self._saving}.orbax-checkpoint-tmp*")
      folder = next(temporary, final)  # a bucket has no temporary folders
      sums = _sums(folder)
      missing = self._items - {name.partition("/")[0] for name in sums}
      if missing:
        raise OSError(f"{sorted(missing)} are not in {folder}")
      (folder / storage.SUMS).write_text(json.dumps(sums))

  def _newest_step(self) -> int:
    """Returns the step of the newest undamaged one; warns of damaged ones."""
    found = {step: _damage_of(self.path / str(step)) for step in self.steps()}
    self._damaged = [step for step, damage in found.items() if damage]
    for step in self._damaged:
      print(
        f"warning: the checkpoint of step {step} is damaged ({found[step]}) and"
        " is not used",
        file=sys.stderr,
      )
    whole = [step for step in found if step not in self._damaged]
    return max(whole, default=_ALL_DAMAGED if found else _NONE)


def _handlers() -> ocp.DefaultCheckpointHandlerRegistry:
  """Returns what writes trees of arrays, without keys of `jax.random`."""
  types, found = ocp.type_handlers, ocp.DefaultCheckpointHandlerRegistry()
  if jax.process_count() == 1:
    # Otherwise Orbax cuts arrays that several devices hold, so that hosts can
    # share the writing. It compiles a program for each array and device, which
    # takes seconds.
    whole = types.ArrayHandler(use_replica_parallel=False)
    own = types.create_type_handler_registry(
      (np.ndarray, types.NumpyHandler()), (jax.Array, whole)
    )
    trees = ocp.PyTreeCheckpointHandler(type_handler_registry=own)
    found.add(None, ocp.args.PyTreeSave, trees)
  return found


def _restore_args(leaf: jax.ShapeDtypeStruct) -> ocp.RestoreArgs:
  """Reads an array without a sharding as a whole."""
  if leaf.sharding is None:
    return ocp.RestoreArgs(restore_type=np.ndarray, dtype=leaf.dtype)
  return ocp.ArrayRestoreArgs(
    sharding=leaf.sharding, global_shape=leaf.shape, dtype=leaf.dtype
  )


@contextlib.contextmanager
def _explained(path: epath.Path, step: int) -> Iterator[None]:
  """Replaces errors of writing a checkpoint by a `CheckpointError`."""
  try:
    yield
  except Exception as error:  # orbax re-raises errors of its threads
    cause = error.__cause__ or error
    is_late = isinstance(cause, TimeoutError)  # another process is late
    # Tensorstore's message contains the system's error code.
    code = re.search(r"os_error_code='(\d+)'", str(cause))
    is_remote = storage.is_bucket(path) and str(path) in str(cause)
    if is_late or not (code or is_remote or isinstance(cause, OSError)):
      raise
    text = os.strerror(int(code[1])) if code else str(cause)[:200]
    raise CheckpointError(
      f"The checkpoint of step {step} could not be written to {path} ({text});"
      " earlier checkpoints are intact. Free some space or give this user"
      " write access, then give the same command again."
    ) from error


class _Manager(ocp.CheckpointManager):
  """A manager that leaves preemption to the run, which asks at every step."""

  def reached_preemption(self, step: int) -> bool:
    """Returns False: asking about an old step resets the runtime's count."""
    del step
    return False


def _damage_of(folder: epath.Path) -> str:
  """Describes damage to a folder's files; empty if there is none."""
  try:
    expected = json.loads((folder / storage.SUMS).read_text())
    if not isinstance(expected, dict) or _ABOUT not in expected:
      return f"{storage.SUMS} lacks {_ABOUT}"
    found = _sums(folder)
  except storage.StoreError:  # does not tell what is there
    raise
  except (OSError, ValueError, RecursionError) as error:
    return f"{type(error).__name__}: {error}"
  wrong = [name for name in expected if expected[name] != found.get(name)]
  if not wrong:
    return ""
  more = f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""
  return f"wrong checksum of {wrong[0]}{more}"


def _sums(folder: epath.Path) -> dict[str, str]:
  if storage.is_bucket(folder):
    sums = storage.checksums(folder)
  else:
    files = (f for f in pathlib.Path(folder).rglob("*") if f.is_file())
    sums = {str(f.relative_to(folder)): _sum(f) for f in files}
  return {
    k: v for k, v in sorted(sums.items()) if k not in (storage.SUMS, _TIMES)
  }


def _sum(file: pathlib.Path) -> str:
  with open(file, "rb") as opened:
    return hashlib.file_digest(opened, "sha256").hexdigest()
