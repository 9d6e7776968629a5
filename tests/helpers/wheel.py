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
    [str(part) for part in command],
    capture_output=True,
    text=True,
    timeout=SECONDS,
    **options,
  )
  assert done.returncode == 0, done.stdout + done.stderr
  return done.stdout


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
