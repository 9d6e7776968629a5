"""Reads files of JSON that others may have damaged."""

import json
import os
import pathlib
from typing import Any


def read_json(
  file: str | os.PathLike,
  argument: str,
  remedy: str,
  kind: type = dict,
  name: str = "",
) -> Any:
  """Reads a file that holds one value of JSON.

  Args:
    file: The file.
    argument: Name of the argument that led to it, for the error.
    remedy: What the user can do, for the error.
    kind: Type of the value: an object or a list.
    name: Name of the file for the error, if it is another than its path.

  Raises:
    ValueError: if there is no such value.
  """
  try:
    value = json.loads(pathlib.Path(file).read_text("utf-8"))
  except (ValueError, OSError, RecursionError) as error:
    text = f"{type(error).__name__}: {error}"
  else:
    if isinstance(value, kind):
      return value
    text = f"{type(value).__name__} in place of {kind.__name__}"
  raise ValueError(
    f"`{argument}` must hold intact files, got {name or file}, which is damaged"
    f" ({text}); {remedy}."
  )
