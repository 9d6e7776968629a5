"""What every refusal of bad input has in common.

It is one clear error, on one line, and no file has changed.
"""

import contextlib
import hashlib
import pathlib
import re

import pytest
from hypothesis import HealthCheck, settings

LONGEST = 1500  # characters of an error


def assert_clear(message):
  """An error names what is wrong, its value, the rule and the remedy."""
  assert "\n" not in message.strip(), message
  assert len(message) <= LONGEST, message
  assert re.search(r"\bmust\b", message), message
  assert re.search(r"\bgot\b", message), message
  remedy = re.split(r"\bgot\b", message, maxsplit=1)[1]
  assert re.search(r"[;:.] [\w`.-]+ \S", remedy), message


def refused(call, *parts, kinds=(TypeError, ValueError)):
  """Calls a function that has to raise one clear error, and returns it."""
  with pytest.raises(kinds) as caught:
    call()
  assert_clear(str(caught.value))
  for part in parts:
    assert part in str(caught.value)
  return str(caught.value)


def allowed_or_clear(call, kinds=(TypeError, ValueError)):
  """Calls a function that may raise one clear error; returns its result."""
  try:
    return call()
  except kinds as error:
    assert_clear(str(error))
    return None


def drawn(examples):
  """Has Hypothesis draw so many examples, always the same ones."""
  return settings(
    max_examples=examples, deadline=None, derandomize=True, database=None,
    suppress_health_check=list(HealthCheck),
  )  # fmt: skip


def hashes(folder):
  """Returns a hash of each file below a folder, without the lock of a run."""
  folder = pathlib.Path(folder)
  if not folder.is_dir():
    return folder.read_bytes() if folder.exists() else None
  return {
    str(path.relative_to(folder)): (
      hashlib.sha256(path.read_bytes()).hexdigest()
      if path.is_file()
      else path.is_dir()
    )
    for path in sorted(folder.rglob("*"))
    if path.name != "lock"
  }


@contextlib.contextmanager
def unchanged(*folders):
  """Asserts that no file below the folders changes, appears or vanishes."""
  before = [hashes(folder) for folder in folders]
  yield
  assert [hashes(folder) for folder in folders] == before
