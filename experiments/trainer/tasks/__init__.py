"""Tasks by name. A file of this folder with a class `TASK` is a task."""

import importlib
import pathlib

from ml_collections import ConfigDict

from experiments.trainer.tasks.base import Task


def names() -> list[str]:
  """Returns the names of all tasks: their files."""
  files = pathlib.Path(__file__).parent.glob("[a-z]*.py")
  return sorted(file.stem for file in files if file.stem != "base")


def make(config: ConfigDict) -> Task:
  """Makes the task that `config.task` names; its data is read when needed.

  Raises:
    ValueError: if the name is unknown, or sizes do not fit.
  """
  if config.task not in names():
    raise ValueError(
      f"`task` must be one of {', '.join(names())}, got {config.task!r}; a file"
      " of that name in experiments/trainer/tasks/ adds one."
    )
  return _class_of(config.task)(config)


def version_of(name: str) -> int | None:
  """Returns the version of a task; None if there is no such task."""
  return _class_of(name).version if name in names() else None


def _class_of(name: str) -> type[Task]:
  return importlib.import_module(f"{__name__}.{name}").TASK
