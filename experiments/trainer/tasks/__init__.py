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
    ValueError: if the name is unknown, sizes do not fit, or the task lacks
      what the trainer reads.
  """
  if config.task not in names():
    raise ValueError(
      f"`task` must be one of {', '.join(names())}, got {config.task!r}; a file"
      " of that name in experiments/trainer/tasks/ adds one."
    )
  task = _class_of(config.task)(config)
  for name in ("row", "source"):
    if not hasattr(task, name):
      raise ValueError(
        f"`{name}` must be an attribute of the task {config.task!r}, got none;"
        f" set self.{name} in its __init__, as tasks/base.py describes it."
      )
  return task


def version_of(name: str) -> int | None:
  """Returns the version of a task; None if there is no such task."""
  return _class_of(name).version if name in names() else None


def _class_of(name: str) -> type[Task]:
  found = getattr(importlib.import_module(f"{__name__}.{name}"), "TASK", None)
  if not (isinstance(found, type) and issubclass(found, Task)):
    raise ValueError(
      f"`TASK` must be the task's class in experiments/trainer/tasks/{name}.py,"
      f" got {found!r}; end that file with TASK = YourTask."
    )
  return found
