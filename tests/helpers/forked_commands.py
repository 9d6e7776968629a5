"""Runs programs in forks of a process that has imported what they need.

A process of its own takes seconds to import what a fork has at once. This file
is both: a script that forks, and classes that tests use to talk to it.
"""

import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
from typing import NamedTuple

ROOT = pathlib.Path(__file__).resolve().parents[2]


class Ended(NamedTuple):
  """How a program has ended."""

  code: int
  out: str
  err: str


class Forking:
  """A process whose forks run programs.

  Args:
    command: The interpreter, and its options.
    imports: Modules that it imports.
    seconds: Time limit of a program.
    cwd: Where it starts.
    environment: All its variables.
    path: A folder to import from.
  """

  def __init__(self, command, imports, seconds, cwd, environment, path=""):
    self._process = subprocess.Popen(
      [*command, __file__, path, str(seconds), *imports], cwd=cwd, text=True,
      stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment,
    )  # fmt: skip

  def end_of(self, script, arguments, folder, cwd, environment):
    """Runs a program whose output goes to a folder, and returns its end."""
    order = [script, [*map(str, arguments)], str(folder), str(cwd), environment]
    self._process.stdin.write(json.dumps(order) + "\n")
    self._process.stdin.flush()
    code = int(self._process.stdout.readline())
    return Ended(code, *((folder / n).read_text() for n in ("out", "err")))

  def close(self):
    self._process.stdin.close()
    self._process.wait(10)
    self._process.stdout.close()


class Commands(Forking):
  """A process whose forks run commands of experiments/."""

  def __init__(self):
    # Not of the script, which does not find the helpers.
    from helpers import environments

    imports = (
      "lab.planning.layouts", "lab.planning.presets", "lab.study.runner",
      "trainer.reporting.run_page", "trainer.training.trainer",
    )  # fmt: skip
    super().__init__(
      [sys.executable], [f"experiments.{name}" for name in imports], 120, ROOT,
      environments.of_users() | {"JAX_PLATFORMS": "cpu"}, str(ROOT),
    )  # fmt: skip

  def run(self, script, *arguments, cwd=ROOT, **environment):
    """Runs experiments/SCRIPT.py with arguments, and returns its end."""
    script = f"{ROOT}/experiments/{script}.py"
    with tempfile.TemporaryDirectory() as folder:
      folder = pathlib.Path(folder)
      return self.end_of(script, arguments, folder, cwd, environment)


def _run(seconds, script, arguments, folder, cwd, environment):
  """Runs a program in this process, a fork, and ends it."""
  import runpy
  import traceback

  signal.alarm(seconds)
  os.chdir(cwd)
  os.environ.update(environment)
  for number, name in ((1, "out"), (2, "err")):
    flags = os.O_CREAT | os.O_WRONLY | os.O_TRUNC
    os.dup2(os.open(f"{folder}/{name}", flags), number)
  sys.argv = [script, *arguments]
  code = 0
  try:
    runpy.run_path(script, run_name="__main__")
  except SystemExit as end:
    code = end.code or 0
    if isinstance(code, str):
      print(code, file=sys.stderr)
      code = 1
  except BaseException:
    traceback.print_exc()
    code = 1
  sys.stdout.flush()
  sys.stderr.flush()
  os._exit(code)


def main(path, seconds, *imports):
  import importlib
  import warnings

  # JAX has used no device yet, so it has no threads that a fork would lack.
  warnings.filterwarnings("ignore", message="os.fork", category=RuntimeWarning)
  sys.path[0] = path  # not the helpers
  for name in imports:
    importlib.import_module(name)
  for line in sys.stdin:
    if (pid := os.fork()) == 0:
      _run(int(seconds), *json.loads(line))
    _, status = os.waitpid(pid, 0)
    print(os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
  main(*sys.argv[1:])
