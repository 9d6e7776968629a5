"""Python code blocks of the project's pages."""

import os
import pathlib
import re
import subprocess
import sys

from helpers import quick_compile

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
  environment = {
    name: value
    for name, value in os.environ.items()
    if name not in ("NPROC", "PYTHONWARNINGS")
  }
  environment |= {
    "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "8",
    "XLA_FLAGS": quick_compile.XLA_FLAGS, "PYTHONPATH": str(ROOT), **variables,
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
