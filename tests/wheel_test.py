"""A wheel is complete: it imports and runs without the repository."""

import os
import pkgutil
import shutil
import subprocess
import sys
import sysconfig
import venv

import pytest
from helpers.pages import ROOT, blocks_of

import edgc_jax

pytestmark = pytest.mark.slow

SECONDS = 300


def run(command, **options):
  done = subprocess.run(
    [str(part) for part in command],
    capture_output=True,
    text=True,
    timeout=SECONDS,
    **options,
  )
  assert done.returncode == 0, done.stderr
  return done.stdout


@pytest.fixture(scope="module")
def python(tmp_path_factory):
  """An interpreter with the wheel and its dependencies, and nothing else.

  The dependencies lie in the environment of this test. A path file in a path
  file is not read, so the repository that is installed there is not seen.
  """
  folder = tmp_path_factory.mktemp("wheel")
  source = folder / "source"
  source.mkdir()
  for name in ("pyproject.toml", "README.md", "LICENSE"):
    shutil.copy(ROOT / name, source)
  shutil.copytree(
    ROOT / "edgc_jax",
    source / "edgc_jax",
    ignore=shutil.ignore_patterns("__pycache__"),
  )
  run(
    [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps",
     "--no-build-isolation", "--wheel-dir", folder, source],
  )  # fmt: skip
  (wheel,) = folder.glob("edgc_jax-*.whl")
  venv.create(folder / "environment", with_pip=False)
  found = folder / "environment" / "bin" / "python"
  site = run(
    [found, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
  ).strip()
  run(
    [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps",
     "--target", site, wheel],
  )  # fmt: skip
  with open(os.path.join(site, "dependencies.pth"), "w") as file:
    file.write(sysconfig.get_path("purelib") + "\n")
  return found


def inside(python, *arguments, cwd):
  """Runs the interpreter away from the repository, on eight CPU devices."""
  foreign = ("PYTHON", "NPROC", "JAX_", "XLA_")
  environment = {
    k: v for k, v in os.environ.items() if not k.startswith(foreign)
  }
  environment |= {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "8"}
  return run([python, *arguments], cwd=cwd, env=environment)


def test_every_module_imports(python, tmp_path):
  names = [
    module.name
    for module in pkgutil.walk_packages(edgc_jax.__path__, "edgc_jax.")
  ]
  assert len(names) > 40
  lines = [f"import {name}" for name in names]
  lines += ["import edgc_jax", "print(edgc_jax.__file__)"]
  found = inside(python, "-c", "\n".join(lines), cwd=tmp_path).strip()
  assert not found.startswith(str(ROOT)), found


def test_experiments_are_not_in_it(python, tmp_path):
  code = "import importlib.util as u; print(u.find_spec('experiments'))"
  assert inside(python, "-c", code, cwd=tmp_path).strip() == "None"


def test_the_example_of_the_readme_runs(python, tmp_path):
  script = tmp_path / "example.py"
  script.write_text("\n".join(blocks_of(ROOT / "README.md")))
  inside(python, script, cwd=tmp_path)
