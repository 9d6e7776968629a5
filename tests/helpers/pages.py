"""Python code blocks of the project's pages."""

import pathlib
import re
import subprocess
import sys

from helpers import environments

ROOT = pathlib.Path(__file__).resolve().parents[2]
SECONDS = 300  # a page takes some seconds on an idle machine
_BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def pages():
  """Returns the paths of all pages that have Python code blocks."""
  paths = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
  return [path for path in paths if blocks_of(path)]


def blocks_of(path):
  """Returns the Python code blocks of a page, in order."""
  return _BLOCK.findall(path.read_text())


def run(program, folder, **variables):
  """Runs a program on eight CPU devices and returns what it printed.

  Warnings are errors; `variables` are more variables of the environment.
  """
  script = folder / "program.py"
  script.write_text(program)
  environment = environments.of_users() | environments.QUICK
  environment |= {
    "JAX_NUM_CPU_DEVICES": "8", "PYTHONPATH": str(ROOT), **variables,
  }  # fmt: skip
  done = subprocess.run(
    [sys.executable, "-W", "error", str(script)],
    cwd=folder,
    env=environment,
    capture_output=True,
    text=True,
    timeout=SECONDS,
  )
  assert done.returncode == 0, done.stderr
  return done.stdout
