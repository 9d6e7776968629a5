"""Checks of arguments; each error names argument, value, rule and remedy."""

import inspect
import math
import types
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

# Frames of these packages do not show where a user's mistake is.
_NOT_THE_USERS = ("edgc_jax", "flax", "jax", "optax")
_MOST = 2**31 - 1  # of int32, in which steps and sizes are counted
_LONGEST = 200  # characters of a value in an error
_PARTS = ("init", "update")  # of a gradient transformation


def warn(message: str) -> None:
  """Warns of a mistake, at the line of the user's code that led to it."""
  frame, depth = inspect.currentframe(), 1
  while frame and frame.f_back and _package_of(frame) in _NOT_THE_USERS:
    frame, depth = frame.f_back, depth + 1
  warnings.warn(message, RuntimeWarning, stacklevel=depth)


def _package_of(frame: types.FrameType) -> str:
  return frame.f_globals.get("__name__", "").split(".")[0]


def require(
  condition: bool, name: str, value: Any, rule: str, remedy: str
) -> None:
  """Raises a ValueError unless `condition` holds.

  Args:
    condition: Whether the value is allowed.
    name: Name of the argument.
    value: Its value.
    rule: Completes "must be ...".
    remedy: What the caller should do, without a full stop.

  Raises:
    ValueError: if `condition` is false.
  """
  if not condition:
    raise ValueError(f"`{name}` must be {rule}, got {shown(value)}; {remedy}.")


def shown(value: Any) -> str:
  """Returns a value as errors show it: on one line, and not too long.

  >>> shown(range(3)), shown("a" * 1000)[-5:]
  ('range(0, 3)', 'aa...')
  """
  text = " ".join(repr(value).split())
  return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def require_one_of(name: str, value: Any, options: Sequence[str]) -> None:
  """Raises unless `value` is one of `options`."""
  is_known = isinstance(value, str) and value in options
  require(is_known, name, value, f"one of {options}", "pick one of them")


def require_int(
  name: str, value: Any, least: int, most: int | None = _MOST
) -> None:
  """Raises unless `value` is a Python integer from `least` to `most`."""
  if isinstance(value, bool) or not isinstance(value, int):
    raise TypeError(
      f"`{name}` must be a Python integer, since it decides shapes, got"
      f" {shown(value)}; take .item() of a NumPy number, and under"
      " optax.inject_hyperparams list it in `static_args`."
    )
  require(
    value >= least, name, value, f"at least {least}", f"use {least} or more"
  )
  require(
    most is None or value <= most,
    name,
    value,
    f"at most {most}, the largest int32",
    "use a smaller one",
  )


def require_seed(name: str, value: Any) -> None:
  """Raises unless `value` is a seed of `jax.random.key`, traced or not."""
  if isinstance(value, jax.Array):
    is_seed = value.ndim == 0 and jnp.issubdtype(value.dtype, jnp.integer)
  else:
    is_seed = type(value) is int and 0 <= value < 2**63
  require(is_seed, name, value, "an integer from 0 to 2^63 - 1", "use 0")


def require_several(name: str, values: Sequence[int], least: int) -> None:
  """Raises unless a line can be fitted through the integers `values`.

  At least two of them must differ when counted in units of `least`.
  """
  if not isinstance(values, Sequence) or isinstance(values, str):
    raise TypeError(
      f"`{name}` must be a sequence of integers, got {shown(values)}; pass a"
      " tuple of two or more."
    )
  for value in values:
    require_int(name, value, least, most=None)
  are_several = len({value // least for value in values}) > 1
  remedy = "add one, since a line through one point can have any slope"
  require(are_several, name, values, "at least two that differ", remedy)


def require_number(name: str, value: Any) -> None:
  """Raises unless `value` is a plain Python number."""
  if isinstance(value, bool) or not isinstance(value, int | float):
    raise TypeError(
      f"`{name}` must be a Python number, since it is compiled in, got"
      f" {shown(value)}; take .item() of a NumPy number, and under"
      " optax.inject_hyperparams list it in `static_args`."
    )


def require_finite(name: str, value: Any, remedy: str) -> None:
  """Raises unless `value` is a finite number, at least 0."""
  require_number(name, value)
  is_fine = math.isfinite(value) and value >= 0
  require(is_fine, name, value, "at least 0 and finite", remedy)


def require_share(name: str, value: Any) -> None:
  """Raises unless `value` is a number in (0, 1]."""
  require_number(name, value)
  require(0 < value <= 1, name, value, "in (0, 1]", "use 1 for all")


def require_flag(name: str, value: Any) -> None:
  """Raises unless `value` is True or False."""
  if not isinstance(value, bool):
    raise TypeError(
      f"`{name}` must be True or False, got {shown(value)}; under"
      " optax.inject_hyperparams list it in `static_args`."
    )


def require_kind(
  name: str, value: Any, kind: type, remedy: str, *, optional: bool = True
) -> None:
  """Raises unless `value` is an instance of `kind`, or None if optional."""
  if not (isinstance(value, kind) or (optional and value is None)):
    raise TypeError(
      f"`{name}` must be an edgc_jax.{kind.__name__}, got {shown(value)};"
      f" {remedy}."
    )


def require_function(
  name: str, value: Callable[..., Any] | None, of: str, *, optional: bool = True
) -> None:
  """Raises unless `value` is a function of `of`, or None if optional."""
  if not (callable(value) or (optional and value is None)):
    raise TypeError(
      f"`{name}` must be a function of {of}, got {shown(value)}; pass the"
      " function itself."
    )


def require_transformation(name: str, value: Any) -> None:
  """Raises unless `value` has the functions of an optax transformation."""
  if not all(callable(getattr(value, part, None)) for part in _PARTS):
    raise TypeError(
      f"`{name}` must be a gradient transformation of optax, got"
      f" {shown(value)}; pass what optax.chain or a function such as"
      " optax.adam(1e-3) returns."
    )
