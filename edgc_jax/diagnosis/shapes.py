"""Reads the shapes of a model's parameters from text."""

import json
import pathlib
import re
from typing import Any

import jax

from edgc_jax import validation

_MATRICES = re.compile(r"(\d+)x(\d+)(?:x(\d+))?")
_MOST = 10**7
_REMEDY = (
  "give ROWSxCOLUMNS or ROWSxCOLUMNSxCOUNT, as in 1024x4096x24,50257x1024, or a"
  " file of json.dumps(jax.tree.map(jax.numpy.shape, params))"
)


def shapes_of(text: str) -> Any:
  """Returns parameters without values, for `describe` and `advise`.

  Args:
    text: Matrices separated by commas, ROWSxCOLUMNS or, for several of the same
      shape, ROWSxCOLUMNSxCOUNT. Or the name of a JSON file that ends in .json:
      a tree of lists and objects, with a list of integers for each array, as
      `json.dumps(jax.tree.map(jax.numpy.shape, params))` writes it.

  Returns:
    A tree of float32 `jax.ShapeDtypeStruct`s.

  Raises:
    ValueError: if the text is neither, or the file is missing or has no shapes.

  >>> shapes_of("8x4x2,16x8")["0: 8x4x2"][1].shape
  (8, 4)
  """
  if not text.endswith(".json"):
    parts = [part.strip() for part in text.split(",")]
    return {f"{i}: {one}": _matrices(one) for i, one in enumerate(parts)}
  try:
    tree = json.loads(pathlib.Path(text).read_text())
  except (OSError, ValueError, RecursionError) as error:
    raise ValueError(
      f"`shapes` must be a JSON file that can be read, got {text!r} ({error});"
      f" {_REMEDY}."
    ) from error
  shapes = jax.tree.map(_struct, tree, is_leaf=_is_shape)
  validation.require(
    bool(jax.tree.leaves(shapes)),
    "shapes",
    text,
    "a file with a shape of an array",
    _REMEDY,
  )
  return shapes


def _matrices(text: str) -> list[jax.ShapeDtypeStruct]:
  found = _MATRICES.fullmatch(text)
  sizes = [int(number or 1) for number in found.groups()] if found else [0]
  if min(sizes) == 0 or max(sizes) > _MOST:
    raise ValueError(
      f"`shapes` must be matrices of 1 to {_MOST:,} rows, columns and pieces,"
      f" got {text[:100]!r}; {_REMEDY}."
    )
  rows, columns, count = sizes
  return [_struct([rows, columns])] * count


def _is_shape(tree: Any) -> bool:
  """Returns whether a JSON value is the shape of an array."""
  return isinstance(tree, list) and all(type(size) is int for size in tree)


def _struct(shape: Any) -> jax.ShapeDtypeStruct:
  validation.require(
    _is_shape(shape) and min(shape, default=1) > 0,
    "shapes",
    shape,
    "lists of positive integers, one for each array",
    _REMEDY,
  )
  return jax.ShapeDtypeStruct(tuple(shape), "float32")
