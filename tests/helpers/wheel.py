"""The package as its users have it: a wheel in an environment of its own."""

import pathlib
import re
import shutil
import subprocess
import sys
import venv
from importlib import metadata

import pytest

from helpers import environments
from helpers.pages import ROOT

SECONDS = 300


def run(command, **options):
  done = subprocess.run(
    list(map(str, command)), capture_output=True, text=True, timeout=SECONDS,
    **options,
  )  # fmt: skip
  assert done.returncode == 0, done.stdout + done.stderr
  return done.stdout


def needed_by(requirements, found):
  """Adds distributions of this environment, and all that they need.

  Requirements of extras aside, all are taken; of those with a marker those that
  are installed.
  """
  for text in requirements or ():
    requirement, _, marker = text.partition(";")
    name = re.match(r"[\w.-]+", requirement)[0]
    if name in found or "extra" in marker:
      continue
    try:
      found[name] = metadata.distribution(name)
    except metadata.PackageNotFoundError:
      if not marker:
        raise
    else:
      needed_by(found[name].requires, found)


@pytest.fixture(scope="session")
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


@pytest.fixture(scope="session")
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
  needed_by(about.requires, needed)
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
