"""Python code blocks of the project's pages."""

import pathlib
import re

ROOT = pathlib.Path(__file__).resolve().parents[2]
_BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def pages():
  """Returns the paths of all pages that have Python code blocks."""
  paths = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
  return [path for path in paths if blocks_of(path)]


def blocks_of(path):
  """Returns the Python code blocks of a page, in order."""
  return _BLOCK.findall(path.read_text())
