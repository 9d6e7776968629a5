"""Ends a command with one line if its input is refused."""

import contextlib
import difflib
import re
import sys
from collections.abc import Iterable, Iterator, Sequence


@contextlib.contextmanager
def refusals(*more: type[Exception]) -> Iterator[None]:
  """Turns errors of checks, which name what is wrong, into an exit.

  Only checks belong inside: errors elsewhere are faults of the program, whose
  traceback is of use.

  Args:
    *more: Further types of errors, beside wrong values, types and files.
  """
  try:
    yield
  except (ValueError, TypeError, OSError, *more) as error:
    sys.exit(f"error: {error}")


def require_pattern(
  flag: str, pattern: str, names: Sequence[str] | None = None
) -> None:
  """Raises unless a flag's regular expression finds one of the names.

  Args:
    flag: The flag's name.
    pattern: Its value.
    names: What it is to find some of; None if that is not known yet.

  Raises:
    ValueError: if it is no regular expression, or finds none.
  """
  rule = f" of some of {', '.join(names)}" if names is not None else ""
  try:
    expression = re.compile(pattern)
  except re.error as error:
    reason = str(error)
  else:
    if names is None or any(map(expression.search, names)):
      return
    reason = "none matches"
  raise ValueError(
    f"`--{flag}` must be a regular expression{rule}, got {pattern!r}"
    f" ({reason}); correct it."
  )


def one_line(error: Exception) -> str:
  """Returns the text of an error without its line breaks."""
  return " ".join(str(error).split())


def nearest(key: str, keys: Iterable[str]) -> str:
  """Returns the name that is spelt most like `key`."""
  return difflib.get_close_matches(key, list(keys), n=1, cutoff=0.0)[0]
