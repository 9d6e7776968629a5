"""Every example trains, sends fewer bytes, and keeps its replicas equal."""

import difflib
import importlib.util
import json
import os
import pathlib
import subprocess
import sys

import chex
import numpy as np
import optax
import pytest
from absl.testing import absltest, parameterized
from helpers.local_processes import free_port

import edgc_jax
from edgc_jax.measure import hlo

pytestmark = pytest.mark.slow

FOLDER = pathlib.Path(__file__).parents[1] / "examples"
CHECK_BYTES = 52  # comparisons of the replicas, which few steps make


def load(name):
  """Imports an example by its path."""
  spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module


class ExamplesTest(parameterized.TestCase):
  def check(self, losses, numbers, factor, ratio):
    self.assertLess(factor * losses[-1], losses[0])
    self.assertGreater(numbers["compression_ratio"], ratio)
    self.assertEqual(numbers["diverged_steps"], 0)
    self.assertEqual(numbers["skipped_steps"], 0)
    self.assertEqual(numbers["identical_gradients"], 0)

  @parameterized.named_parameters(
    ("nnx_model", "nnx_model", 5, 9),
    ("lora", "lora", 5, 3),
    ("maxtext_tree", "maxtext_tree", 5, 5),
    ("accumulation", "accumulation", 5, 9),
    ("local_steps", "local_steps", 5, 30),
    ("drjax_diloco", "drjax_diloco", 5, 7),
    ("simulated_replicas", "simulated_replicas", 5, 9),
    ("pmap_linen", "pmap_linen", 5, 6),
    ("equinox_model", "equinox_model", 5, 9),
    ("hsdp_by_hand", "hsdp_by_hand", 5, 6),
    ("two_data_axes", "two_data_axes", 5, 8),
    ("restore_on_another_mesh", "restore_on_another_mesh", 5, 6),
    ("partition", "partition", 5, 6),
    ("two_reducers", "two_reducers", 5, 6),
  )
  def test_one_reducer(self, name, factor, ratio):
    """The loss falls by a factor, and the bytes by a ratio."""
    self.check(*load(name).main(), factor, ratio)

  @parameterized.parameters(
    ("plain_jit", "plain_jit_dense", 7), ("hsdp", "hsdp_dense", 3)
  )
  def test_beside_dense(self, name, dense, ratio):
    losses, state = load(name).main()
    self.check(losses, edgc_jax.metrics(state), 5, ratio)
    losses, _ = load(dense).main()
    self.assertLess(5 * losses[-1], losses[0])

  @parameterized.parameters(
    ("plain_jit", "plain_jit_dense", 3), ("hsdp", "hsdp_dense", 5)
  )
  def test_changed_lines(self, name, dense, most):
    """From the first line after the imports to the last before printing."""

    def lines_of(name):
      lines = (FOLDER / f"{name}.py").read_text().splitlines()
      start = lines.index('jax.config.update("jax_num_cpu_devices", 8)')
      return lines[start : lines.index('if __name__ == "__main__":')]

    changes = difflib.ndiff(lines_of(dense), lines_of(name))
    self.assertLessEqual(sum(x.startswith("+ ") for x in changes), most)

  def test_mean_over(self):
    self.check(*load("two_data_axes").main(fast=True), 5, 8)

  def test_two_processes(self):
    """Started as by hand, in a command each."""
    name = "two_processes"
    command = [sys.executable, FOLDER / f"{name}.py"]
    address = f"127.0.0.1:{free_port()}"
    environment = os.environ | {"PYTHONPATH": str(FOLDER.parent)}
    both = [
      subprocess.Popen(
        [*command, address, str(i)], stdout=subprocess.PIPE, text=True,
        env=environment,
      )
      for i in range(2)
    ]  # fmt: skip
    for process in both:
      self.addCleanup(process.kill)
    texts = [process.communicate(timeout=150)[0] for process in both]
    self.assertRegex(texts[0], r"loss 3\.\d+ to 0\..*\n1\d\.\d times fewer")
    self.assertNotIn("loss", texts[1])

  def test_gan(self):
    losses, numbers = load("gan").main()
    for own in numbers:
      self.check(losses, own, 5, 8)

  def test_drjax_bytes(self):
    """A compiled round sends what is counted; dense is DrJAX's own mean."""
    example = load("drjax_diloco")
    links = example.ARMS | {"dense": edgc_jax.allreduce(**example.where)}
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
        self.assertBetween(counted - sent[name], 0, CHECK_BYTES)
    self.assertEqual(sent["mean"], sent["dense"])
    self.assertGreater(sent["mean"], 7 * sent["quantize"])
    self.assertGreater(sent["mean"], 8 * sent["topk"])
    chex.assert_trees_all_close(means["mean"], means["dense"], rtol=1e-6)

  def test_maxtext(self):
    """MaxText's own trainer runs "maxtext_diloco", in its own process."""
    if importlib.util.find_spec("maxtext") is None:
      self.skipTest("MaxText is not installed; docs/maxtext.md says how")
    arms = ("MaxText's mean", "allreduce", "quantize")
    worker = pathlib.Path(__file__).parent / "helpers/maxtext_worker.py"
    own = {"PYTHONPATH": str(FOLDER.parent), "DECOUPLE_GCLOUD": "TRUE"}
    done = subprocess.run(
      [sys.executable, worker, *arms], env=os.environ | own, text=True,
      capture_output=True, timeout=1200,
    )  # fmt: skip
    self.assertEqual(done.returncode, 0, done.stderr)
    lines = [x for x in done.stdout.splitlines() if x.startswith("{")]
    mean, dense, coded = map(json.loads, lines)
    # Beside an exchange only MaxText's statistics cross the slow axis.
    self.assertEqual(coded["each_step"], mean["each_step"])
    self.assertBetween(dense["exchange"] - mean["exchange"], 0, CHECK_BYTES)
    self.assertGreater(mean["exchange"], 7 * coded["exchange"])
    counted = coded["numbers"]["wire_bytes"] / 2  # of two shards
    self.assertBetween(coded["exchange"] - counted, 0, CHECK_BYTES)
    self.check(coded["losses"], coded["numbers"], 50, 7)
    np.testing.assert_allclose(dense["losses"], mean["losses"], rtol=0.02)
    np.testing.assert_allclose(coded["losses"], mean["losses"], rtol=0.1)

  def test_each_has_a_test_and_a_row(self):
    names = {path.stem for path in FOLDER.glob("*.py")}
    page = (FOLDER / "README.md").read_text()
    source = pathlib.Path(__file__).read_text()
    runs = {path.stem for path in (FOLDER.parent / "tests/runs").glob("*.py")}
    for name in names:
      if f"{name}_test" not in runs:
        self.assertIn(f'"{name}"', source)
      self.assertIn(f"[`{name}.py`]({name}.py)", page)


if __name__ == "__main__":
  absltest.main()
