"""Codes against NumPy: their noise, their scales, their bytes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.reference import through_blocks

from edgc_jax.wire.codes import (
  Bfloat16,
  Blockwise,
  Rotated,
  _gaussian_levels,
  code_of,
  name_of,
)


@pytest.mark.parametrize("bits", [8, 4])
def test_integers_follow_the_formula(bits):
  values = np.random.default_rng(0).standard_normal((4, 32))
  values, key = values.astype(np.float32), jax.random.key(5)
  draws = np.asarray(jax.random.uniform(key, (4, 4, 8)))
  for is_random, offset in ((True, draws), (False, 0.5)):
    code = Blockwise(bits, 8, is_random)
    found = code.decode(code.encode(jnp.asarray(values), key))
    expected = through_blocks(values, bits, 8, offset)
    np.testing.assert_allclose(found, expected, 1e-6, 1e-7)


@pytest.mark.parametrize("bits", [8, 4])
def test_rounding_to_nearest_has_half_the_noise(bits):
  """And no error exceeds half a step."""
  values = np.random.default_rng(0).standard_normal((64, 256))
  values, key = jnp.asarray(values, jnp.float32), jax.random.key(1)
  errors = []
  for is_random in (False, True):
    code = Blockwise(bits, 256, is_random)
    errors.append(np.asarray(code.decode(code.encode(values, key)) - values))
  nearest, random = errors
  step = np.abs(values).max(1, keepdims=True) / (2 ** (bits - 1) - 1)
  assert (np.abs(nearest) <= 0.504 * step).all()
  ratio = np.square(nearest).mean() / np.square(random).mean()
  assert 0.47 <= ratio <= 0.53


@pytest.mark.parametrize("kind", ["gaussian", "heavy", "sparse"])
def test_rotated_values_have_the_noise_of_gaussian_numbers(kind):
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
  assert 0.006 <= noise[Rotated(64)] <= 0.0105
  if kind != "sparse":  # zeros need no bits
    assert noise[Rotated(64)] < noise[Blockwise(4, 64)]


def test_small_blocks_are_left_to_the_next_step():
  code, key = Rotated(16), jax.random.key(0)
  ones = jnp.ones((3, 16))
  values = (ones * jnp.array([[1.0], [2.0**-30], [2.0**-40]])).ravel()
  found = np.asarray(code.decode(code.encode(values, key))).reshape(3, 16)
  assert np.abs(found[0] - 1).max() < 0.5
  assert np.abs(found[1] * 2.0**30 - 1).max() < 0.5
  np.testing.assert_array_equal(found[2], 0)


def test_levels_have_the_published_error():
  """0.009497 for 16 levels (Max 1960, table I), and +-2.733 the last."""
  levels = _gaussian_levels(4)
  x = np.linspace(-8, 8, 200_001)
  density = np.exp(-x * x / 2) / np.sqrt(2 * np.pi) * (x[1] - x[0])
  nearest = np.abs(x[:, None] - levels).min(1)
  assert abs(float(nearest**2 @ density) - 0.009497) < 0.5e-5
  assert abs(float(levels[-1]) - 2.733) < 0.5e-3
  np.testing.assert_allclose(levels, -levels[::-1], atol=1e-6)


@pytest.mark.parametrize(
  ("bits", "error", "last"), [(1, 0.3634, 0.7979), (2, 0.1175, 1.510)]
)
@pytest.mark.slow
def test_few_levels_have_the_published_error(bits, error, last):
  """Max 1960, table I; rotated values of any distribution have no more."""
  levels = _gaussian_levels(bits)
  x = np.linspace(-8, 8, 200_001)
  density = np.exp(-x * x / 2) / np.sqrt(2 * np.pi) * (x[1] - x[0])
  nearest = np.abs(x[:, None] - levels).min(1)
  assert abs(float(nearest**2 @ density) - error) < 0.5e-4
  assert abs(float(levels[-1]) - last) < 0.5e-3
  values = np.random.default_rng(1).standard_normal((64, 1024))
  values *= np.exp(np.random.default_rng(2).standard_normal(values.shape))
  values = jnp.asarray(values, jnp.float32)
  code = Rotated(128, bits)
  found = code.decode(code.encode(values, jax.random.key(0)))
  noise = float(jnp.sum((found - values) ** 2) / jnp.sum(values**2))
  assert 0.85 * error <= noise <= 1.02 * error


def test_no_value_exceeds_the_scale():
  """A scale rounded to nearest would clip, and bias, the largest values."""
  values = jnp.linspace(1.0, 2.0, 999)[:, None] * jnp.ones((1, 8))
  scales = Blockwise(8, 8).encode(values, jax.random.key(0))["scales"]
  found = np.asarray(Bfloat16().decode(scales))
  assert (found >= values[:, :1]).all()
  assert (found <= values[:, :1] * (1 + 2**-7)).all()


@pytest.mark.parametrize(
  "bits", [0x7FC00000, 0x7FFFFFFF, 0xFFFFFFFF, 0x7F800001]
)
def test_no_nan_is_lost(bits):
  """Whatever its bits are, which differ by processor."""
  values = np.ones((1, 128), np.float32)
  values.view(np.uint32)[0, 3] = bits
  for code in (
    Bfloat16(),
    Blockwise(8, 128),
    Blockwise(4, 128),
    Rotated(64),
    Rotated(128, 2),
    Rotated(32, 1),
  ):
    found = code.decode(code.encode(jnp.asarray(values), jax.random.key(0)))
    assert not np.all(np.isfinite(found)), code


def test_cost_of_scales():
  """1/64 and 1/32 of the integers, and the largest scale."""
  size = 2**20
  for name, integers, scales in (
    ("int8", size, size // 64),
    ("int4", size // 2, size // 64 + 4),
  ):
    assert code_of(name).num_bytes(size) == integers + scales


@pytest.mark.parametrize(
  "code",
  [
    Bfloat16(),
    Blockwise(8, 16),
    Blockwise(4, 16),
    Rotated(16),
    Rotated(16, 2),
    Rotated(8, 1),
  ],
)
def test_num_bytes_counts_the_arrays(code):
  encoded = code.encode(jnp.ones(64), jax.random.key(0))
  size = sum(x.nbytes for x in jax.tree.leaves(encoded))
  assert size == code.num_bytes(64)


def test_names():
  assert code_of("float32") is None
  assert code_of(jnp.float32) is None
  assert code_of(jnp.bfloat16) == Bfloat16()
  assert code_of("bfloat16") == Bfloat16()
  assert code_of(jnp.int8) == code_of("int8")
  for name in ("bfloat16", "int8", "int4"):
    assert name_of(code_of(name)) == name
  assert name_of(Blockwise(8, 64)) == "integers of 8 bits"
  assert name_of(Rotated(64, 2)) == "2 bits, rotated"

  class Own(Bfloat16):
    """A code of a user."""

  assert name_of(Own()) == "Own"
  for wrong in ("int2", "native_bfloat16", jnp.float16, None, 3):
    with pytest.raises(ValueError, match="`wire_dtype` must be one of"):
      code_of(wrong)
  with pytest.raises(ValueError, match=r"use quantize\(bits=8\)"):
    code_of("int8", has_feedback=False)
