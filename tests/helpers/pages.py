"""Python code blocks of the project's pages, and programs that run as forks."""

import json
import pathlib
import re
import subprocess
import sys

from helpers import environments

ROOT = pathlib.Path(__file__).resolve().parents[2]
SECONDS = 300  # a page takes some seconds on an idle machine
_OUTPUT = re.compile(r"^```\n\n```text\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)

# Runs scripts in forks, which find the imports of all of them done. Not that of
# the package: it must come before a program uses a device.
_FORKS = """
import json, os, runpy, signal, sys, traceback, warnings
import jax, jax.numpy, optax
warnings.filterwarnings("ignore", message="os.fork", category=RuntimeWarning)

def run(script, folder):
  signal.alarm(SECONDS)
  os.chdir(folder)
  for number, name in ((1, "out"), (2, "err")):
    os.dup2(os.open(name, os.O_CREAT | os.O_WRONLY | os.O_TRUNC), number)
  sys.argv = [script]
  code = 1
  try:
    runpy.run_path(script, run_name="__main__")
    code = 0
  except BaseException:
    traceback.print_exc()
  sys.stdout.flush()
  sys.stderr.flush()
  os._exit(code)

for line in sys.stdin:
  if (child := os.fork()) == 0:
    run(*json.loads(line))
  _, status = os.waitpid(child, 0)
  print(os.waitstatus_to_exitcode(status), flush=True)
""".replace("SECONDS", str(SECONDS))


class Forks:
  """Runs programs on eight CPU devices; warnings are errors.

  Args:
    python: The interpreter; JAX and optax are imported once for all programs.
    folder: Where it starts.
    **variables: More variables of the environment.
  """

  def __init__(self, python, folder, **variables):
    environment = environments.of_users("PYTHON") | environments.QUICK
    self._process = subprocess.Popen(
      [python, "-W", "error", "-c", _FORKS], cwd=folder, text=True,
      stdin=subprocess.PIPE, stdout=subprocess.PIPE,
      env=environment | {"JAX_NUM_CPU_DEVICES": "8"} | variables,
    )  # fmt: skip

  def run(self, program, folder):
    """Returns what the text of a program prints in a folder."""
    script = folder / "program.py"
    script.write_text(program)
    order = json.dumps([str(script), str(folder)])
    self._process.stdin.write(order + "\n")
    self._process.stdin.flush()
    code = int(self._process.stdout.readline())
    assert code == 0, (folder / "err").read_text()
    return (folder / "out").read_text()

  def close(self):
    self._process.stdin.close()
    self._process.wait(10)
    self._process.stdout.close()


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
