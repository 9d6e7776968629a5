"""The forms of the names that a study's file sets."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

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


def _are_counts(values: Any) -> bool:
  """Returns whether these are integers from 0 on."""
  is_sequence = isinstance(values, Sequence)
  return is_sequence and all(type(x) is int and x >= 0 for x in values)


def _is_mapping(value: Any, is_value: Callable[[Any], bool]) -> bool:
  """Returns whether this maps names to values of a form."""
  is_mapping = isinstance(value, Mapping)
  return is_mapping and all(
    isinstance(key, str) and is_value(each) for key, each in value.items()
  )


def _is_settings(value: Any) -> bool:
  return _is_mapping(value, lambda _: True)


def _is_table(value: Any) -> bool:
  return _is_mapping(value, _is_settings)


def _are_settings(values: Any) -> bool:
  return isinstance(values, Sequence) and all(map(_is_settings, values))


def _is_tuning(value: Any) -> bool:
  """Returns whether this has what `study.Tuning` needs."""
  if not (
    _is_settings(value) and _TUNING <= value.keys() <= _TUNING | _OPTIONAL
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
    and _are_counts([value["seed"]])
    and _is_settings(value["settings"])
    and type(value.get("tolerance", 0.0)) in (int, float)
    and 0 <= value.get("tolerance", 0.0) < math.inf
    and _is_table(value.get("arms", {}))
  )


_FORMS: Mapping[str, tuple[str, Callable[[Any], bool]]] = {
  "CONFIG": ("the name of a file", lambda x: isinstance(x, str)),
  "TABLES": (
    "{table: {arm: settings}} with an arm",
    lambda x: _is_mapping(x, _is_table) and any(x.values()),
  ),
  "SEEDS": ("integers from 0 on", _are_counts),
  "MORE": ("integers from 0 on", _are_counts),
  "BEST": ("an integer from 0 on", lambda x: _are_counts([x])),
  "MATCHED": (
    "{arm: arm}",
    lambda x: _is_mapping(x, lambda arm: isinstance(arm, str)),
  ),
  "ALTERNATIVES": (
    "{arm: [settings, ...]}",
    lambda x: _is_mapping(x, _are_settings),
  ),
  "TUNING": (
    "a dictionary of a key, rising positive values to start, a factor above 1,"
    " a seed and settings",
    _is_tuning,
  ),
}
