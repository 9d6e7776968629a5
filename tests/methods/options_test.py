"""Options that are grouped by subject are checked when a reducer is made."""

import jax.numpy as jnp
from absl.testing import absltest, parameterized

import edgc_jax


class KindsTest(parameterized.TestCase):
  @parameterized.named_parameters(
    ("sampling", {"sampling": 0.1}, "Sampling"),
    ("stages", {"stages": "stage"}, "Stages"),
    ("no_name", {"stages": ""}, "Stages"),
    ("no_rate", {"sampling": 0}, "Sampling"),
  )
  def test_edgc_names_the_class(self, options, kind):
    (name,) = options
    with self.assertRaisesRegex(TypeError, f"`{name}` must be .*{kind}, got"):
      edgc_jax.edgc(**options)

  @parameterized.named_parameters(
    ("allreduce", edgc_jax.allreduce, ()),
    ("powersgd", edgc_jax.powersgd, (4,)),
    ("topk", edgc_jax.topk, (0.1,)),
  )
  def test_other_reducers_check_stages(self, make, arguments):
    with self.assertRaisesRegex(TypeError, "`stages` must be .*Stages, got"):
      make(*arguments, stages="stage")


class RuleTest(parameterized.TestCase):
  @parameterized.parameters("linear", None, 2.0)
  def test_a_rule_is_a_function(self, rule):
    with self.assertRaisesRegex(ValueError, "`rule` must be a function of a"):
      edgc_jax.edgc(rule=rule)


class AllocationTest(parameterized.TestCase):
  @parameterized.named_parameters(
    ("edgc", edgc_jax.edgc), ("powersgd", edgc_jax.powersgd)
  )
  def test_an_allocation_has_a_known_name(self, make):
    make(allocation=edgc_jax.ErrorAllocation())
    with self.assertRaisesRegex(ValueError, "`allocation` must be one of"):
      make(allocation="matrix")

  @parameterized.parameters(-1, 3)
  def test_the_exponent_of_scales_is_in_range(self, exponent):
    with self.assertRaisesRegex(ValueError, "`scale_exponent` must be between"):
      edgc_jax.ErrorAllocation(scale_exponent=exponent)

  def test_the_exponent_of_scales_is_a_python_number(self):
    with self.assertRaisesRegex(TypeError, "`scale_exponent` must be a Python"):
      edgc_jax.ErrorAllocation(scale_exponent=jnp.float32(1))


class StagesTest(parameterized.TestCase):
  @parameterized.parameters(None, "", 3)
  def test_an_axis_has_a_name(self, axis_name):
    with self.assertRaisesRegex(ValueError, "`axis_name` must be the name"):
      edgc_jax.Stages(axis_name)

  def test_a_placement_is_a_function(self):
    with self.assertRaisesRegex(ValueError, "`placement` must be a function"):
      edgc_jax.Stages(placement="own")


class SamplingTest(parameterized.TestCase):
  @parameterized.parameters((5, 1), (15, 1), (20, 2), (35, 3), (1000, 10))
  def test_ten_samples_in_a_window(self, window, period):
    sampling = edgc_jax.Sampling.for_window(window)
    self.assertEqual(sampling.period, period)
    self.assertAlmostEqual(sampling.entry_rate, 0.025 * period)
    self.assertGreaterEqual(window // period, min(window, 10))


if __name__ == "__main__":
  absltest.main()
