"""The distributions are complete: they run without the repository."""

import os
import pkgutil
import re
import shutil
import subprocess
import sys
import tarfile
from importlib import metadata

import pytest
from helpers.pages import ROOT, Forks, run_page
from helpers.wheel import inside, run

import edgc_jax

pytestmark = pytest.mark.slow

INSTALLED = """
from importlib.util import find_spec
print(edgc_jax.__file__)
assert not any(map(find_spec, ("experiments", "flax", "orbax", "pytest")))
"""
# What a type checker must accept, and one line that it must not.
CONSUMER = """
from typing import Any, assert_type

import edgc_jax
import jax.numpy as jnp
import optax

tx = optax.chain(edgc_jax.powersgd(rank=8), optax.sgd(1e-3))
params = {"w": jnp.zeros((64, 64))}
assert_type(edgc_jax.powersgd(8), optax.GradientTransformationExtraArgs)
assert_type(edgc_jax.metrics(tx.init(params)), dict[str, Any])
assert_type(edgc_jax.wire_bytes(params, 8), int)
edgc_jax.wire_bytes(params, rank="8")  # WRONG
"""


def tracked():
  """Returns the files of the repository, or skips the test in a copy of it."""
  if not (ROOT / ".git").exists():
    pytest.skip("this is no clone of the repository")
  listed = run(["git", "ls-files"], cwd=ROOT).splitlines()
  return {name for name in listed if (ROOT / name).exists()}


def test_the_distributions_are_the_repository(distributions):
  sdist, wheel = distributions
  (about,) = metadata.distributions(path=[str(wheel)])
  assert about.version == edgc_jax.__version__
  assert sdist.name == f"edgc_jax-{edgc_jax.__version__}.tar.gz"
  assert {"train", "dev"} <= set(about.metadata.get_all("Provides-Extra"))
  needed = [text for text in about.requires if "extra" not in text]
  assert sorted(re.match(r"\w+", text)[0] for text in needed) == [
    "jax", "numpy", "optax",
  ]  # fmt: skip
  with tarfile.open(sdist) as opened:
    names = {name.partition("/")[2] for name in opened.getnames()}
  left_out = {
    name for name in tracked() - names if not name.startswith("results/")
  }
  assert left_out <= {".gitattributes", ".gitignore"}


def test_every_module_imports_and_nothing_else_is_there(python, tmp_path):
  modules = pkgutil.walk_packages(edgc_jax.__path__, "edgc_jax.")
  imports = [f"import {module.name}" for module in modules]
  assert len(imports) > 40
  program = "\n".join([*imports, INSTALLED])
  found = inside(python, "-c", program, cwd=tmp_path).strip()
  assert not found.startswith(str(ROOT)), found


def test_the_readme_runs(python, tmp_path):
  forks = Forks(python, tmp_path)
  run_page(ROOT / "README.md", forks, tmp_path)
  forks.close()


def test_the_command_runs(python, tmp_path):
  text = inside(python, "-m", "edgc_jax", cwd=tmp_path)
  assert f"edgc_jax   {edgc_jax.__version__}" in text
  assert text.endswith("passed\n")


def test_its_types_are_seen(python, tmp_path):
  script = tmp_path / "consumer.py"
  checker = [shutil.which("ty", path=os.path.dirname(sys.executable)), "check"]
  command = [*checker, "--python", python.parent.parent, script]
  script.write_text(CONSUMER.replace('"8")  # WRONG', "8)"))
  run(command, cwd=tmp_path)
  script.write_text(CONSUMER)
  done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
  assert done.returncode == 1
  assert "invalid-argument-type" in done.stdout
