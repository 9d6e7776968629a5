"""The forms of the names that a study's file sets."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

# A form is a type, a dictionary with one form of all its values, or a list with
# one of all its entries. `int` stands for integers from 0 on.
_SETTINGS = {str: object}
_TABLE = {str: _SETTINGS}
_TUNING = {"key", "start", "factor", "seed", "settings"}
_OPTIONAL = {"tolerance", "arms"}


def require_form(name: str, value: Any, path: str) -> None:
  """Raises unless a name of a study has a value of its form.

  Args:
    name: One of `_FORMS`.
    value: Its value.
    path: The file, for the error.

  Raises:
    ValueError: if it has not.
  """
  form, is_of_form = _FORMS[name]
  if not is_of_form(value):
    raise ValueError(
      f"`{name}` must be {form}, got {value!r:.200} in {path}; correct it."
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
  return isinstance(value, form)


def _is_tuning(value: Any) -> bool:
  """Returns whether this has what `study.Tuning` needs."""
  if not (
    _fits(value, _SETTINGS) and _TUNING <= value.keys() <= _TUNING | _OPTIONAL
  ):
    return False
  start, factor = value["start"], value["factor"]
  return (
    isinstance(start, Sequence)
    and bool(start)
    and all(
      type(x) in (int, float) and 0 < x < math.inf for x in (*start, factor)
    )
    and list(start) == sorted(start)
    and factor > 1
    and isinstance(value["key"], str)
    and _fits(value["seed"], int)
    and _fits(value["settings"], _SETTINGS)
    and type(value.get("tolerance", 0.0)) in (int, float)
    and 0 <= value.get("tolerance", 0.0) < math.inf
    and _fits(value.get("arms", {}), _TABLE)
  )


_FORMS: Mapping[str, tuple[str, Callable[[Any], bool]]] = {
  "CONFIG": ("the name of a file", lambda x: _fits(x, str)),
  "TABLES": (
    "{table: {arm: settings}} with an arm",
    lambda x: _fits(x, {str: _TABLE}) and any(x.values()),
  ),
  "SEEDS": ("integers from 0 on", lambda x: _fits(x, [int])),
  "MORE": ("integers from 0 on", lambda x: _fits(x, [int])),
  "BEST": ("an integer from 0 on", lambda x: _fits(x, int)),
  "MATCHED": ("{arm: arm}", lambda x: _fits(x, {str: str})),
  "ALTERNATIVES": (
    "{arm: [settings, ...]}",
    lambda x: _fits(x, {str: [_SETTINGS]}),
  ),
  "TUNING": (
    "a dictionary of a key, rising positive values to start, a factor above 1,"
    " a seed and settings",
    _is_tuning,
  ),
}
