"""Every example trains, sends fewer bytes, and keeps its replicas equal."""

import difflib
import importlib.util
import pathlib

import pytest
from absl.testing import absltest, parameterized

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
    ("pmap_linen", "pmap_linen", 5, 6),
    ("nnx_model", "nnx_model", 5, 9),
    ("equinox_model", "equinox_model", 5, 9),
    ("two_data_axes", "two_data_axes", 5, 8),
    ("hsdp_by_hand", "hsdp_by_hand", 5, 6),
    ("hsdp_by_compiler", "hsdp_by_compiler", 5, 3),
    ("lora", "lora", 5, 3),
    ("simulated_replicas", "simulated_replicas", 5, 9),
    ("restore_on_another_mesh", "restore_on_another_mesh", 5, 6),
  )
  def test_one_reducer(self, name, factor, ratio):
    """The loss falls by a factor, and the bytes by a ratio."""
    self.check(*load(name).main(), factor, ratio)

  def test_plain_jit(self):
    losses, state = load("plain_jit").main()
    self.check(losses, edgc_jax.metrics(state), 5, 7)
    dense, _ = load("plain_jit_dense").main()
    self.assertLess(5 * dense[-1], dense[0])

  def test_a_loop_in_plain_jit_needs_three_lines(self):
    """From the first line after the imports to the last before printing."""

    def lines_of(name):
      lines = (FOLDER / f"{name}.py").read_text().splitlines()
      start = lines.index('jax.config.update("jax_num_cpu_devices", 8)')
      return lines[start : lines.index('if __name__ == "__main__":')]

    changes = difflib.ndiff(lines_of("plain_jit_dense"), lines_of("plain_jit"))
    self.assertLessEqual(sum(x.startswith("+ ") for x in changes), 3)

  def test_mean_over(self):
    self.check(*load("two_data_axes").main(fast=True), 5, 8)

  @parameterized.parameters("one_reducer", "two_reducers")
  def test_partition(self, name):
    example = load("partition")
    self.check(*example.main(getattr(example, name)()), 5, 6)

  def test_gan(self):
    losses, numbers = load("gan").main()
    for own in numbers:
      self.check(losses, own, 5, 8)

  def test_each_has_a_test_and_a_row(self):
    names = {path.stem for path in FOLDER.glob("*.py")}
    page = (FOLDER / "README.md").read_text()
    source = pathlib.Path(__file__).read_text()
    for name in names:
      self.assertIn(f'"{name}"', source)
      self.assertIn(f"[`{name}.py`]({name}.py)", page)


if __name__ == "__main__":
  absltest.main()
