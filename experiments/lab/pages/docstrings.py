"""Prepares the package's docstrings for the reference of the site.

An extension of Griffe, which reads the sources for mkdocstrings
(zensical.toml). Docstrings are written for editors and `help()`: Markdown
would run the lines of an indented formula together and quote a doctest.
"""

import re
from collections.abc import Iterator

import griffe

_SECTION = re.compile(r"(Args|Attributes|Raises|Returns|Warns|Yields):$")
_NAMES = re.compile(r"^( +)(\w+(?:, \w+)+): ", re.MULTILINE)


class Docstrings(griffe.Extension):
  """Turns formulas and doctests of public docstrings into blocks of code."""

  def on_package(self, *, pkg: griffe.Module, **_: object) -> None:
    """Prepares every public name of a package, and of its modules.

    Raises:
      ValueError: if a public name has no docstring.
    """
    found: dict[str, griffe.Object] = {}
    for module in (pkg, *pkg.modules.values()):
      for name in map(str, module.exports or ()):
        shown = _import_the_function(module, name)
        if not shown.docstring:
          raise ValueError(
            f"`{name}` must have a docstring, since it is in __all__ of"
            f" {module.path}; write one."
          )
        found[shown.path] = shown
    for shown in found.values():
      for each in _with_members(shown):
        if each.docstring:
          each.docstring.value = to_markdown(each.docstring.value)


def _import_the_function(pkg: griffe.Module, name: str) -> griffe.Object:
  """Points a name at the function of a file that has the same name.

  Griffe takes `edgc` for the file edgc.py, which Python does not: the import
  of the function comes after that of the file.
  """
  shown = pkg[name]
  if shown.is_module:
    pkg.members[name] = griffe.Alias(name, shown[name], parent=pkg)
  return pkg[name].final_target if pkg[name].is_alias else pkg[name]


def _with_members(shown: griffe.Object) -> Iterator[griffe.Object]:
  yield shown
  if shown.is_class:
    yield from (m for m in shown.members.values() if not m.is_alias)


def to_markdown(docstring: str) -> str:
  """Returns a docstring whose formulas and doctests are blocks of code.

  A formula is a paragraph of which all lines are indented, outside of sections.
  An entry for several arguments becomes one entry for each.
  """
  paragraphs, in_section = [], False
  for paragraph in docstring.split("\n\n"):
    lines = paragraph.split("\n")
    if not lines[0].startswith(" "):
      in_section = bool(_SECTION.match(lines[0]))
    if in_section:
      lines = [one for line in lines for one in _one_each(line)]
    elif lines[0].startswith(">>> "):
      lines = ["```pycon", *lines, "```"]
    elif all(line.startswith(" ") for line in lines):
      lines = [f"  {line}" for line in lines]
    paragraphs.append("\n".join(lines))
  return "\n\n".join(paragraphs)


def _one_each(line: str) -> list[str]:
  found = _NAMES.match(line)
  if not found:
    return [line]
  indent, names = found.groups()
  return [f"{indent}{n}: {line[found.end() :]}" for n in names.split(", ")]
