"""Every example trains, sends fewer bytes, and keeps its replicas equal."""

import concurrent.futures
import difflib
import importlib.util
import json
import os
import pathlib
import re
import subprocess
import sys

import chex
import jax
import numpy as np
import optax
import pytest
from helpers.environments import QUICK
from helpers.local_processes import free_port
from helpers.pages import ROOT, Forks

import edgc_jax
from edgc_jax.measure import hlo

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("without_cache")]

FOLDER = ROOT / "examples"
CHECK_BYTES = 52  # comparisons of the replicas, which few steps make

# Prints what the main function of an example returns.
PROGRAM = """
import json, runpy
losses, numbers = runpy.run_path({path!r})["main"](**{options!r})
if {path!r}.endswith("_dense.py"):
  numbers = {{}}
elif not isinstance(numbers, (dict, list)):  # a state
  import edgc_jax
  numbers = edgc_jax.metrics(numbers)
print(json.dumps([losses, numbers], default=float))
"""


def load(name):
  """Imports an example by its path."""
  spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module


def is_plain(name):
  """Whether an example imports the package and its dependencies alone."""
  own = {"edgc_jax", "jax", "numpy", "optax", *sys.stdlib_module_names}
  imports = re.findall(
    r"^(?:import|from) (\w+)", (FOLDER / f"{name}.py").read_text(), re.MULTILINE
  )
  return set(imports) <= own


@pytest.fixture(scope="module")
def of_wheel(python, tmp_path_factory):
  found = Forks(python, tmp_path_factory.mktemp("forks"))
  yield found
  found.close()


@pytest.fixture
def trained(of_wheel, tmp_path):
  """Trains a plain example with the wheel alone, another one in here."""

  def train(name, **options):
    if not is_plain(name):
      return load(name).main(**options)
    path = tmp_path / f"{name}.py"
    path.write_text((FOLDER / path.name).read_text())
    program = PROGRAM.format(path=str(path), options=options)
    return json.loads(of_wheel.run(program, tmp_path).splitlines()[-1])

  return train


def check(losses, numbers, factor, ratio):
  assert factor * losses[-1] < losses[0]
  assert numbers["compression_ratio"] > ratio
  assert numbers["diverged_steps"] == 0
  assert numbers["skipped_steps"] == 0
  assert numbers["identical_gradients"] == 0


# The bytes of each example fall by this ratio at least.
RATIOS = {
  "nnx_model": 50, "lora": 3, "maxtext_tree": 37, "accumulation": 58,
  "local_steps": 30, "drjax_diloco": 7, "simulated_replicas": 56,
  "pmap_linen": 46, "equinox_model": 58, "hsdp_by_hand": 43,
  "two_data_axes": 47, "restore_on_another_mesh": 42, "partition": 47,
  "two_reducers": 47, "plain_jit": 48, "hsdp": 24, "own_method": 7,
}  # fmt: skip


@pytest.mark.parametrize("name", RATIOS)
def test_one_reducer(trained, name):
  check(*trained(name), 5, RATIOS[name])


def test_several_are_plain():
  assert sum(is_plain(path.stem) for path in FOLDER.glob("*.py")) > 10


def test_mean_over(trained):
  check(*trained("two_data_axes", fast=True), 5, 58)


def test_gan(trained):
  losses, numbers = trained("gan")
  for own in numbers:
    check(losses, own, 5, 44)


@pytest.mark.parametrize(
  "name, dense, most",
  [("plain_jit", "plain_jit_dense", 3), ("hsdp", "hsdp_dense", 5)],
)
def test_dense_and_the_lines_that_change(trained, name, dense, most):
  """From the first line after the imports to the last before printing."""
  losses, _ = trained(dense)
  assert 5 * losses[-1] < losses[0]

  def lines_of(name):
    lines = (FOLDER / f"{name}.py").read_text().splitlines()
    start = lines.index('jax.config.update("jax_num_cpu_devices", 8)')
    return lines[start : lines.index('if __name__ == "__main__":')]

  changes = difflib.ndiff(lines_of(dense), lines_of(name))
  assert sum(x.startswith("+ ") for x in changes) <= most


def test_two_processes(request):
  """Started as by hand, in a command each."""
  name = "two_processes"
  command = [sys.executable, FOLDER / f"{name}.py"]
  address = f"127.0.0.1:{free_port()}"
  environment = os.environ | QUICK | {"PYTHONPATH": str(FOLDER.parent)}
  options = {"stdout": subprocess.PIPE, "text": True, "env": environment}
  both = [
    subprocess.Popen([*command, address, str(i)], **options) for i in range(2)
  ]
  for process in both:
    request.addfinalizer(process.kill)
  texts = [process.communicate(timeout=150)[0] for process in both]
  assert re.search(r"loss 3\.\d+ to 0\..*\n68\.\d times fewer", texts[0])
  assert "loss" not in texts[1]


CODE = {"density": None, "bits": 4}


def test_sites(tmp_path):
  """Two train together, and end with equal parameters."""
  example = load("sites")
  example.ROUNDS, example.PAUSE = 12, 0.0
  with concurrent.futures.ThreadPoolExecutor() as pool:
    calls = [pool.submit(example.main, tmp_path, x, **CODE) for x in "ab"]
    found = [call.result() for call in calls]
  for losses, params in found:
    assert 3 * losses[-1] < losses[0]
    jax.tree.map(np.testing.assert_array_equal, params, found[0][1])


def test_sites_of_unlike_meshes(tmp_path, monkeypatch):
  """One goes on where another one has left off."""
  example = load("sites_hsdp")
  monkeypatch.setattr(example, "ROUNDS", 4)
  before, _ = example.main(tmp_path, "a", **CODE)
  monkeypatch.setattr(example, "ROUNDS", 8)
  after, params = example.main(tmp_path, "b", shape=(1, 4), **CODE)
  assert after[0] < 0.7 * before[0] and 3 * after[-1] < before[0]
  none, again = example.main(tmp_path, "a", **CODE)
  assert not none
  jax.tree.map(np.testing.assert_array_equal, params, again)
  assert again["qkv"].sharding.shard_shape(again["qkv"].shape) == (32, 96)


def test_drjax_bytes():
  """A compiled round sends what is counted; dense is DrJAX's own mean."""
  example = load("drjax_diloco")
  links = example.ARMS | {
    "dense": example.on_mesh(edgc_jax.allreduce("replica"))
  }
  means, sent = {}, {}
  for name, link in links.items():
    outer = optax.chain(link, optax.sgd(1.0))
    state, batches = example.start(outer), example.batches_of(0)
    program = example.round_with(outer).lower(*state, batches).compile()
    text = program.as_text()
    means[name], outer_state, *_ = program(*state, batches)
    sent[name] = hlo.wire_bytes_outside_branches(text) - 4  # of the loss
    if name != "mean":
      counted = edgc_jax.metrics(outer_state)["wire_bytes"]
      assert 0 <= counted - sent[name] <= CHECK_BYTES
  assert sent["mean"] == sent["dense"]
  assert sent["mean"] > 7 * sent["quantize"]
  assert sent["mean"] > 8 * sent["topk"]
  chex.assert_trees_all_close(means["mean"], means["dense"], rtol=1e-6)


def test_maxtext():
  """MaxText's own trainer runs "maxtext_diloco", in its own process."""
  if importlib.util.find_spec("maxtext") is None:
    pytest.skip("MaxText is not installed; docs/long_runs.md says how")
  arms = ("MaxText's mean", "allreduce", "quantize")
  worker = pathlib.Path(__file__).parent / "helpers/maxtext_worker.py"
  own = {"PYTHONPATH": str(FOLDER.parent), "DECOUPLE_GCLOUD": "TRUE"}
  done = subprocess.run(
    [sys.executable, worker, *arms], env=os.environ | own, text=True,
    capture_output=True, timeout=1200,
  )  # fmt: skip
  assert done.returncode == 0, done.stderr
  lines = [x for x in done.stdout.splitlines() if x.startswith("{")]
  mean, dense, coded = map(json.loads, lines)
  # Beside an exchange only MaxText's statistics cross the slow axis.
  assert coded["each_step"] == mean["each_step"]
  assert 0 <= dense["exchange"] - mean["exchange"] <= CHECK_BYTES
  assert mean["exchange"] > 7 * coded["exchange"]
  counted = coded["numbers"]["wire_bytes"] / 2  # of two shards
  assert 0 <= coded["exchange"] - counted <= CHECK_BYTES
  check(coded["losses"], coded["numbers"], 50, 7)
  np.testing.assert_allclose(dense["losses"], mean["losses"], rtol=0.02)
  np.testing.assert_allclose(coded["losses"], mean["losses"], rtol=0.1)


def test_each_has_a_test_and_a_row():
  page = (FOLDER / "README.md").read_text()
  source = pathlib.Path(__file__).read_text()
  runs = {path.stem for path in (FOLDER.parent / "tests/runs").glob("*.py")}
  for name in (path.stem for path in FOLDER.glob("*.py")):
    assert f"{name}_test" in runs or f'"{name}"' in source
    assert f"[`{name}.py`]({name}.py)" in page
