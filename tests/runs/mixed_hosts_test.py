"""Hosts whose linear algebra rounds differently train one model.

OpenBLAS picks its kernels by the processor. A process that is given the kernels
of another processor rounds as that one: an AMD host with an Intel host.
"""

import pathlib
import sys

import numpy as np
import pytest
from helpers import environments, quick_compile
from helpers import mixed_hosts_worker as worker
from helpers.local_processes import free_port, run_together
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
  program = sys.executable, "-W", "error", "-m", worker.__name__, folder
  port, hosts = free_port(), range(count)
  commands = [[*program, port, i, count, SECONDS - 10, *cases] for i in hosts]
  kinds = [environment | make_of(i % 2) for i in hosts]
  run_together(folder, commands, kinds, SECONDS, cwd=TESTS)
  prints = [np.load(folder / f"fingerprint_{i}.npy") for i in range(2)]
  if np.array_equal(*prints):
    pytest.skip(
      "OPENBLAS_CORETYPE has no effect on this machine: both processes round"
      " alike, so nothing would be tested"
    )


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
  assert distance.max() <= 1e-5, (
    f"{case}: updates differ by {distance.max():.1e}"
  )
  moved = of("moved", kind)
  share = norm(apart(moved)) / norm(moved[0])
  assert share <= 1e-5, f"accumulated weights differ by {share:.1e}"
  if case not in WITHOUT_RESIDUAL:
    # Rounding in sums of 200 steps is about 1e-7 of the sum.
    for owed, total in zip(of("owed", kind), moved, strict=True):
      share = worker.RATE * norm(owed) / norm(total)
      assert share <= 1e-4, f"{share:.1e} of the gradients went missing"
  for one in runs:
    assert one["['diverged']"] == 0, "replicas have not diverged"


# One of each kind of wire and of the ways to choose a rank.
SOME = (
  "edgc", "edgc_int4", "powersgd_error", "topk", "randomk_unbiased", "quantize",
)  # fmt: skip
OTHERS = tuple(name for name in worker.REDUCERS if name not in SOME)


def check_two_hosts(folder, cases):
  run(folder, 2, cases)
  for case in cases:
    for kind in ("white", "real"):
      check(folder, case, kind, hosts=(0, 1))
    if case in ("edgc", "edgc_bfloat16"):
      # Otherwise hosts would agree on ranks without effort.
      ranks = np.load(folder / f"{case}_0.npz")["['shown']['rank']"]
      assert len(np.unique(ranks)) > 1


def test_updates_agree(tmp_path):
  check_two_hosts(tmp_path, SOME)


@pytest.mark.soak("edgc_jax/methods", "edgc_jax/wire/agreement.py")
def test_updates_of_other_reducers_agree(tmp_path):
  check_two_hosts(tmp_path, OTHERS)


def test_updates_agree_on_stages(tmp_path):
  run(tmp_path, 4, [worker.STAGES])
  for kind in ("white", "real"):
    for hosts in ((0, 1), (2, 3)):  # of each stage
      check(tmp_path, worker.STAGES, kind, hosts)
