"""docs/troubleshooting.md has an entry for every message of the sources."""

import ast
import functools
import re

import pytest
from helpers.pages import ROOT

PAGE = ROOT / "docs/troubleshooting.md"
ANY = "…"  # stands for what a message fills in
# What `validation.require` raises. Each of its calls has an entry of its own.
FORM = f"`{ANY}` must be {ANY}, got {ANY}; {ANY}."
# Rooms of `experiments` for those who work on the project itself.
INTERNAL = {"network", "pages", "planning", "study"}
MOST = 10  # messages that begin alike
TABLE = re.compile(r"^\| message \|.*\n\|[-|]*\n((?:\|.*\n)+)", re.MULTILINE)


def text_of(node):
  """Returns a string of the source."""
  if isinstance(node, ast.Constant):
    return str(node.value)
  if isinstance(node, ast.JoinedStr):
    return "".join(map(text_of, node.values))
  if isinstance(node, ast.BinOp):
    return text_of(node.left) + text_of(node.right)
  return ANY


def messages_of(tree):
  """Yields what a module raises, warns of or exits with."""
  for node in ast.walk(tree):
    if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
      yield from map(text_of, node.exc.args[:1])
    elif isinstance(node, ast.Call):
      name = ast.unparse(node.func).rpartition(".")[2]
      if name == "require":  # condition, name, value, rule, remedy
        _, argument, _, rule, *_ = map(text_of, node.args)
        yield f"`{argument}` must be {rule}"
      elif name in ("warn", "warning", "exit"):
        yield from map(text_of, node.args[:1])


@functools.cache
def messages(package):
  """Returns the messages of a package; those of a variable alone are left."""
  found = set()
  for path in (ROOT / package).rglob("*.py"):
    if not INTERNAL & set(path.relative_to(ROOT).parts):
      tree = ast.parse(path.read_text())
      found |= {m.removeprefix("error: ") for m in messages_of(tree)}
  return sorted(m for m in found if m != FORM and re.search(r"[a-z]", m))


def entries():
  """Returns the beginnings of messages in the first column of the tables."""
  rows = "".join(TABLE.findall(PAGE.read_text())).splitlines()
  cells = [row.strip("| ").split(" | ")[0] for row in rows]
  return [entry for cell in cells for entry in cell.split("<br>")]


def covers(entry, message):
  """Returns whether a message begins so; `mesh.…` has all keys of mesh."""
  pattern = re.escape(entry).replace(rf"\.{ANY}", rf"\.[\w{ANY}]+")
  return re.match(pattern, message) is not None


@pytest.mark.parametrize("package", ("edgc_jax", "experiments"))
def test_every_message_has_an_entry(package):
  found = messages(package)
  assert found
  missing = [m for m in found if not any(covers(e, m) for e in entries())]
  assert not missing, f"add entries to {PAGE.name}"


def test_every_entry_has_messages_of_one_kind():
  found = [*messages("edgc_jax"), *messages("experiments")]
  counts = {e: sum(covers(e, m) for m in found) for e in entries()}
  assert not [e for e, count in counts.items() if not count], "remove these"
  assert not [e for e, count in counts.items() if count > MOST], "say more"
