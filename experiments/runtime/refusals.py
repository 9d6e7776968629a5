"""Ends a command with one line if its input is refused."""

import contextlib
import difflib
import sys
from collections.abc import Iterable, Iterator


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


def one_line(error: Exception) -> str:
  """Returns the text of an error without its line breaks."""
  return " ".join(str(error).split())


def nearest(key: str, keys: Iterable[str]) -> str:
  """Returns the name that is spelt most like `key`."""
  return difflib.get_close_matches(key, list(keys), n=1, cutoff=0.0)[0]
