"""The distributions are complete: they run without the repository."""

import os
import pathlib
import pkgutil
import re
import shutil
import subprocess
import sys
import tarfile
import venv
from importlib import metadata

import pytest
from helpers import environments
from helpers.pages import ROOT, blocks_of

import edgc_jax

pytestmark = pytest.mark.slow

SECONDS = 300
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


def run(command, **options):
  done = subprocess.run(
    [str(part) for part in command],
    capture_output=True,
    text=True,
    timeout=SECONDS,
    **options,
  )
  assert done.returncode == 0, done.stdout + done.stderr
  return done.stdout


def tracked():
  """Returns the files of the repository, or skips the test in a copy of it."""
  if not (ROOT / ".git").exists():
    pytest.skip("this is no clone of the repository")
  listed = run(["git", "ls-files"], cwd=ROOT).splitlines()
  return {name for name in listed if (ROOT / name).exists()}


def needed_by(name, found):
  """Adds a distribution of this environment and all that it needs."""
  if name in found:
    return
  found[name] = own = metadata.distribution(name)
  for text in own.requires or ():
    requirement, _, marker = text.partition(";")
    # Requirements of extras aside, all are taken.
    if "extra" not in marker:
      needed = re.match(r"[\w.-]+", requirement)[0]
      if not marker or _is_installed(needed):
        needed_by(needed, found)


def _is_installed(name):
  try:
    return bool(metadata.distribution(name))
  except metadata.PackageNotFoundError:
    return False


@pytest.fixture(scope="module")
def distributions(tmp_path_factory):
  """Returns the source distribution, and the wheel that is built from it."""
  folder = tmp_path_factory.mktemp("distributions")
  ignored = shutil.ignore_patterns(
    ".*", "__pycache__", "*.egg-info", "build", "dist"
  )
  source = folder / "source"
  shutil.copytree(ROOT, source, ignore=ignored)
  shutil.copytree(ROOT / ".ci", source / ".ci")
  shutil.rmtree(source / "runs", ignore_errors=True)
  run(
    [sys.executable, "-m", "build", "--no-isolation", "--outdir", folder],
    cwd=source,
  )
  (sdist,), (wheel,) = folder.glob("*.tar.gz"), folder.glob("*.whl")
  return sdist, wheel


@pytest.fixture(scope="module")
def python(distributions, tmp_path_factory):
  """An interpreter with the wheel and its dependencies, and nothing else.

  The dependencies are linked from the environment of this test.
  """
  folder = tmp_path_factory.mktemp("environment")
  venv.create(folder, with_pip=False)
  found = folder / "bin" / "python"
  code = "import sysconfig; print(sysconfig.get_path('purelib'))"
  site = pathlib.Path(run([found, "-c", code]).strip())
  _, wheel = distributions
  run(
    [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps",
     "--target", site, wheel],
  )  # fmt: skip
  needed = {}
  (about,) = metadata.distributions(path=[str(site)])
  for text in about.requires:
    if "extra" not in text:
      needed_by(re.match(r"[\w.-]+", text)[0], needed)
  for own in needed.values():
    tops = {file.parts[0] for file in own.files} - {"..", "__pycache__"}
    for top in tops:
      if not (site / top).exists():
        (site / top).symlink_to(own.locate_file(top))
  return found


def inside(python, *arguments, cwd):
  """Runs the interpreter away from the repository, on eight CPU devices."""
  environment = environments.of_users("PYTHON") | environments.QUICK
  environment["JAX_NUM_CPU_DEVICES"] = "8"
  return run([python, *arguments], cwd=cwd, env=environment)


def test_the_source_distribution_is_the_repository(distributions):
  sdist, _ = distributions
  with tarfile.open(sdist) as opened:
    names = {name.partition("/")[2] for name in opened.getnames()}
  assert sdist.name == f"edgc_jax-{edgc_jax.__version__}.tar.gz"
  assert tracked() - names <= {".gitattributes", ".gitignore"}


def test_the_description_of_the_wheel(distributions):
  _, wheel = distributions
  (about,) = metadata.distributions(path=[str(wheel)])
  assert about.version == edgc_jax.__version__
  assert {"train", "dev"} <= set(about.metadata.get_all("Provides-Extra"))
  needed = [text for text in about.requires if "extra" not in text]
  assert sorted(re.match(r"\w+", text)[0] for text in needed) == [
    "jax", "numpy", "optax",
  ]  # fmt: skip


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


@pytest.mark.parametrize("name", ["experiments", "flax", "orbax", "pytest"])
def test_nothing_else_is_there(python, tmp_path, name):
  code = f"import importlib.util as u; print(u.find_spec('{name}'))"
  assert inside(python, "-c", code, cwd=tmp_path).strip() == "None"


def test_the_example_of_the_readme_runs(python, tmp_path):
  script = tmp_path / "example.py"
  script.write_text("\n".join(blocks_of(ROOT / "README.md")))
  inside(python, script, cwd=tmp_path)


def plain_examples():
  """Those that import the package and its dependencies alone."""
  own = {"edgc_jax", "jax", "numpy", "optax", *sys.stdlib_module_names}
  imports = re.compile(r"^(?:import|from) (\w+)", re.MULTILINE)
  return [
    path
    for path in sorted((ROOT / "examples").glob("*.py"))
    if set(imports.findall(path.read_text())) <= own
    and path.stem != "two_processes"
  ]


def test_most_examples_are_plain():
  assert len(plain_examples()) > 10


@pytest.mark.parametrize("path", plain_examples(), ids=lambda path: path.stem)
def test_an_example_runs(python, tmp_path, path):
  script = shutil.copy(path, tmp_path)
  text = inside(python, script, cwd=tmp_path)
  losses = re.compile(r"(?:loss|means) ([\d.]+) to ([\d.]+)")
  start, end = losses.search(text).groups()
  assert float(end) < float(start)


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
