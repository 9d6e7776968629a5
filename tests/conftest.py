"""Eight fake CPU devices, one compilation cache and three tiers for the suite.

`edgc_jax` must be imported before JAX uses a device, since its import widens
XLA's thread pool: hence the order below.
"""

import gc
import os
import pathlib
import subprocess

import pytest
from helpers import quick_compile

# XLA takes a lone space for the name of a file.
_FLAGS = f"{quick_compile.XLA_FLAGS} {os.environ.get('XLA_FLAGS', '')}"
os.environ["XLA_FLAGS"] = _FLAGS.strip()

import edgc_jax  # noqa: E402, F401

import jax  # isort: skip # noqa: E402
from jax.experimental.compilation_cache import (  # isort: skip # noqa: E402
  compilation_cache,
)

pytest_plugins = ["helpers.wheel"]

# A program of a cluster, which needs Ray to be imported.
collect_ignore = ["helpers/ray_driver.py"]
ROOT = pathlib.Path(__file__).resolve().parents[1]

jax.config.update("jax_num_cpu_devices", 8)
# XLA's passes over the HLO still run.
jax.config.update("jax_disable_most_optimizations", True)
# Workers, modules and repeated runs compile each program once.
jax.config.update(
  "jax_compilation_cache_dir", str(ROOT / ".pytest_cache" / "compiled")
)
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
# Tracing makes many objects and few cycles: collecting took 7 % of the time.
gc.set_threshold(50_000, 20, 100)

# Files of the longest tests, the longest first: one that starts last would keep
# a single worker busy.
_LONGEST = (
  "examples", "local_run", "tasks", "pages", "shards", "parallel",
  "mixed_hosts", "other_shards", "together", "exact_resume", "contract",
  "wire_bytes", "resharding", "on_mesh", "golden", "killed_runs", "bucket",
  "slurm", "four_processes", "collective_order", "advised", "trainer",
  "plain_jit", "rounding",
)  # fmt: skip


def pytest_addoption(parser):
  parser.addoption(
    "--changed-since",
    metavar="COMMIT",
    help="of the soak tests, run those whose files changed since a commit",
  )


def pytest_collection_modifyitems(config, items):
  """Starts with the longest files, and selects soak tests by changed files."""
  places = {f"{name}_test.py": i for i, name in enumerate(_LONGEST)}
  items.sort(key=lambda item: places.get(item.path.name, len(places)))
  commit = config.getoption("--changed-since")
  if not commit:
    return
  names = subprocess.run(
    ["git", "diff", "--name-only", commit], cwd=ROOT, check=True, text=True,
    capture_output=True,
  ).stdout.split()  # fmt: skip
  dropped = [
    item
    for item in items
    for mark in item.iter_markers("soak")
    if not any(name.startswith(mark.args) for name in names)
  ]
  config.hook.pytest_deselected(items=dropped)
  items[:] = [item for item in items if item not in dropped]


def pytest_sessionfinish(session, exitstatus):
  """Passes if no covered file has changed."""
  is_none = exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED
  if is_none and session.config.getoption("--changed-since"):
    session.exitstatus = pytest.ExitCode.OK


@pytest.fixture(scope="module", autouse=True)
def forget_programs(request):
  """Frees compiled programs after the tests of a module.

  Each holds about a hundred memory maps. Linux allows a process 65,530; beyond
  that XLA aborts.
  """
  yield
  for value in vars(getattr(request, "module", None) or request).values():
    if hasattr(value, "cache_clear"):
      value.cache_clear()
  jax.clear_caches()
  gc.collect()


@pytest.fixture(scope="module")
def without_cache():
  """Compiles each program: cached ones mix up collectives over several axes."""
  before = jax.config.jax_enable_compilation_cache
  jax.config.update("jax_enable_compilation_cache", False)
  compilation_cache.reset_cache()  # JAX looks for a cache only once
  yield
  jax.config.update("jax_enable_compilation_cache", before)
  compilation_cache.reset_cache()
