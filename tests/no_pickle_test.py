"""Nothing that the package reads can run code: no pickles, no text is executed.

Checkpoints are arrays and JSON, records are JSON, data is text or uint16. Files
of configurations and studies are programs of their user, and run as such.
Programs that start jobs of submitit or Ray, which pickle, are listed.
"""

import ast
import pathlib

ROOT = pathlib.Path(__file__).resolve().parents[1]
FILES = [
  path
  for folder in ("edgc_jax", "experiments", "configs", "examples", "tests")
  for path in sorted((ROOT / folder).rglob("*.py"))
]
# Libraries that unpickle what they read.
MODULES = {
  "pickle", "cPickle", "_pickle", "cloudpickle", "dill", "marshal", "shelve",
  "joblib", "ray", "submitit",
}  # fmt: skip
CALLS = {"eval", "exec", "compile", "__import__"}  # of builtins
# A study's file, and the file of a configuration that it names; tests that run
# what pages and the command show.
PROGRAMS = {
  "examples/ray_cluster.py": {"ray"},
  "examples/slurm.py": {"submitit"},
  "tests/helpers/ray_driver.py": {"ray"},
  "experiments/lab/study/runner.py": {"submitit"},
  "experiments/lab/study/study.py": {"run_path"},
  "tests/diagnosis/command_test.py": {"eval"},
  "tests/helpers/forked_commands.py": {"run_path"},
}
METHODS = {"run_path", "run_module", "read_pickle", "to_pickle"}


def found_in(text):
  """Returns what of a program could run code that it reads."""
  found = set()
  for node in ast.walk(ast.parse(text)):
    if isinstance(node, ast.Import):
      names = {alias.name.split(".")[0] for alias in node.names}
      found |= names & MODULES
    elif isinstance(node, ast.ImportFrom):
      found |= {(node.module or "").split(".")[0]} & MODULES
      found |= {alias.name for alias in node.names} & METHODS
    elif isinstance(node, ast.Call):
      name = getattr(node.func, "id", getattr(node.func, "attr", ""))
      of = getattr(getattr(node.func, "value", None), "id", "")
      is_builtin = isinstance(node.func, ast.Name) or of == "builtins"
      if name in METHODS or (name in CALLS and is_builtin):
        found.add(name)
      first = getattr(node.args[0], "value", "") if node.args else ""
      if name == "import_module":
        found |= {str(first).split(".")[0]} & MODULES
      if name == "load" and of in ("np", "numpy") and len(node.args) > 2:
        found.add("allow_pickle")
      # NumPy's `allow_pickle`; PyTorch's `weights_only`, which is its default.
      for keyword in node.keywords:
        value = getattr(keyword.value, "value", True)
        if (keyword.arg, bool(value)) in (
          ("allow_pickle", True), ("weights_only", False),
        ):  # fmt: skip
          found.add(keyword.arg)
  return found


def test_no_file_runs_what_it_reads():
  found = {
    str(path.relative_to(ROOT)): found_in(path.read_text()) for path in FILES
  }
  assert len(found) > 300
  assert {name: own for name, own in found.items() if own} == PROGRAMS
