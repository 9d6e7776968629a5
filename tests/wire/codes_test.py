"""Codes: they contract, and their noise, scales and bytes against NumPy."""

import functools

import hypothesis
import hypothesis.extra.numpy
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.reference import through_blocks

from edgc_jax.wire.codes import (
  Bfloat16,
  Blockwise,
  Levels,
  _hadamard,
  _signs,
  _walsh,
  code_of,
  gaussian_levels,
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


def levels_of(kind, random):
  """Draws values of which one kind or another is hard to encode."""
  n = 1024
  x = random.standard_normal(n)
  if kind == "spike":
    x = np.eye(1, n, 5)[0]
  elif kind == "constant":
    x = np.ones(n)
  elif kind == "two values":
    x = np.where(x < 0, 1.0, -3.0)
  elif kind == "powers of two":
    x = 2.0 ** random.integers(-60, 60, n)
  elif kind == "one block of many":
    x[64:] = 0
  elif kind == "a spike beside noise":
    x *= np.where(np.arange(n) % 64 == 0, 1.0, 0.02)
  elif kind == "heavy tails":
    x = random.standard_cauchy(n)
  elif kind == "tiny":
    x *= 1e-36
  elif kind == "huge":
    x *= 1e37
  elif kind == "a spike after rotation":  # of 64 values: 1 bit gains least
    signs = _signs(64)
    x = np.tile(signs * _walsh(64)[7], n // 64)
  return np.asarray(x, np.float32)


KINDS = (
  "gaussian", "spike", "constant", "two values", "powers of two",
  "one block of many", "a spike beside noise", "heavy tails", "tiny", "huge",
  "a spike after rotation",
)  # fmt: skip
FED_BACK = (
  Blockwise(8, 128), Levels(64), Levels(256), Levels(64, 4, True),
  Levels(256, 2, True), Levels(8, 2, True), Levels(64, 1, True),
  Levels(1024, 1, True),
)  # fmt: skip


@functools.cache
def round_trip(code):
  return jax.jit(lambda x: code.decode(code.encode(x, jax.random.key(0))))


def assert_contracts(code, values):
  """No less than one value of a block is recovered."""
  found = np.float64(round_trip(code)(values[None])[0])
  values = np.float64(values)
  scale = np.abs(values).max() or 1.0
  error, energy = (np.square(x / scale).sum() for x in (found - values, values))
  assert error <= (1 - 0.9 / code.granule) * energy, (error, energy)
  if not code.moves_zeros:
    assert not found[values == 0].any()


@pytest.mark.parametrize("code", FED_BACK, ids=repr)
def test_every_code_contracts(code):
  for kind in KINDS:
    assert_contracts(code, levels_of(kind, np.random.default_rng(0)))


@hypothesis.given(
  hypothesis.extra.numpy.arrays(
    np.float32, 256,
    elements=hypothesis.strategies.floats(
      -(2.0**100), 2.0**100, width=32
    ).map(lambda x: x if abs(x) > 2.0**-100 else 0.0),
  ),
  hypothesis.strategies.sampled_from([c for c in FED_BACK if c.granule <= 256]),
)  # fmt: skip
@hypothesis.settings(max_examples=200, deadline=None)
def test_every_code_contracts_whatever_the_values(values, code):
  # A block of less than 2^-32 of the largest one is sent as zeros.
  assert_contracts(code, values)


@pytest.mark.parametrize("kind", KINDS[:-1])
def test_levels_have_the_noise_of_gaussian_numbers_after_a_rotation(kind):
  """Max 1960, table I: 0.0095, 0.1175 and 0.3634 of the energy at most."""
  values = levels_of(kind, np.random.default_rng(3))
  few = 0.1225 if kind == "two values" else 0.1199
  scale = np.abs(values).max()
  for bits, noise in ((4, 0.0105), (2, few), (1, 0.3707)):
    found = round_trip(Levels(256, bits, True))(values[None])[0]
    error = np.square((found - values) / scale).sum()
    assert error <= noise * np.square(values / scale).sum(), bits


def test_levels_without_a_rotation_lose_less_of_gaussian_numbers():
  """Fifteen levels of least error: 0.0089; with equal distances 0.0113."""
  values = np.random.default_rng(0).standard_normal((512, 64))
  values = jnp.asarray(values, jnp.float32).reshape(1, -1)
  for code, least, most in (
    (Levels(64), 0.0085, 0.0092), (Levels(64, 4, True), 0.0084, 0.0091),
    (Blockwise(4, 64), 0.0110, 0.0120),
  ):  # fmt: skip
    error = jnp.sum((round_trip(code)(values) - values) ** 2)
    assert least <= error / jnp.sum(values**2) <= most


def test_a_rotation_is_orthonormal_and_its_own_inverse():
  """H of a product of factors is the Hadamard matrix, too."""
  for size in (8, 64, 512, 4096):
    eye = np.eye(size, dtype=np.float32)[:40]
    rotated = np.asarray(_hadamard(jnp.asarray(eye)))
    np.testing.assert_allclose(rotated, _walsh(size)[:40], atol=1e-6)
    np.testing.assert_allclose(_hadamard(jnp.asarray(rotated)), eye, atol=1e-5)


def test_small_blocks_are_left_to_the_next_step():
  code, ones = Levels(16), jnp.ones((3, 16))
  values = (ones * jnp.array([[1.0], [2.0**-30], [2.0**-40]])).ravel()
  found = np.asarray(round_trip(code)(values)).reshape(3, 16)
  assert np.abs(found[0] - 1).max() < 0.5
  assert np.abs(found[1] * 2.0**30 - 1).max() < 0.5
  np.testing.assert_array_equal(found[2], 0)


@pytest.mark.parametrize(
  ("count", "error", "last"),
  [(2, 0.3634, 0.7979), (4, 0.1175, 1.510), (16, 0.009497, 2.733)],
)
def test_levels_have_the_published_error(count, error, last):
  """Max 1960, table I."""
  levels = gaussian_levels(count)
  x = np.linspace(-8, 8, 200_001)
  density = np.exp(-x * x / 2) / np.sqrt(2 * np.pi) * (x[1] - x[0])
  nearest = np.abs(x[:, None] - levels).min(1)
  most = 0.5e-5 if count == 16 else 0.5e-4
  assert abs(float(nearest**2 @ density) - error) < most
  assert abs(float(levels[-1]) - last) < 0.5e-3
  np.testing.assert_array_equal(levels, -levels[::-1])
  assert gaussian_levels(15)[7] == 0


def test_rotated_values_of_any_scales_have_the_published_error():
  """And less than plain blocks."""
  values = np.random.default_rng(1).standard_normal((64, 1024))
  values *= np.exp(np.random.default_rng(2).standard_normal(values.shape))
  values = jnp.asarray(values, jnp.float32)

  def noise(code):
    found = round_trip(code)(values)
    return float(jnp.sum((found - values) ** 2) / jnp.sum(values**2))

  for bits, error in ((1, 0.3634), (2, 0.1175), (4, 0.009497)):
    assert 0.85 * error <= noise(Levels(128, bits, True)) <= 1.02 * error, bits
  assert noise(Levels(64, 4, True)) < noise(Blockwise(4, 64))


def test_no_value_exceeds_the_scale():
  """A scale rounded to nearest would clip, and bias, the largest values."""
  values = jnp.linspace(1.0, 2.0, 999)[:, None] * jnp.ones((1, 8))
  _, scales = Blockwise(8, 8).encode(values, jax.random.key(0)).blocks
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
    Levels(64),
    Levels(128, 2, True),
    Levels(32, 1, True),
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
    Levels(16),
    Levels(16, 2, True),
    Levels(8, 1, True),
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
  assert name_of(Levels(64, 2, True)) == "2 bits, rotated"

  class Own(Bfloat16):
    """A code of a user."""

  assert name_of(Own()) == "Own"
  for wrong in ("int2", "native_bfloat16", jnp.float16, None, 3):
    with pytest.raises(ValueError, match="`wire_dtype` must be one of"):
      code_of(wrong)
  with pytest.raises(ValueError, match=r"use quantize\(bits=8\)"):
    code_of("int8", has_feedback=False)
