"""Views: leaves of a gradient as stacks of matrices.

A leaf is compressed as a stack of `count` matrices [rows, cols]. The view is a
row-major reshape, which copies no data, or a transposition and a reshape.
"""

import math
import re
from collections.abc import Callable
from typing import NamedTuple

from edgc_jax import validation


class MatrixView(NamedTuple):
  """The shape of a leaf viewed as `count` matrices of `rows` x `cols`.

  Attributes:
    count: Matrices in the leaf.
    rows: Rows of each.
    cols: Columns of each.
  """

  count: int
  rows: int
  cols: int


class TransposedView(NamedTuple):
  """A view of the leaf with its axes in another order; copies the leaf.

  Attributes:
    order: The axes in their new order, as for `jnp.transpose`.
    view: The view of the transposed leaf.
  """

  order: tuple[int, ...]
  view: MatrixView


ViewFn = Callable[[str, tuple[int, ...]], MatrixView | TransposedView | None]
# Names in paths of leaves, for `layer_matrix`.
_VECTORS = ("bias", "scale", "offset")
_STACKS = ("expert", "moe")  # axes before the last two count matrices
_KERNELS = ("kernel", "w", "weight")
_TO_HEADS = ("query", "key", "value", "q", "k", "v")
_FROM_HEADS = ("out", "o")
_FUSED = re.compile(r"qkv|c_attn|in_proj")
_HEAD = 256  # most values of a head
_WINDOW = 32  # widest window of a convolution, and longest scan of norms
_LINE = 7  # widest window along one axis that has no name
_CHANNELS = 16  # most channels of an image
_NORM = re.compile(r"(norm|^ln)\d*$")


def trailing_matrix(path: str, shape: tuple[int, ...]) -> MatrixView | None:
  """Views a leaf [..., m, n] as a stack of matrices [m, n].

  This is the convention of `jnp.linalg`, and fits scanned or stacked layers.

  Args:
    path: The leaf's key path; not used here, but a view may choose by it.
    shape: The leaf's shape.

  Returns:
    The view, or None for scalars and vectors, which are sent dense.

  >>> trailing_matrix("['blocks']['kernel']", (4, 192, 576))
  MatrixView(count=4, rows=192, cols=576)
  >>> trailing_matrix("['bias']", (192,))
  """
  del path
  if len(shape) < 2 or math.prod(shape) == 0:
    return None
  return MatrixView(math.prod(shape[:-2]), *shape[-2:])


def layer_matrix(path: str, shape: tuple[int, ...]) -> MatrixView | None:
  """Views a leaf as the matrices that its layer multiplies with; the default.

  The names at the end of the path and the shape tell the layouts of Flax (Linen
  and NNX), Haiku and Equinox apart:

    bias, scale, offset; in a norm            [..., n]            no matrix
    query, key, value of Flax's attention     [..., m, heads, d]  [m, heads d]
    out of Flax's attention                   [..., heads, d, n]  [heads d, n]
    fused qkv                                 [..., m, 3, (h,) d] [m, 3 h d]
    convolutions of Flax and Haiku            [..., k, k, m, n]   [k k m, n]
    convolutions of Equinox                   [..., m, n, k, k]   [m, n k k]
    all others                                [..., m, n]         [m, n]

  Axes before these count matrices, as of scanned layers. Names decide what a
  shape leaves open. A wrong guess never breaks the mean; it sends more, or
  loses more if several layers share one rank. `edgc_jax.describe` shows the
  views, and `matrix_view` replaces them.

  Args:
    path: The leaf's key path.
    shape: The leaf's shape.

  Returns:
    The view, or None for leaves that are sent dense.

  >>> layer_matrix("['attention']['query']['kernel']", (768, 12, 64))
  MatrixView(count=1, rows=768, cols=768)
  >>> layer_matrix("['Conv_0']['kernel']", (3, 3, 64, 128))
  MatrixView(count=1, rows=576, cols=128)
  >>> layer_matrix(".layers[0].weight", (128, 64, 3, 3))
  MatrixView(count=1, rows=128, cols=576)
  >>> layer_matrix("['blocks']['bias']", (12, 768))
  """
  words = re.findall(r"\w+", path)
  layer, name = ("", "", *[word for word in words if not word.isdigit()])[-2:]
  layer, path = layer.lower(), path.lower()
  is_gain = name == "weight" and _NORM.search(layer) and len(shape) <= 2
  if name in _VECTORS or (is_gain and math.prod(shape[:-1]) <= _WINDOW):
    return None
  is_stack = any(word in path for word in _STACKS)
  if len(shape) < 3 or name not in _KERNELS or 0 in shape or is_stack:
    return trailing_matrix(path, shape)
  if _FUSED.search(layer) and 3 in shape[-3:-1]:
    axis = -3 if shape[-3] == 3 and len(shape) > 3 else -2
    return _folded(shape, axis - 1, axis)
  *_, a, b, c = shape
  if name == "weight":
    window = _equal_run(shape[:1:-1])
    if window == 1 and c > _LINE and "conv" not in layer:
      window = 0  # a stack of narrow layers
    return _folded(shape, -window - 2, -window - 1)
  if "attn" in path or "attention" in path:
    # A scan has fewer steps than a layer has rows.
    if layer.removesuffix("_proj") in _TO_HEADS and b <= a and c <= _HEAD:
      return _folded(shape, -3, -2)
    if layer in _FROM_HEADS and b <= _HEAD and b < c:
      return _folded(shape, -3, -1)
  window = _equal_run(shape[-3::-1])
  # Without a name, a square window over the few channels of an image.
  if "conv" in layer or (window > 1 and b <= _CHANNELS):
    return _folded(shape, -window - 2, -1)
  return trailing_matrix(path, shape)


def scanned(axis: int, view: ViewFn = layer_matrix) -> ViewFn:
  """Returns the view of layers that are stacked along an inner axis.

  Such as MaxText's, whose parameters have the axis of scanned layers second:

    tx = edgc(matrix_view=scanned(1))

  Leaves with the word "layers" in their path are stacks along `axis`, which is
  moved to the front; `view` then sees the shape of one layer.

  Args:
    axis: The axis of the layers, at least 0.
    view: The view of the leaf of one layer.

  Raises:
    TypeError: if `axis` is not a Python integer, or `view` no function.
    ValueError: if `axis` is negative.

  >>> scanned(1)("['layers']['wi']['kernel']", (512, 12, 2048)).order
  (1, 0, 2)
  """

  validation.require_int("axis", axis, 0)
  validation.require_function(
    "view", view, "a leaf's path and shape", optional=False
  )

  def view_of(
    path: str, shape: tuple[int, ...]
  ) -> MatrixView | TransposedView | None:
    if "layers" not in re.findall(r"\w+", path) or len(shape) <= axis:
      return view(path, shape)
    order = (axis, *[i for i in range(len(shape)) if i != axis])
    found = view(path, shape[:axis] + shape[axis + 1 :])
    if isinstance(found, TransposedView):
      inner = [i + (i >= axis) for i in found.order]
      order, found = (axis, *inner), found.view
    if not isinstance(found, tuple) or len(found) != 3:
      return found  # None, or `leaves_in` refuses it
    count, rows, cols = found
    found = MatrixView(count * shape[axis], rows, cols)
    return (
      found if order == tuple(sorted(order)) else TransposedView(order, found)
    )

  return view_of


def _folded(shape: tuple[int, ...], rows: int, cols: int) -> MatrixView:
  """Folds axes [rows, cols) into rows, and axes from `cols` on into columns."""
  cut = (shape[:rows], shape[rows:cols], shape[cols:])
  return MatrixView(*map(math.prod, cut))


def _equal_run(sizes: tuple[int, ...]) -> int:
  """Returns how many of the first sizes are equal, as of a square window."""
  run = 0
  while run < len(sizes) and sizes[run] == sizes[0] <= _WINDOW:
    run += 1
  return run
