"""What a site sends: its change, encoded as bytes, in a frame that is checked.

The bytes of a leaf are those of the arrays of its code, end to end. They are
encoded by JAX, and decoded by NumPy, to the same numbers on every machine.
"""

import functools
import hashlib
import hmac
import json
import math
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from edgc_jax.methods import chunks
from edgc_jax.wire.codes import Blockwise, Code, Levels, gaussian_levels

FORMAT = 1
_MAGIC = b"edgc-site\n"
_HEAD = struct.Struct("<I32s")  # bytes of the header, and its code under a key
MOST_HEADER = 1 << 20  # bytes
_SMALL = 1000  # entries: leaves below, and vectors, are sent in 8 bits
_LEAST = 1e-30  # a norm that counts as zero
_EXACT = 2**22  # squares of up to 2^30 whose sum float64 holds
_VECTORS = Blockwise(8, 128)
_DENSE: Mapping[int, Code | None] = {
  32: None, 8: Blockwise(8, 128), 4: Levels(64),
  2: Levels(256, 2, is_rotated=True),
}  # fmt: skip


class Refused(ValueError):
  """Raised for bytes that no site may use; all sites agree on it."""


class _Leaf(NamedTuple):
  """How one leaf is sent."""

  shape: tuple[int, ...]
  encode: Callable[[jax.Array], Any]
  decode: Callable[[Any], np.ndarray]  # to [n], perhaps padded
  types: Any  # tree of `jax.ShapeDtypeStruct`, as `encode` returns it


class Layout:
  """The bytes of a change of all leaves.

  Attributes:
    num_bytes: Of a body.
    about: What all sites of a run must have in common, for JSON.
  """

  def __init__(
    self,
    shapes: Mapping[str, tuple[int, ...]],
    density: float | None,
    bits: int,
  ):
    """Plans the bytes.

    Args:
      shapes: Of the leaves by path, in their order.
      density: Share of the entries sent, in chunks of 4,096; None for all.
      bits: Of a value: 2 with a density, else 2, 4, 8 or 32.
    """
    self._leaves = [_leaf(shape, density, bits) for shape in shapes.values()]
    self.num_bytes = sum(
      math.prod(x.shape) * x.dtype.itemsize
      for leaf in self._leaves
      for x in jax.tree.leaves(leaf.types)
    )
    # Tables of levels decide what is decoded.
    levels = [gaussian_levels(count).tobytes() for count in (4, 15)]
    self.about = {
      "format": FORMAT, "density": density, "bits": bits,
      "levels": hashlib.sha256(b"".join(levels)).hexdigest(),
      "leaves": [[path, list(shape)] for path, shape in shapes.items()],
    }  # fmt: skip

  def encode(self, values: Sequence[np.ndarray]) -> bytes:
    """Encodes float32 arrays of the leaves' shapes, one after the other."""
    parts = []
    for leaf, x in zip(self._leaves, values, strict=True):
      arrays = jax.device_get(leaf.encode(jnp.asarray(x)))
      parts += [each.tobytes() for each in jax.tree.leaves(arrays)]
    return b"".join(parts)

  def decode(self, body: bytes) -> list[np.ndarray]:
    """Decodes a body to float32 arrays of the leaves' shapes.

    Raises:
      Refused: if the body has another length, or holds numbers that are not
        finite or indices that are out of range.
    """
    if len(body) != self.num_bytes:
      raise Refused(f"a body of {len(body)} bytes, not {self.num_bytes}")
    values, start = [], 0
    for leaf in self._leaves:
      flat, tree = jax.tree.flatten(leaf.types)
      arrays = []
      for x in flat:
        size = math.prod(x.shape)
        found = np.frombuffer(body, x.dtype, size, start).reshape(x.shape)
        start += found.nbytes
        arrays.append(found)
      try:
        with np.errstate(all="ignore"):  # of foreign bytes
          entries = leaf.decode(jax.tree.unflatten(tree, arrays))
      except IndexError as error:
        raise Refused("levels that are out of range") from error
      if not np.isfinite(entries).all():
        raise Refused("numbers that are not finite")
      values.append(entries[: math.prod(leaf.shape)].reshape(leaf.shape))
    return values


@functools.cache
def _leaf(shape: tuple[int, ...], density: float | None, bits: int) -> _Leaf:
  """Plans the bytes of one leaf."""
  size = math.prod(shape)
  is_small = len(shape) < 2 or size < _SMALL
  if density is not None and not is_small:
    chunk, count = chunks.sizes_of(density, chunks.MOST, size)
    encode = functools.partial(_encode_sparse, chunk, count)
    decode = functools.partial(_decode_sparse, chunk, count)
  else:
    code = _DENSE[bits] if density is None else _VECTORS
    if is_small and code is not None:
      code = _VECTORS
    code = code if size else None
    encode = functools.partial(_encode_dense, code)
    decode = functools.partial(_decode_dense, code)
  given = jax.ShapeDtypeStruct(shape, jnp.float32)
  return _Leaf(shape, jax.jit(encode), decode, jax.eval_shape(encode, given))


def _encode_dense(code: Code | None, x: jax.Array) -> Any:
  if code is None:
    return x.ravel()
  x = jnp.pad(x.ravel(), (0, -x.size % code.granule))
  return code.encode(x, jax.random.key(0))


def _decode_dense(code: Code | None, arrays: Any) -> Any:
  return arrays if code is None else code.decode(arrays)


def _encode_sparse(chunk: int, count: int, x: jax.Array) -> Any:
  values, index = chunks.largest(chunks.cut(x, chunk), count)
  return chunks.encode_values(values), chunks.pack_indices(index, chunk)


def _decode_sparse(chunk: int, count: int, arrays: Any) -> np.ndarray:
  coded, places = arrays
  values = chunks.decode_values(coded)
  index = np.asarray(chunks.unpack_indices(places, count, chunk))
  is_rising = (np.diff(index, axis=-1) > 0).all()
  if not is_rising or index.min() < 0 or index.max() >= chunk:
    raise Refused("indices that are out of order or range")
  found = np.zeros((len(values), chunk), np.float32)
  np.put_along_axis(found, index, values, -1)
  return found.ravel()


def norm(values: Sequence[np.ndarray]) -> float:
  """Returns the Euclidean norm, to about 15 bits, equal on all machines.

  A sum of floats depends on its order; the sum of these integers does not.

  >>> norm([np.float32([3, 4])])
  5.0
  """
  most = max(
    (float(max(x.max(), -x.min())) for x in values if x.size), default=0.0
  )
  if most < _LEAST:
    return 0.0
  step = np.float32(most / 2**15)
  total = 0
  for x in values:
    flat = x.ravel()
    for start in range(0, flat.size, _EXACT):
      # Whole numbers of up to 2^15: float64 adds up so many squares exactly.
      counts = np.rint(flat[start : start + _EXACT] / step).astype(np.float64)
      total += int(counts @ counts)
  return float(step) * math.sqrt(total)


def framed(header: Mapping[str, Any], body: bytes, key: bytes | None) -> bytes:
  """Returns a header and a body as the bytes of an object.

  Args:
    header: Values that JSON can hold.
    body: Whatever it describes.
    key: Shared by all sites, to tell that one of them wrote this; or None.
  """
  about = {
    **header, "size": len(body), "sha256": hashlib.sha256(body).hexdigest(),
  }  # fmt: skip
  text = json.dumps(about, sort_keys=True).encode()
  return _MAGIC + _HEAD.pack(len(text), _signature(text, key)) + text + body


def unframed(data: bytes, key: bytes | None) -> tuple[dict[str, Any], bytes]:
  """Reverses `framed`.

  Raises:
    Refused: if the bytes are not what a site with this key has written.
  """
  start = len(_MAGIC) + _HEAD.size
  if len(data) < start or not data.startswith(_MAGIC):
    raise Refused("no object of a site")
  length, signature = _HEAD.unpack_from(data, len(_MAGIC))
  text, body = data[start : start + length], data[start + length :]
  if not hmac.compare_digest(signature, _signature(text, key)):
    raise Refused("another key, or a header that was changed")
  try:
    header = json.loads(text)
    is_whole = header["size"] == len(body)
    is_whole &= header["sha256"] == hashlib.sha256(body).hexdigest()
  except (ValueError, TypeError, KeyError, RecursionError) as error:
    raise Refused("a header that cannot be read") from error
  if not is_whole:
    raise Refused("a body that was cut or changed")
  return header, body


def _signature(text: bytes, key: bytes | None) -> bytes:
  """Returns the HMAC of a header; its SHA-256 without a key."""
  if key is None:
    return hashlib.sha256(text).digest()
  return hmac.digest(key, text, "sha256")
