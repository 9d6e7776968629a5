"""Checkpoints of a run: written while it goes on, checked when read.

Orbax writes them, into a folder that gets its name when it is whole, so that a
run which is killed leaves the ones before. Each holds the SHA-256 of its files:
one that was damaged later is told from a sound one, and the one before it used.
"""

import contextlib
import functools
import hashlib
import json
import os
import pathlib
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from jax.experimental import multihost_utils
from orbax.checkpoint import checkpoint_managers

from experiments.stored_state import Stored

_SUMS = "sha256.json"
_TIMES = "_CHECKPOINT_METADATA"  # orbax writes it again later


class CheckpointError(RuntimeError):
  """A checkpoint that could not be written or read, and what to do."""


class Checkpoints:
  """The checkpoints of one run, newest last.

  All processes of a run make one and call the same methods in the same order.
  """

  def __init__(self, path: str | os.PathLike, keep: int):
    """Writes nothing yet.

    Args:
      path: Their folder; made with the first.
      keep: How many of the newest to keep; beside them, the one of the lowest
        held-out loss.
    """
    self.path = pathlib.Path(path).absolute()
    self._keep = keep
    self._saving: int | None = None

  def steps(self) -> list[int]:
    """Steps that there are whole checkpoints of, newest first."""
    if not self.path.is_dir():
      return []
    names = [entry.name for entry in self.path.iterdir() if entry.is_dir()]
    return sorted((int(name) for name in names if name.isdigit()), reverse=True)

  def save(
    self,
    step: int,
    trees: Mapping[str, Stored],
    about: Mapping[str, Any],
    val_loss: float | None,
  ) -> None:
    """Starts to save; returns as soon as the arrays may change.

    Args:
      step: Steps done.
      trees: Arrays of this process's devices, by a name each.
      about: Anything that JSON can hold, the same in all processes.
      val_loss: By which the best is found.

    Raises:
      CheckpointError: if this one or the one before cannot be written.
    """
    self.wait()
    self._saving = step
    metrics = None if val_loss is None else {"val_loss": val_loss}
    with _explained(self.path, step):
      self._manager.save(
        step,
        args=ocp.args.Composite(
          about=ocp.args.JsonSave(dict(about)),
          **{k: ocp.args.PyTreeSave(dict(v)) for k, v in trees.items()},
        ),
        metrics=metrics,
        force=True,
      )

  def wait(self) -> None:
    """Until what is being saved is on disk.

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
    """Waits, and ends what waits for work."""
    self.wait()
    if "_manager" in vars(self):
      self._manager.close()

  def load(
    self, templates: Callable[[Mapping[str, Any]], Mapping[str, Stored]]
  ) -> tuple[int, Mapping[str, Stored], Mapping[str, Any]] | None:
    """The newest checkpoint that is whole.

    Args:
      templates: From what was saved as `about` to the shapes of the arrays
        wanted, by tree; may raise what should stop the run.

    Returns:
      step, arrays by tree and `about`, or None if there are no checkpoints.

    Raises:
      CheckpointError: if there are, and all are damaged.
    """
    steps = self.steps()
    for step in steps:
      damage = self._damage(step)
      if not damage:
        folder = self.path / str(step)
        about = json.loads((folder / "about" / "metadata").read_text())
        trees = {
          name: self._read(folder / name, shapes)
          for name, shapes in templates(about).items()
        }
        return step, trees, about
      if jax.process_index() == 0:
        print(
          f"warning: the checkpoint of step {step} is damaged ({damage}) and"
          " left alone; using the one before it",
          file=sys.stderr,
        )
    if steps:
      raise CheckpointError(
        f"All checkpoints in {self.path} are damaged; start anew with another"
        " --config.run_dir=FOLDER, or remove that folder."
      )
    return None

  def set_aside(self, step: int) -> None:
    """Renames those after `step`, damaged all: they will be written again."""
    if jax.process_index() == 0:
      for newer in self.steps():
        if newer > step:
          os.rename(self.path / str(newer), self.path / f"damaged-{newer}")

  @functools.cached_property
  def _manager(self) -> ocp.CheckpointManager:
    policies = checkpoint_managers
    return ocp.CheckpointManager(
      self.path,
      options=ocp.CheckpointManagerOptions(
        cleanup_tmp_directories=True,
        best_fn=lambda metrics: metrics["val_loss"],
        best_mode="min",
        async_options=ocp.options.AsyncOptions(
          post_finalization_callback=self._write_sums
        ),
        preservation_policy=policies.AnyPreservationPolicy(
          [
            policies.LatestN(self._keep),
            policies.BestN(
              get_metric_fn=lambda metrics: metrics["val_loss"],
              reverse=True,
              n=1,
              keep_checkpoints_without_metrics=False,
            ),
          ]
        ),
      ),
    )

  def _write_sums(self) -> None:
    """Called by orbax before the folder gets its name."""
    if jax.process_index() == 0:
      (folder,) = self.path.glob(f"{self._saving}.orbax-checkpoint-tmp*")
      (folder / _SUMS).write_text(json.dumps(_sums(folder)))

  def _damage(self, step: int) -> str:
    """What is wrong with a checkpoint's files; empty if nothing is."""
    found = ""
    if jax.process_index() == 0:
      found = _difference(self.path / str(step))
    if jax.process_count() > 1:
      word = np.frombuffer(found.encode()[:200].ljust(200), np.uint8)
      word = multihost_utils.broadcast_one_to_all(word)
      found = bytes(np.asarray(word, np.uint8)).decode(errors="replace").strip()
    return found

  def _read(self, folder: pathlib.Path, shapes: Stored) -> Stored:
    args = {
      path: ocp.RestoreArgs(restore_type=np.ndarray, dtype=shape.dtype)
      if shape.sharding is None
      else ocp.ArrayRestoreArgs(
        sharding=shape.sharding, global_shape=shape.shape, dtype=shape.dtype
      )
      for path, shape in shapes.items()
    }
    found = ocp.PyTreeCheckpointHandler().metadata(epath.Path(folder)).tree
    _require_shapes(folder, found, shapes)
    with ocp.PyTreeCheckpointer() as reader:
      return reader.restore(folder, item=dict(shapes), restore_args=args)


def _require_shapes(
  folder: pathlib.Path, found: Stored, shapes: Stored
) -> None:
  """Orbax would cut or fill up what has another shape."""
  for path in sorted({*found, *shapes}):
    has, wants = (
      tuple(tree[path].shape) if path in tree else "none"
      for tree in (found, shapes)
    )
    if has != wants:
      raise CheckpointError(
        f"The checkpoint {folder} must have the arrays of this configuration,"
        f" got {path} of shape {has} instead of {wants}; give the model and"
        " reducer it was made with, or another --config.run_dir=FOLDER."
      )


@contextlib.contextmanager
def _explained(path: pathlib.Path, step: int) -> Iterator[None]:
  """Says of a checkpoint that cannot be written what is left."""
  try:
    yield
  except Exception as error:  # orbax hands on what its threads raised
    cause = error.__cause__ or error
    raise CheckpointError(
      f"The checkpoint of step {step} could not be written to {path}"
      f" ({type(cause).__name__}: {str(cause).splitlines()[0]}); those before"
      " it are whole. Make room or let this user write there, then give the"
      " same command again."
    ) from error


def _difference(folder: pathlib.Path) -> str:
  """In words, between a checkpoint's files and what they were."""
  try:
    expected = json.loads((folder / _SUMS).read_text())
    found = _sums(folder)
  except (OSError, ValueError) as error:
    return f"{type(error).__name__}: {error}"
  wrong = [name for name in expected if expected[name] != found.get(name)]
  if not wrong:
    return ""
  more = f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""
  return f"{wrong[0]}{more} is not what was written"


def _sums(folder: pathlib.Path) -> dict[str, str]:
  files = {str(f.relative_to(folder)): f for f in folder.rglob("*")}
  return {
    name: _sum(file)
    for name, file in sorted(files.items())
    if file.is_file() and name not in (_SUMS, _TIMES)
  }


def _sum(file: pathlib.Path) -> str:
  with open(file, "rb") as opened:
    return hashlib.file_digest(opened, "sha256").hexdigest()
