"""The forms of the names that a study's file sets."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

# A form is a type, a test, a dictionary with one form of all its values, or a
# list with one of all its entries. `int` stands for integers from 0 on.
_SETTINGS = {str: object}
_TABLE = {str: _SETTINGS}
_OPTIONAL = {"tolerance", "arms"}
_TUNING: Mapping[str, Any] = {
  "key": str,
  "start": lambda x: _fits(x, [_is_positive]) and list(x) == sorted(x) != [],
  "factor": lambda x: _is_positive(x) and x > 1,
  "seed": int,
  "settings": _SETTINGS,
  "tolerance": lambda x: x is not False and (x == 0 or _is_positive(x)),
  "arms": _TABLE,
}


def require_form(name: str, value: Any, path: str) -> None:
  """Raises unless a name of a study has a value of its form.

  Args:
    name: One of `_FORMS`.
    value: Its value.
    path: The file, for the error.

  Raises:
    ValueError: if it has not.
  """
  text, form = _FORMS[name]
  if not _fits(value, form):
    raise ValueError(
      f"`{name}` must be {text}, got {value!r:.200} in {path}; correct it."
    )


def _fits(value: Any, form: Any) -> bool:
  """Returns whether a value has a form."""
  if isinstance(form, dict):
    ((_, each),) = form.items()
    return isinstance(value, Mapping) and all(
      isinstance(key, str) and _fits(x, each) for key, x in value.items()
    )
  if isinstance(form, list):
    return isinstance(value, Sequence) and all(_fits(x, *form) for x in value)
  if form is int:
    return type(value) is int and value >= 0
  return isinstance(value, form) if isinstance(form, type) else form(value)


def _is_positive(value: Any) -> bool:
  return type(value) in (int, float) and 0 < value < math.inf


def _is_tuning(value: Any) -> bool:
  """Returns whether this has what `study.Tuning` needs."""
  return (
    isinstance(value, Mapping)
    and _TUNING.keys() - _OPTIONAL <= value.keys() <= _TUNING.keys()
    and all(_fits(x, _TUNING[key]) for key, x in value.items())
  )


_FORMS: Mapping[str, tuple[str, Any]] = {
  "CONFIG": ("the name of a file", str),
  "TABLES": (
    "{table: {arm: settings}} with an arm",
    lambda x: _fits(x, {str: _TABLE}) and any(x.values()),
  ),
  "SEEDS": ("integers from 0 on", [int]),
  "MORE": ("integers from 0 on", [int]),
  "BEST": ("an integer from 0 on", int),
  "MATCHED": ("{arm: arm}", {str: str}),
  "ALTERNATIVES": ("{arm: [settings, ...]}", {str: [_SETTINGS]}),
  "TUNING": (
    "a dictionary of a key, rising positive values to start, a factor above 1,"
    " a seed and settings",
    _is_tuning,
  ),
}
