"""Runs commands of experiments/ in forks of a process that has imported JAX.

A process of its own takes seconds to import what a fork has at once. This file
is both: a script that forks, and `Commands`, which tests use to talk to it.
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
_SECONDS = 120


class Ended(NamedTuple):
  """How a command has ended."""

  code: int
  out: str
  err: str


class Commands:
  """A process whose forks run commands."""

  def __init__(self):
    # Not of the script, which does not find the helpers.
    from helpers import environments

    self._process = subprocess.Popen(
      [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
      text=True, cwd=ROOT,
      env=environments.of_users() | {"JAX_PLATFORMS": "cpu"},
    )  # fmt: skip

  def run(self, script, *arguments, cwd=ROOT, **environment):
    """Runs experiments/SCRIPT.py with arguments, and returns its end."""
    with tempfile.TemporaryDirectory() as folder:
      command = {
        "script": str(ROOT / "experiments" / f"{script}.py"),
        "arguments": list(map(str, arguments)),
        "cwd": str(cwd),
        "environment": environment,
        "folder": folder,
      }
      self._process.stdin.write(json.dumps(command) + "\n")
      self._process.stdin.flush()
      code = int(self._process.stdout.readline())
      out, err = (pathlib.Path(folder, n).read_text() for n in ("out", "err"))
    return Ended(code, out, err)

  def close(self):
    self._process.stdin.close()
    self._process.wait(10)
    self._process.stdout.close()


def _run(command):
  """Runs a command in this process, a fork, and ends it."""
  import runpy
  import traceback

  signal.alarm(_SECONDS)
  os.chdir(command["cwd"])
  os.environ.update(command["environment"])
  for number, name in ((1, "out"), (2, "err")):
    file = os.open(f"{command['folder']}/{name}", os.O_CREAT | os.O_WRONLY)
    os.dup2(file, number)
  sys.argv = [command["script"], *command["arguments"]]
  code = 0
  try:
    runpy.run_path(command["script"], run_name="__main__")
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


def main():
  import warnings

  # JAX has used no device yet, so it has no threads that a fork would lack.
  warnings.filterwarnings("ignore", message="os.fork", category=RuntimeWarning)
  sys.path[:0] = [str(ROOT)]
  from experiments.planning import layouts, presets  # noqa: F401
  from experiments.reporting import run_page  # noqa: F401
  from experiments.study import runner  # noqa: F401
  from experiments.training import trainer  # noqa: F401

  for line in sys.stdin:
    if (pid := os.fork()) == 0:
      _run(json.loads(line))
    _, status = os.waitpid(pid, 0)
    print(os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
  main()
