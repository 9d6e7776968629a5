"""Tasks by name. A file of this folder with a class `TASK` is a task."""

import importlib
import pathlib

from ml_collections import ConfigDict

from experiments.tasks.base import Task


def names() -> list[str]:
  """Returns the names of all tasks: their files."""
  files = pathlib.Path(__file__).parent.glob("[a-z]*.py")
  return sorted(file.stem for file in files if file.stem != "base")


def make(config: ConfigDict) -> Task:
  """Makes the task that `config.task` names, and loads its data.

  Raises:
    ValueError: if the name is unknown, or sizes or data do not fit.
    FileNotFoundError: if there is no data at `data.path`.
  """
  if config.task not in names():
    raise ValueError(
      f"`task` must be one of {', '.join(names())}, got {config.task!r}; a file"
      " of that name in experiments/tasks/ adds one."
    )
  return importlib.import_module(f"{__name__}.{config.task}").TASK(config)
