"""Codes and means of encoded values, against NumPy on four replicas."""

import functools

import chex
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from absl.testing import absltest, parameterized
from helpers.meshes import AXIS, assert_replicas_equal

from edgc_jax.comm import averages
from edgc_jax.comm.codes import (
  Bfloat16,
  Blockwise,
  NativeBfloat16,
  Rotated,
  Signs,
  _gaussian_levels,
  code_of,
)

REPLICAS = 4
SHAPES = ((5, 7), (40,), (3, 2, 4))


def draw(seed=0, scale=1.0):
  """Draws one list of values of four replicas."""
  random = np.random.default_rng(seed)
  return [
    np.asarray(scale * random.standard_normal((REPLICAS, *shape)), np.float32)
    for shape in SHAPES
  ]


@functools.cache
def average_fn(code):
  def run(values, key):
    return averages.average(values, AXIS, code, key, jnp.float32(1.0))

  return jax.pmap(
    run,
    axis_name=AXIS,
    in_axes=(0, None),
    devices=jax.devices()[:REPLICAS],
  )


def in_numpy(values, round_trip, granule):
  """Returns means and sent values, with parts and padding written out."""
  sizes = [-(-v[0].size // granule) * granule for v in values]
  flat = np.concatenate(
    [
      np.pad(
        v.reshape(REPLICAS, -1), ((0, 0), (0, size - v[0].size)), mode="edge"
      )
      for v, size in zip(values, sizes, strict=True)
    ],
    axis=1,
  )
  part = -(-flat.shape[1] // (granule * REPLICAS)) * granule
  flat = np.pad(flat, ((0, 0), (0, part * REPLICAS - flat.shape[1])))
  sent = round_trip(flat)
  exact = sent.mean(0)
  mean = np.concatenate([round_trip(p) for p in np.split(exact, REPLICAS)])
  for replica in range(REPLICAS):
    own = slice(replica * part, (replica + 1) * part)
    sent[replica, own] += REPLICAS * (mean - exact)[own]

  def cut(rows):
    starts = np.cumsum([0, *sizes[:-1]])
    return [
      rows[..., start : start + v[0].size].reshape(
        *rows.shape[:-1], *v[0].shape
      )
      for start, v in zip(starts, values, strict=True)
    ]

  return cut(mean), cut(sent)


def sign_round_trip(x, block=8):
  blocks = x.reshape(-1, block)
  signs = np.where(blocks >= 0, np.float32(1), np.float32(-1))
  return (signs * np.abs(blocks).mean(1, keepdims=True)).reshape(x.shape)


def up_to_bf16(x):
  """Rounds non-negative numbers up."""
  near = bf16_round_trip(x)
  above = np.nextafter(near.astype(ml_dtypes.bfloat16), ml_dtypes.bfloat16(9e9))
  return np.where(near >= x, near, above.astype(np.float32))


def bf16_round_trip(x):
  return x.astype(ml_dtypes.bfloat16).astype(np.float32)


class AverageTest(parameterized.TestCase):
  @parameterized.named_parameters(
    ("bfloat16", Bfloat16(), bf16_round_trip, 1),
    ("signs", Signs(8), sign_round_trip, 8),
  )
  def test_agrees_with_numpy(self, code, round_trip, granule):
    values = draw()
    found = average_fn(code)(values, jax.random.key(0))
    mean, sent = in_numpy(values, round_trip, granule)
    assert_replicas_equal(found.mean)
    chex.assert_trees_all_close(
      [m[0] for m in found.mean], mean, rtol=1e-6, atol=1e-6
    )
    chex.assert_trees_all_close(found.sent, sent, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(found.exact, np.ones(REPLICAS))

  @parameterized.parameters(
    None, Bfloat16(), NativeBfloat16(), Blockwise(8, 16), Blockwise(4, 16),
    Blockwise(4, 16, is_random=True), Rotated(16), Signs(16),
  )  # fmt: skip
  def test_sent_values_have_the_mean_that_is_received(self, code):
    """So error feedback, which keeps the rest, loses nothing."""
    found = average_fn(code)(draw(1), jax.random.key(1))
    assert_replicas_equal(found.mean)
    tolerance = 1e-2 if isinstance(code, NativeBfloat16) else 1e-5
    chex.assert_trees_all_close(
      [np.mean(sent, axis=0) for sent in found.sent],
      [mean[0] for mean in found.mean],
      rtol=tolerance,
      atol=tolerance,
    )

  @parameterized.parameters(8, 4)
  def test_rounding_is_unbiased(self, bits):
    """The mean of 400 draws is close; one draw is not."""
    code = Blockwise(bits, 16, is_random=True)
    values = draw(2)
    keys = jax.random.split(jax.random.key(3), 400)
    draw_all = jax.pmap(
      lambda v: jax.vmap(lambda key: averages.average(v, AXIS, code, key).mean)(
        keys
      ),
      axis_name=AXIS,
      devices=jax.devices()[:REPLICAS],
    )
    draws = draw_all(values)
    for leaf, value in enumerate(values):
      found = np.asarray(draws[leaf][0])
      step = np.abs(value).max() / (2 ** (bits - 1) - 1)
      error = np.abs(found.mean(0) - value.mean(0)).max()
      # Two roundings of up to half a step each: 0.5 / sqrt(400) and the tail.
      self.assertLess(error, 4 * step * 0.6 / 400**0.5)
      self.assertGreater(np.abs(found[0] - value.mean(0)).max(), step / 10)

  @parameterized.parameters(
    Bfloat16(), Blockwise(8, 16), Blockwise(4, 16), Rotated(16), Signs(16)
  )
  def test_one_bad_entry_reaches_all_replicas(self, code):
    for bad in (np.nan, np.inf, -np.inf):
      values = draw()
      values[1][2, 3] = bad
      found = average_fn(code)(values, jax.random.key(0))
      self.assertFalse(np.isfinite(found.mean[1]).all(axis=1).any())

  @parameterized.product(
    scale=[0.0, 1e-38, 1e-20, 1e30],
    code=[
      Bfloat16(),
      Blockwise(8, 16),
      Blockwise(4, 16),
      Rotated(16),
      Signs(16),
    ],
  )
  def test_any_scale_stays_finite(self, scale, code):
    values = draw(scale=scale)
    found = average_fn(code)(values, jax.random.key(0))
    largest = max(np.abs(value).max() for value in values)
    chex.assert_tree_all_finite(found.mean)
    for mean in found.mean:
      self.assertLessEqual(np.abs(mean).max(), 1.01 * largest)


class PaddingTest(absltest.TestCase):
  def test_the_last_block_of_a_leaf_has_its_own_scale(self):
    values = [np.ones((REPLICAS, 17), np.float32)]
    found = average_fn(Signs(16))(values, jax.random.key(0))
    np.testing.assert_allclose(found.mean[0][0], np.ones(17))


class CodesTest(parameterized.TestCase):
  @parameterized.parameters(8, 4)
  def test_integers_follow_the_formula(self, bits):
    values = draw()[1][:, :32]
    key, levels = jax.random.key(5), 2 ** (bits - 1) - 1
    blocks = values.reshape(REPLICAS, -1, 8)
    scale = up_to_bf16(np.abs(blocks).max(-1, keepdims=True))
    draws = np.asarray(jax.random.uniform(key, blocks.shape))
    for is_random, offset in ((True, draws), (False, 0.5)):
      code = Blockwise(bits, 8, is_random)
      found = code.decode(code.encode(jnp.asarray(values), key))
      expected = np.clip(
        np.floor(blocks / scale * levels + offset), -levels, levels
      ) * (scale / levels)
      np.testing.assert_allclose(
        found, expected.reshape(values.shape), 1e-6, 1e-7
      )

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
    levels = _gaussian_levels()
    x = np.linspace(-8, 8, 200_001)
    density = np.exp(-x * x / 2) / np.sqrt(2 * np.pi) * (x[1] - x[0])
    nearest = np.abs(x[:, None] - levels).min(1)
    self.assertAlmostEqual(float(nearest**2 @ density), 0.009497, places=5)
    self.assertAlmostEqual(float(levels[-1]), 2.733, places=3)
    np.testing.assert_allclose(levels, -levels[::-1], atol=1e-6)

  def test_no_value_exceeds_the_scale(self):
    """A scale rounded to nearest would clip, and bias, the largest values."""
    values = jnp.linspace(1.0, 2.0, 999)[:, None] * jnp.ones((1, 8))
    scales = Blockwise(8, 8).encode(values, jax.random.key(0))["scales"]
    found = np.asarray(Bfloat16().decode(scales))
    self.assertTrue((found >= values[:, :1]).all())
    self.assertTrue((found <= values[:, :1] * (1 + 2**-7)).all())

  def test_cost_of_scales(self):
    """1/64 and 1/32 of the integers, and the largest scale."""
    size = 2**20
    for name, integers, scales in (
      ("int8", size, size // 64), ("int4", size // 2, size // 64 + 4),
    ):  # fmt: skip
      self.assertEqual(code_of(name).num_bytes(size), integers + scales)

  @parameterized.parameters(
    Bfloat16(), Blockwise(8, 16), Blockwise(4, 16), Rotated(16), Signs(16)
  )
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
    for wrong in ("int2", jnp.float16, None, 3):
      with self.assertRaisesRegex(ValueError, "`wire_dtype` must be one of"):
        code_of(wrong)
    with self.assertRaisesRegex(ValueError, r"use quantize\(bits=8\)"):
      code_of("int8", has_feedback=False)


if __name__ == "__main__":
  absltest.main()
