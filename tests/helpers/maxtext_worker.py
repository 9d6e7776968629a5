"""Runs arms of examples/maxtext_diloco.py, and reads their compiled programs.

    export DECOUPLE_GCLOUD=TRUE PYTHONPATH=.
    python tests/helpers/maxtext_worker.py [ARM ...]

Prints a line of JSON for each arm: losses, statistics, and the bytes that one
device sends to other replicas: in each step, and besides in an exchange.
"""

import importlib.util
import json
import pathlib
import sys
from unittest import mock

import jax

from edgc_jax.measure import hlo

FOLDER = pathlib.Path(__file__).parents[2] / "examples"


def load():
  """Imports the example by its path."""
  file = FOLDER / "maxtext_diloco.py"
  spec = importlib.util.spec_from_file_location("maxtext_diloco", file)
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module


def crossing(program, count):
  """Returns the bytes of collectives that cross the axis of the replicas.

  Args:
    program: A compiled program.
    count: From the text of a program to bytes.
  """
  mesh = jax.tree.leaves(program.input_shardings)[0].mesh
  text = program.as_text()
  within = [x for x in mesh.axis_names if mesh.shape[x] > 1 and x != "diloco"]
  return count(text) - count(hlo.over_axes(text, mesh, *within))


def of_exchange(text):
  """Returns the bytes of the branch that sends most."""
  return max(map(max, hlo.wire_bytes_of_branches(text)), default=0)


def measure(example, arm):
  """Returns losses, statistics and bytes of one arm."""
  compile_step, programs = jax.stages.Lowered.compile, []

  def kept(*args, **kwargs):
    programs.append(compile_step(*args, **kwargs))
    return programs[-1]

  with mock.patch.object(jax.stages.Lowered, "compile", kept):
    losses, numbers = example.main(arm)
  (program,) = programs  # MaxText compiles its step once, before the first
  return {
    "arm": arm,
    "losses": losses,
    "numbers": numbers,
    "each_step": crossing(program, hlo.wire_bytes_outside_branches),
    "exchange": crossing(program, of_exchange),
  }


if __name__ == "__main__":
  example = load()
  for arm in sys.argv[1:] or example.ARMS:
    print(json.dumps(measure(example, arm), default=float), flush=True)
