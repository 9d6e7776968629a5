"""Bytes of a site's change: as counted, decoded alike, and checked."""

import math

import hypothesis
import hypothesis.strategies as st
import jax
import numpy as np
import pytest

from edgc_jax.sites import payload
from edgc_jax.sites.payload import Layout, Refused
from edgc_jax.wire.codes import Bfloat16, Blockwise, Levels

SHAPES = {"bias": (7,), "kernel": (64, 96), "one": (), "stack": (3, 50, 41)}
CODES = [(1 / 64, 2), (0.25, 2), (None, 2), (None, 4), (None, 8), (None, 32)]


def draw(seed=0, scale=1.0):
  random = np.random.default_rng(seed)
  return [
    np.asarray(scale * random.standard_normal(shape), np.float32)
    for shape in SHAPES.values()
  ]


def energy(values):
  return sum(float(np.square(x, dtype=np.float64).sum()) for x in values)


@pytest.mark.parametrize(
  "code",
  [Bfloat16(), Blockwise(8, 128), Blockwise(4, 128), Levels(64),
   Levels(64, 4, True), Levels(256, 2, True), Levels(1024, 1, True)],
)  # fmt: skip
def test_numpy_decodes_what_jax_decodes(code):
  # More blocks than NumPy rotates at once.
  values = np.random.default_rng(1).standard_normal((3, 2**17))
  sent = code.encode(values.astype(np.float32), jax.random.key(0))
  own = code.decode(jax.device_get(sent))
  assert isinstance(own, np.ndarray) and own.dtype == np.float32
  np.testing.assert_allclose(own, code.decode(sent), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("density", "bits"), CODES)
def test_a_change_is_decoded(density, bits):
  """To its shapes, without gaining energy; vectors are in 8 bits."""
  layout, values = Layout(SHAPES, density, bits), draw()
  body = layout.encode(values)
  assert len(body) == layout.num_bytes
  found = layout.decode(body)
  assert [x.shape for x in found] == list(SHAPES.values())
  lost = energy([a - b for a, b in zip(values, found, strict=True)])
  most = {32: 0, 8: 1e-4, 4: 0.011, 2: 0.13}[bits] if density is None else 0.9
  assert lost <= most * energy(values)
  bias, *_, one, _ = zip(values, found, strict=True)
  for own, other in (bias, one):
    np.testing.assert_allclose(other, own, atol=np.abs(own).max() / 250)


def test_bytes_are_those_of_the_code():
  """Of one matrix of whole chunks and blocks, as docs and `topk` count them."""
  entries, shapes = 2**16, {"w": (256, 256)}
  for bits, expected in (
    (32, 4 * entries), (8, entries + 2 * entries // 128),
    (4, entries // 2 + entries // 64 + 4),
    (2, entries // 4 + entries // 256 + 4),
  ):  # fmt: skip
    assert Layout(shapes, None, bits).num_bytes == expected
  # 2 bits and 8 bits of place for 64 of 4,096 entries, and two magnitudes.
  assert Layout(shapes, 1 / 64, 2).num_bytes == entries // 4096 * (16 + 64 + 4)


def test_sparse_entries_are_the_largest():
  values = [np.zeros((64, 64), np.float32)]
  values[0][3, :32], values[0][40, :32] = 2.0, -1.0
  layout = Layout({"w": (64, 64)}, 1 / 64, 2)
  np.testing.assert_array_equal(layout.decode(layout.encode(values)), values)


@hypothesis.given(st.data())
@hypothesis.settings(deadline=None, max_examples=15)
@pytest.mark.parametrize(("density", "bits"), CODES)
def test_foreign_bytes_are_numbers_or_refused(density, bits, data):
  """Whatever is in a body, nothing but `Refused` is raised."""
  layout = Layout({"w": (40, 50), "b": (3,)}, density, bits)
  seed = data.draw(st.integers(0, 2**32))
  body = np.random.default_rng(seed).bytes(layout.num_bytes)
  try:
    found = layout.decode(body)
  except Refused:
    return
  assert all(np.isfinite(x).all() for x in found)


def test_numbers_that_are_not_finite_are_refused():
  layout = Layout({"w": (40, 50)}, None, 32)
  values = np.ones((40, 50), np.float32)
  values[3, 4] = np.inf
  with pytest.raises(Refused, match="not finite"):
    layout.decode(values.tobytes())
  with pytest.raises(Refused, match="a body of 3 bytes"):
    layout.decode(b"abc")


@pytest.mark.parametrize("key", [None, b"secret"])
def test_every_changed_byte_is_seen(key):
  data = payload.framed({"kind": "change", "round": 3}, b"body " * 3, key)
  header, body = payload.unframed(data, key)
  assert header["round"] == 3 and body == b"body " * 3
  for i in range(len(data)):
    with pytest.raises(Refused):
      payload.unframed(data[:i], key)
    damaged = bytearray(data)
    damaged[i] ^= 1
    with pytest.raises(Refused):
      payload.unframed(bytes(damaged), key)
  with pytest.raises(Refused):
    payload.unframed(data + b"x", key)


def test_a_key_tells_who_has_written():
  data = payload.framed({"round": 3}, b"", b"one")
  for other in (None, b"two"):
    with pytest.raises(Refused, match="another key"):
      payload.unframed(data, other)


def test_the_norm_does_not_depend_on_the_order():
  values = draw(3, 1e-3)
  exact = math.sqrt(energy(values))
  assert payload.norm(values) == pytest.approx(exact, rel=1e-4)
  mixed = [np.flip(x) for x in reversed(values)]
  assert payload.norm(mixed) == payload.norm(values)
  assert payload.norm([np.zeros(3, np.float32)]) == 0
  # More than are added up at once; the smallest and the largest numbers.
  count = 2**22 + 5
  for x in (3.0, 1e-20, 3e38):
    own = [np.full(count, x, np.float32), np.zeros((0, 2), np.float32)]
    assert payload.norm(own) == pytest.approx(x * math.sqrt(count), rel=1e-4)
