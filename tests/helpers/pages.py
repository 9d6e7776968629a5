"""Python code blocks of the project's pages, and programs that run as forks."""

import re
import sys

from helpers import environments
from helpers.forked_commands import ROOT, Forking

_OUTPUT = re.compile(r"^```\n\n```text\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


class Forks(Forking):
  """Runs programs on eight CPU devices; warnings are errors.

  Args:
    python: The interpreter; JAX and optax are imported once for all programs,
      but not the package, which must come before a program uses a device.
    folder: Where it starts.
    **variables: More variables of the environment.
  """

  def __init__(self, python, folder, **variables):
    environment = environments.of_users("PYTHON") | environments.QUICK
    super().__init__(
      [python, "-W", "error"], ["jax", "jax.numpy", "optax"], 300, folder,
      environment | {"JAX_NUM_CPU_DEVICES": "8"} | variables,
    )  # fmt: skip

  def run(self, program, folder):
    """Returns what the text of a program prints in a folder."""
    script = folder / "program.py"
    script.write_text(program)
    ended = self.end_of(str(script), (), folder, folder, {})
    assert ended.code == 0, ended.err
    return ended.out


def of_repository(folder, **variables):
  """Returns forks that import the package from the repository."""
  return Forks(sys.executable, folder, PYTHONPATH=str(ROOT), **variables)


def pages():
  """Returns the paths of all pages that have Python code blocks."""
  paths = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
  return [path for path in paths if blocks_of(path)]


def blocks_of(path):
  """Returns the Python code blocks of a page, in order."""
  return _BLOCK.findall(path.read_text())


def run_page(path, forks, folder):
  """Runs the blocks of a page as one program, and returns what it prints.

  What the page shows as text below a block is printed by it, line after line.
  """
  blocks = blocks_of(path)
  assert blocks
  printed = forks.run("\n".join(blocks), folder)
  printed = "\n".join(line.rstrip() for line in printed.splitlines())
  for shown in _OUTPUT.findall(path.read_text()):
    assert shown.rstrip() in printed, printed
  return printed
