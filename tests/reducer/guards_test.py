"""Gradients averaged before, and pools of threads that are too small."""

import os
import subprocess
import sys
from unittest import mock

import jax
import jax.numpy as jnp
import pytest
from helpers import float32
from helpers.meshes import Pmap, ShardMap, gradients_like
from jax.sharding import PartitionSpec as P

import edgc_jax

PARAMS = {"w": jnp.zeros((16, 24)), "b": jnp.zeros((3,))}


@pytest.mark.parametrize(
  "tx",
  [
    float32.powersgd(2),
    edgc_jax.allreduce(),
    float32.edgc(rank_max=2, rank_min=2, rank_multiple=2),
  ],
)
def test_shard_map_raises_when_jax_summed_them(tx):
  run = ShardMap(tx, PARAMS)
  x, out = jnp.ones((4, 16, 24)), (P(), run.specs)
  loss = lambda p, x: jnp.sum(p["w"] * x[0]) + jnp.sum(p["b"])  # noqa: E731

  def trace(place):
    def step(params, x, state):
      return run.tx.update(jax.grad(loss)(place(params), x), state)

    specs = (P(), P("data"), run.specs)
    mapped = jax.shard_map(step, mesh=run.mesh, in_specs=specs, out_specs=out)
    jax.eval_shape(mapped, PARAMS, x, run.state)

  with pytest.raises(ValueError, match="`updates` must be local"):
    trace(lambda params: params)
  trace(lambda params: jax.lax.pcast(params, "data", to="varying"))


def test_pmap_detects_them_by_checksums():
  """Zeros are always equal; a non-finite step must not hide the others."""
  zeros = jax.tree.map(lambda p: jnp.zeros((4, *p.shape)), PARAMS)
  same = jax.tree.map(lambda p: jnp.ones((4, *p.shape)), PARAMS)
  broken = dict(same, b=same["b"].at[1, 0].set(jnp.nan))
  run = Pmap(float32.powersgd(2), PARAMS)
  for gradients in (zeros, zeros, zeros, broken, same, same):
    run.step(gradients)
  assert edgc_jax.metrics(run.state)["identical_gradients"] == 0
  run.step(same)
  with pytest.warns(RuntimeWarning, match="averaged before"):
    values = edgc_jax.metrics(run.state)
  assert values["identical_gradients"] == 1


def test_one_replica_raises_no_warning():
  run = Pmap(float32.powersgd(2), PARAMS, replicas=1)
  for step in range(4):
    run.step(gradients_like(PARAMS, step, replicas=1))
  values = edgc_jax.metrics(run.state)
  assert values["identical_gradients"] == 0
  assert values["wire_bytes"] == float32.wire_bytes(PARAMS, 2)


@pytest.mark.slow
def test_too_small_a_pool_raises_before_it_hangs():
  with (
    mock.patch.dict(os.environ, {"NPROC": "4"}),
    pytest.raises(RuntimeError, match=r"NPROC must be at least 16.*of 4"),
  ):
    Pmap(edgc_jax.allreduce(), PARAMS).step(gradients_like(PARAMS, 0))


# Without a choice, a script's pool has 6 threads or one for each core, even if
# its parent process has set another size.
OWN = max(6, os.cpu_count())


@pytest.mark.slow
@pytest.mark.parametrize(
  ("given", "at_import", "fitted"),
  [
    ({}, None, OWN),
    ({"NPROC": "32", "EDGC_JAX_NPROC": "32"}, 32, OWN),
    ({"NPROC": "7"}, 7, 7),
    ({"NPROC": "7", "EDGC_JAX_NPROC": "32"}, 7, 7),
  ],
)
def test_a_pool_fits_and_respects_a_choice(given, at_import, fitted):
  code = (
    "import os, edgc_jax\n"
    "from edgc_jax.wire import cpu_backend\n"
    "print(os.environ['NPROC'])\n"
    "cpu_backend.fit_thread_pool(3)\n"
    "print(os.environ['NPROC'])\n"
  )
  env = {k: v for k, v in os.environ.items() if "NPROC" not in k} | given
  printed = subprocess.check_output([sys.executable, "-c", code], env=env)
  first, second = map(int, printed.split())
  assert second == fitted
  assert first == at_import if at_import else first >= 32


@pytest.mark.slow
@pytest.mark.parametrize(
  ("given", "expected"),
  [({}, "1\nNone\n"), ({"OPENBLAS_NUM_THREADS": "2"}, "2\n2\n")],
)
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_decompositions_have_one_thread_by_default(given, expected):
  code = (
    "import ctypes, os, re, jax, jax.numpy as jnp, edgc_jax\n"
    "tx = edgc_jax.powersgd(2)\n"
    "x = {'w': jnp.ones((1, 32, 32))}\n"
    "jax.pmap(lambda g: tx.update(g, tx.init(g)), 'data')(x)\n"
    "maps = open('/proc/self/maps').read()\n"
    "(path,) = set(re.findall(r'/.*libscipy_openblas-.*', maps))\n"
    "print(ctypes.CDLL(path).scipy_openblas_get_num_threads())\n"
    "print(os.environ.get('OPENBLAS_NUM_THREADS'))\n"
  )
  env = {k: v for k, v in os.environ.items() if "_NUM_THREADS" not in k}
  env["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"  # compiles faster
  printed = subprocess.check_output(
    [sys.executable, "-c", code], env=env | given, text=True
  )
  assert printed == expected


@pytest.mark.slow
def test_an_import_after_the_use_of_a_device_raises():
  """It is too late to set NPROC: an error is better than a hang."""
  code = (
    "import os, jax\n"
    "jax.config.update('jax_num_cpu_devices', 64)\n"
    "jax.devices()\n"
    "import edgc_jax, jax.numpy as jnp\n"
    "assert 'NPROC' not in os.environ\n"
    "tx = edgc_jax.allreduce()\n"
    "x = jnp.ones((64, 2, 2))\n"
    "jax.pmap(lambda g: tx.update(g, tx.init(g)), 'data')(x)\n"
  )
  env = {k: v for k, v in os.environ.items() if k != "NPROC"}
  done = subprocess.run(
    [sys.executable, "-c", code], env=env, capture_output=True, text=True
  )
  assert "NPROC must be at least 128" in done.stderr
