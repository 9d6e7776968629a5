"""Codes against NumPy: their noise, their scales, their bytes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import absltest, parameterized
from helpers.reference import through_blocks

from edgc_jax.wire.codes import (
  Bfloat16,
  Blockwise,
  Rotated,
  _gaussian_levels,
  code_of,
  name_of,
)


class CodesTest(parameterized.TestCase):
  @parameterized.parameters(8, 4)
  def test_integers_follow_the_formula(self, bits):
    values = np.random.default_rng(0).standard_normal((4, 32))
    values, key = values.astype(np.float32), jax.random.key(5)
    draws = np.asarray(jax.random.uniform(key, (4, 4, 8)))
    for is_random, offset in ((True, draws), (False, 0.5)):
      code = Blockwise(bits, 8, is_random)
      found = code.decode(code.encode(jnp.asarray(values), key))
      expected = through_blocks(values, bits, 8, offset)
      np.testing.assert_allclose(found, expected, 1e-6, 1e-7)

  @parameterized.parameters(8, 4)
  def test_rounding_to_nearest_has_half_the_noise(self, bits):
    """And no error exceeds half a step."""
    values = np.random.default_rng(0).standard_normal((64, 256))
    values, key = jnp.asarray(values, jnp.float32), jax.random.key(1)
    errors = []
    for is_random in (False, True):
      code = Blockwise(bits, 256, is_random)
      errors.append(np.asarray(code.decode(code.encode(values, key)) - values))
    nearest, random = errors
    step = np.abs(values).max(1, keepdims=True) / (2 ** (bits - 1) - 1)
    self.assertTrue((np.abs(nearest) <= 0.504 * step).all())
    ratio = np.square(nearest).mean() / np.square(random).mean()
    self.assertBetween(ratio, 0.47, 0.53)

  @parameterized.parameters("gaussian", "heavy", "sparse")
  def test_rotated_values_have_the_noise_of_gaussian_numbers(self, kind):
    """Whatever they were; plain blocks have more, but for sparse values."""
    random = np.random.default_rng(3)
    values = random.standard_normal((512, 64))
    if kind == "heavy":
      values *= np.exp(random.standard_normal(values.shape))
    if kind == "sparse":
      values[:, 1:] *= random.random((512, 63)) < 0.02
    values = jnp.asarray(values, jnp.float32)
    noise = {}
    for code in (Rotated(64), Blockwise(4, 64)):
      found = code.decode(code.encode(values, jax.random.key(0)))
      noise[code] = float(jnp.sum((found - values) ** 2) / jnp.sum(values**2))
    # 16 levels leave 0.0095, and the rounding of scales adds a little.
    self.assertBetween(noise[Rotated(64)], 0.006, 0.0105)
    if kind != "sparse":  # zeros need no bits
      self.assertLess(noise[Rotated(64)], noise[Blockwise(4, 64)])

  def test_small_blocks_are_left_to_the_next_step(self):
    code, key = Rotated(16), jax.random.key(0)
    ones = jnp.ones((3, 16))
    values = (ones * jnp.array([[1.0], [2.0**-30], [2.0**-40]])).ravel()
    found = np.asarray(code.decode(code.encode(values, key))).reshape(3, 16)
    self.assertLess(np.abs(found[0] - 1).max(), 0.5)
    self.assertLess(np.abs(found[1] * 2.0**30 - 1).max(), 0.5)
    np.testing.assert_array_equal(found[2], 0)

  def test_levels_have_the_published_error(self):
    """0.009497 for 16 levels (Max 1960, table I), and +-2.733 the last."""
    levels = _gaussian_levels(4)
    x = np.linspace(-8, 8, 200_001)
    density = np.exp(-x * x / 2) / np.sqrt(2 * np.pi) * (x[1] - x[0])
    nearest = np.abs(x[:, None] - levels).min(1)
    self.assertAlmostEqual(float(nearest**2 @ density), 0.009497, places=5)
    self.assertAlmostEqual(float(levels[-1]), 2.733, places=3)
    np.testing.assert_allclose(levels, -levels[::-1], atol=1e-6)

  @parameterized.parameters((1, 0.3634, 0.7979), (2, 0.1175, 1.510))
  @pytest.mark.slow
  def test_few_levels_have_the_published_error(self, bits, error, last):
    """Max 1960, table I; rotated values of any distribution have no more."""
    levels = _gaussian_levels(bits)
    x = np.linspace(-8, 8, 200_001)
    density = np.exp(-x * x / 2) / np.sqrt(2 * np.pi) * (x[1] - x[0])
    nearest = np.abs(x[:, None] - levels).min(1)
    self.assertAlmostEqual(float(nearest**2 @ density), error, places=4)
    self.assertAlmostEqual(float(levels[-1]), last, places=3)
    values = np.random.default_rng(1).standard_normal((64, 1024))
    values *= np.exp(np.random.default_rng(2).standard_normal(values.shape))
    values = jnp.asarray(values, jnp.float32)
    code = Rotated(128, bits)
    found = code.decode(code.encode(values, jax.random.key(0)))
    noise = float(jnp.sum((found - values) ** 2) / jnp.sum(values**2))
    self.assertBetween(noise, 0.85 * error, 1.02 * error)

  def test_no_value_exceeds_the_scale(self):
    """A scale rounded to nearest would clip, and bias, the largest values."""
    values = jnp.linspace(1.0, 2.0, 999)[:, None] * jnp.ones((1, 8))
    scales = Blockwise(8, 8).encode(values, jax.random.key(0))["scales"]
    found = np.asarray(Bfloat16().decode(scales))
    self.assertTrue((found >= values[:, :1]).all())
    self.assertTrue((found <= values[:, :1] * (1 + 2**-7)).all())

  @parameterized.parameters(0x7FC00000, 0x7FFFFFFF, 0xFFFFFFFF, 0x7F800001)
  def test_no_nan_is_lost(self, bits):
    """Whatever its bits are, which differ by processor."""
    values = np.ones((1, 128), np.float32)
    values.view(np.uint32)[0, 3] = bits
    for code in (
      Bfloat16(), Blockwise(8, 128), Blockwise(4, 128), Rotated(64),
      Rotated(128, 2), Rotated(32, 1),
    ):  # fmt: skip
      found = code.decode(code.encode(jnp.asarray(values), jax.random.key(0)))
      self.assertFalse(np.all(np.isfinite(found)), code)

  def test_cost_of_scales(self):
    """1/64 and 1/32 of the integers, and the largest scale."""
    size = 2**20
    for name, integers, scales in (
      ("int8", size, size // 64), ("int4", size // 2, size // 64 + 4),
    ):  # fmt: skip
      self.assertEqual(code_of(name).num_bytes(size), integers + scales)

  @parameterized.parameters(
    Bfloat16(), Blockwise(8, 16), Blockwise(4, 16), Rotated(16),
    Rotated(16, 2), Rotated(8, 1),
  )  # fmt: skip
  def test_num_bytes_counts_the_arrays(self, code):
    encoded = code.encode(jnp.ones(64), jax.random.key(0))
    size = sum(x.nbytes for x in jax.tree.leaves(encoded))
    self.assertEqual(size, code.num_bytes(64))

  def test_names(self):
    self.assertIsNone(code_of("float32"))
    self.assertIsNone(code_of(jnp.float32))
    self.assertEqual(code_of(jnp.bfloat16), Bfloat16())
    self.assertEqual(code_of("bfloat16"), Bfloat16())
    self.assertEqual(code_of(jnp.int8), code_of("int8"))
    for name in ("bfloat16", "int8", "int4"):
      self.assertEqual(name_of(code_of(name)), name)
    self.assertEqual(name_of(Blockwise(8, 64)), "integers of 8 bits")
    self.assertEqual(name_of(Rotated(64, 2)), "2 bits, rotated")

    class Own(Bfloat16):
      """A code of a user."""

    self.assertEqual(name_of(Own()), "Own")
    for wrong in ("int2", "native_bfloat16", jnp.float16, None, 3):
      with self.assertRaisesRegex(ValueError, "`wire_dtype` must be one of"):
        code_of(wrong)
    with self.assertRaisesRegex(ValueError, r"use quantize\(bits=8\)"):
      code_of("int8", has_feedback=False)


if __name__ == "__main__":
  absltest.main()
