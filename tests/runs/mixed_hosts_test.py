"""Hosts whose linear algebra rounds differently train one model.

OpenBLAS picks its kernels by the processor. A process that is given the kernels
of another processor rounds as that one: an AMD host with an Intel host.
"""

import pathlib
import subprocess
import sys
import time

import numpy as np
import pytest
from helpers import environments, quick_compile
from helpers import mixed_hosts_worker as worker
from helpers.local_processes import free_port, wait
from helpers.reducers import WITHOUT_RESIDUAL

TESTS = pathlib.Path(__file__).resolve().parents[1]
CPUS = pathlib.Path("/proc/cpuinfo")
# Kernels of OpenBLAS, and instructions of XLA. A processor without AVX-512
# stands for a pair of which the second is the older one.
KINDS = (("Zen", "AVX2"), ("SkylakeX", "AVX512"))
if not (CPUS.exists() and "avx512f" in CPUS.read_text()):
  KINDS = (("Zen", "AVX2"), ("Sandybridge", "AVX"))
SECONDS = 1200  # for all processes; a fifth of it on an idle machine


def make_of(kind):
  """Returns the environment that makes a process round as one kind of host."""
  kernels, isa = KINDS[kind]
  flags = f"{quick_compile.XLA_FLAGS} --xla_cpu_max_isa={isa}".strip()
  return {"OPENBLAS_CORETYPE": kernels, "XLA_FLAGS": flags}


def run(folder, count, cases):
  """Trains on `count` hosts; every other one has the second kernels."""
  environment = environments.of_users() | {
    "JAX_PLATFORMS": "cpu", "NPROC": "2", "OPENBLAS_NUM_THREADS": "1",
    "PYTHONPATH": str(TESTS.parent),
  }  # fmt: skip
  port, processes = free_port(), []
  deadline = time.monotonic() + SECONDS
  try:
    for i in range(count):
      arguments = (folder, port, i, count, SECONDS - 10, *cases)
      command = [sys.executable, "-W", "error", "-m", worker.__name__]
      with open(folder / f"output_{i}.txt", "w") as output:
        processes.append(
          subprocess.Popen(
            [*command, *map(str, arguments)],
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            cwd=TESTS,
            env=environment | make_of(i % 2),
          )
        )
    wait(processes, folder, deadline)
  finally:
    for process in processes:
      process.kill()
      process.wait()
  prints = [np.load(folder / f"fingerprint_{i}.npy") for i in range(2)]
  if np.array_equal(*prints):
    pytest.skip(
      "OPENBLAS_CORETYPE has no effect on this machine: both processes round"
      " alike, so nothing would be tested"
    )
  return folder


def norm(arrays, axis=None):
  """Returns the norm of all arrays together, by step for axis=0."""
  squares = 0.0
  for x in arrays:
    axes = None if axis is None else tuple(range(1, x.ndim))
    squares = squares + np.sum(np.square(x, dtype=np.float64), axis=axes)
  return np.sqrt(squares)


def check(folder, case, kind, hosts):
  """Checks that two hosts applied the same updates and lost nothing."""
  runs = [np.load(folder / f"{case}_{i}.npz") for i in hosts]

  def of(name, kind=""):
    prefix = f"['{name}']" + (f"['{kind}']" if kind else "")
    keys = [key for key in runs[0].files if key.startswith(prefix)]
    assert keys, prefix
    return [[r[key] for key in keys] for r in runs]

  for first, second in zip(*of("shown"), strict=True):
    np.testing.assert_array_equal(first, second, "ranks")
  apart = lambda both: [a - b for a, b in zip(*both, strict=True)]  # noqa: E731
  updates = of("updates", kind)
  distance = norm(apart(updates), axis=0) / norm(updates[0], axis=0)
  assert distance.shape == (worker.STEPS,)
  assert distance.max() <= 1e-5, f"updates differ by {distance.max():.1e}"
  moved = of("moved", kind)
  share = norm(apart(moved)) / norm(moved[0])
  assert share <= 1e-5, f"accumulated weights differ by {share:.1e}"
  if case not in WITHOUT_RESIDUAL:
    # Rounding in sums of 200 steps is about 1e-7 of the sum.
    for owed, total in zip(of("owed", kind), moved, strict=True):
      share = worker.RATE * norm(owed) / norm(total)
      assert share <= 1e-4, f"{share:.1e} of the gradients went missing"
  for run_ in runs:
    assert run_["['diverged']"] == 0, "replicas have not diverged"


@pytest.fixture(scope="module")
def two_hosts(tmp_path_factory):
  return run(tmp_path_factory.mktemp("two"), 2, worker.REDUCERS)


@pytest.fixture(scope="module")
def four_hosts(tmp_path_factory):
  return run(tmp_path_factory.mktemp("four"), 4, [worker.STAGES])


@pytest.mark.parametrize("kind", ["white", "real"])
@pytest.mark.parametrize("case", worker.REDUCERS)
def test_updates_agree(two_hosts, case, kind):
  check(two_hosts, case, kind, hosts=(0, 1))


@pytest.mark.parametrize("kind", ["white", "real"])
@pytest.mark.parametrize("stage", [0, 1])
def test_updates_agree_on_stages(four_hosts, stage, kind):
  check(four_hosts, worker.STAGES, kind, hosts=(2 * stage, 2 * stage + 1))


@pytest.mark.parametrize("case", ["edgc", "edgc_bfloat16"])
def test_ranks_move(two_hosts, case):
  """Otherwise hosts would agree on them without effort."""
  ranks = np.load(pathlib.Path(two_hosts, f"{case}_0.npz"))
  assert len(np.unique(ranks["['shown']['rank']"])) > 1
