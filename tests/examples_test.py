"""Every example trains, sends fewer bytes, and keeps its replicas equal."""

import difflib
import importlib.util
import os
import pathlib
import subprocess
import sys

import pytest
from absl.testing import absltest, parameterized
from helpers.local_processes import free_port

import edgc_jax

pytestmark = pytest.mark.slow

FOLDER = pathlib.Path(__file__).parents[1] / "examples"


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
