"""Errors name the argument, the value, the rule and the remedy."""

import functools
import os
import subprocess
import sys
import unittest
from unittest import mock

import jax
import jax.numpy as jnp
import pytest
from helpers import float32
from helpers.flat_options import edgc
from helpers.meshes import BACKENDS, Pmap, gradients_like
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import edgc_jax

PARAMS = {"w": jnp.zeros((16, 24)), "b": jnp.zeros((3,))}


@functools.cache
def powersgd_run(backend):
  """Returns a run of `powersgd`, compiled once for all tests."""
  return BACKENDS[backend](float32.powersgd(2), PARAMS)


def restarted(backend="pmap"):
  run = powersgd_run(backend)
  run.state = run.first_state
  return run


REDUCERS = {
  "allreduce": edgc_jax.allreduce,
  "powersgd": lambda: float32.powersgd(2),
  "edgc": lambda: float32.edgc(rank_max=4),
}


@pytest.mark.parametrize(
  ("options", "message"),
  [
    ({"rank_max": 0}, "`rank_max` must be at least 1, got 0"),
    ({"rank_max": 30}, "`rank_max` must be a multiple of rank_multiple"),
    ({"rank_min": 6}, "`rank_min` must be a multiple of rank_multiple"),
    ({"rank_min": 36}, r"`rank_min` must be at most rank_max \(32\), got 36"),
    ({"rank_min": 0}, "`rank_min` must be at least 1"),
    ({"window": 0}, "`window` must be at least 1"),
    ({"window": 48, "step_rate": 1 / 49}, "`window` must be at least 1 / step"),
    ({"window": 5}, r"`window` must be at least 1 / step_rate \(10\), got 5"),
    ({"warmup_steps": -1}, "`warmup_steps` must be at least 0"),
    ({"max_warmup_steps": 10}, "`max_warmup_steps` must be at least warmup"),
    ({"step_rate": 0.0}, r"`step_rate` must be in \(0, 1\], got 0.0"),
    ({"step_rate": 1.5}, r"`step_rate` must be in \(0, 1\]"),
    ({"entry_rate": -0.1}, r"`entry_rate` must be in \(0, 1\]"),
    ({"estimator": "median"}, "`estimator` must be one of .*got 'median'"),
    ({"bins": 0}, "`bins` must be at least 1"),
    ({"rank_multiple": 0}, "`rank_multiple` must be at least 1"),
    ({"max_rank_step": 2}, "`max_rank_step` must be at least 4"),
    ({"min_ratio": -1}, "`min_ratio` must be at least 0"),
    ({"allocation": "leaf"}, "`allocation` must be one of .*got 'leaf'"),
    ({"warmup_rank": 0}, "`warmup_rank` must be at least 1"),
    ({"warmup_rank": "dense"}, "`warmup_rank` must be .*got 'dense'"),
  ],
)
def test_edgc(options, message):
  with pytest.raises(ValueError, match=message):
    edgc(**options)


@pytest.mark.parametrize(
  ("name", "value"),
  [("rank_max", 32.0), ("window", jnp.int32(9)), ("step_rate", "often")],
)
def test_kinds(name, value):
  with pytest.raises(TypeError, match=f"`{name}` must be a Python"):
    edgc(**{name: value})


@pytest.mark.parametrize(
  ("options", "message"),
  [
    ({"rank": 0}, "`rank` must be at least 1, got 0"),
    ({"rank": 2, "warmup_steps": -1}, "`warmup_steps` must be at least 0"),
    ({"rank": 2, "min_ratio": -1}, "`min_ratio` must be at least 0"),
    ({"rank": {5: 2}}, "`rank` must be a rank from step 0 on"),
    ({"rank": {0: 0}}, "`rank` must be a rank from step 0 on"),
    ({"window": 0}, "`window` must be at least 1"),
    ({"allocation": None}, "`allocation` must be one of .*got None"),
  ],
)
def test_powersgd(options, message):
  with pytest.raises(ValueError, match=message):
    float32.powersgd(**options)


def test_warmup_rank_outside_the_ladder():
  params = {"w": jnp.zeros((80, 80))}
  with pytest.raises(ValueError, match=r"`warmup_rank`.*at least.*8"):
    float32.edgc(warmup_rank=4).init(params)
  float32.edgc(warmup_rank=64).init(params)  # uses the largest rank


def test_matrix_view_that_does_not_fit():
  tx = float32.powersgd(2, matrix_view=lambda path, shape: (1, 5, 5))
  with pytest.raises(ValueError, match=r"\['b'\].*\(3,\)"):
    tx.init(PARAMS)


@pytest.mark.parametrize("dtype", [jnp.complex64, jnp.int32])
def test_leaves_that_are_not_real(dtype):
  tree = {"w": jnp.zeros((4, 4), dtype)}
  with pytest.raises(TypeError, match=r"real floating.*\['w'\]"):
    edgc_jax.allreduce().init(tree)


def test_leaves_that_are_no_arrays():
  with pytest.raises(TypeError, match=r"real floating.*\['w'\]"):
    edgc_jax.allreduce().init({"w": 1.0})


@pytest.mark.parametrize("make", REDUCERS.values(), ids=REDUCERS)
def test_unbound_axis(make):
  tx = make()
  state = tx.init(PARAMS)
  for update in (tx.update, jax.jit(tx.update)):
    with pytest.raises(ValueError, match=r"`axis_name`.*'data'.*pmap"):
      update(PARAMS, state)


def test_other_axis():
  tx = edgc_jax.allreduce("replica")
  with pytest.raises(ValueError, match=r"`axis_name`.*'replica'"):
    Pmap(tx, PARAMS).step(gradients_like(PARAMS, 0))


@pytest.mark.parametrize("make", REDUCERS.values(), ids=REDUCERS)
def test_shard_map_raises_when_jax_summed_them(make):
  tx = make()
  mesh = jax.make_mesh(
    (4,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4]
  )
  specs = edgc_jax.state_specs(tx, PARAMS)
  loss = lambda p, x: jnp.sum(p["w"] * x[0]) + jnp.sum(p["b"])  # noqa: E731

  def wrong(params, x, state):
    return tx.update(jax.grad(loss)(params, x), state)

  def right(params, x, state):
    local = jax.lax.pcast(params, "data", to="varying")
    return tx.update(jax.grad(loss)(local, x), state)

  x = jnp.ones((4, 16, 24))
  state = jax.eval_shape(
    jax.shard_map(tx.init, mesh=mesh, in_specs=P(), out_specs=specs), PARAMS
  )

  def trace(step):
    mapped = jax.shard_map(
      step, mesh=mesh, in_specs=(P(), P("data"), specs), out_specs=(P(), specs)
    )
    jax.eval_shape(mapped, PARAMS, x, state)

  with pytest.raises(ValueError, match="`updates` must be local"):
    trace(wrong)
  trace(right)


def test_pmap_detects_them_by_checksums():
  same = jax.tree.map(lambda p: jnp.ones((4, *p.shape)), PARAMS)
  run = restarted()
  for _ in range(2):
    run.step(same)
  assert edgc_jax.metrics(run.state)["identical_gradients"] == 0
  run.step(same)
  with pytest.warns(RuntimeWarning, match="averaged before"):
    values = edgc_jax.metrics(run.state)
  assert values["identical_gradients"] == 1


def test_steps_without_information_do_not_count():
  """Zeros are always equal; a non-finite step must not hide the others."""
  zeros = jax.tree.map(lambda p: jnp.zeros((4, *p.shape)), PARAMS)
  same = jax.tree.map(lambda p: jnp.ones((4, *p.shape)), PARAMS)
  broken = dict(same, b=same["b"].at[1, 0].set(jnp.nan))
  run = restarted()
  for gradients in (zeros, zeros, zeros, broken, same, same):
    run.step(gradients)
  assert edgc_jax.metrics(run.state)["identical_gradients"] == 0
  run.step(same)
  with pytest.warns(RuntimeWarning, match="averaged before"):
    edgc_jax.metrics(run.state)


@pytest.mark.parametrize("backend", [*BACKENDS])
@pytest.mark.slow
def test_different_gradients_are_fine(backend):
  run = restarted(backend)
  for step in range(4):
    run.step(gradients_like(PARAMS, step))
  assert edgc_jax.metrics(run.state)["identical_gradients"] == 0


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


@pytest.mark.slow
@pytest.mark.parametrize(("given", "least"), [(None, 32), ("7", 7)])
def test_import_widens_the_pool_and_respects_a_choice(given, least):
  code = "import edgc_jax, os; print(os.environ['NPROC'])"
  env = {k: v for k, v in os.environ.items() if k != "NPROC"}
  env |= {"NPROC": given} if given else {}
  printed = subprocess.check_output([sys.executable, "-c", code], env=env)
  assert int(printed) >= least
  if given:
    assert int(printed) == least


# A script's pool has 6 threads or one for each core, even if its parent
# process has set another size.
@pytest.mark.slow
@pytest.mark.parametrize(
  ("given", "expected"),
  [
    ({}, max(6, os.cpu_count())),
    ({"NPROC": "32", "EDGC_JAX_NPROC": "32"}, max(6, os.cpu_count())),
    ({"NPROC": "7"}, 7),
    ({"NPROC": "7", "EDGC_JAX_NPROC": "32"}, 7),
  ],
)
def test_scripts_fit_the_pool_and_respect_a_choice(given, expected):
  code = (
    "import os, edgc_jax\n"
    "from edgc_jax.wire import cpu_backend\n"
    "cpu_backend.fit_thread_pool(3)\n"
    "print(os.environ['NPROC'])\n"
  )
  env = {k: v for k, v in os.environ.items() if "NPROC" not in k} | given
  printed = subprocess.check_output([sys.executable, "-c", code], env=env)
  assert int(printed) == expected


@pytest.mark.slow
@pytest.mark.parametrize(
  ("given", "expected"),
  [({}, "1\nNone\n"), ({"OPENBLAS_NUM_THREADS": "2"}, "2\n2\n")],
)
@unittest.skipUnless(sys.platform == "linux", "reads /proc")
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
