"""Leaves of a gradient as stacks of matrices, and checks of the leaves.

A leaf is compressed as a stack of `count` matrices [rows, cols]. The view is a
row-major reshape, which copies no data. Everything here runs while JAX traces:
shapes and ranks are Python integers.
"""

import math
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from edgc_jax.comm import collectives
from edgc_jax.comm.dataflow import Axes, AxisName, is_varying, names


class MatrixView(NamedTuple):
  """The shape of a leaf viewed as `count` matrices of `rows` x `cols`."""

  count: int
  rows: int
  cols: int


ViewFn = Callable[[str, tuple[int, ...]], MatrixView | None]
PlacementFn = Callable[[str, tuple[int, ...]], str]
ShardsFn = Callable[[Any], Sequence[tuple[str, ...]]]
PLACEMENTS = ("own", "split", "shared")
# Names in paths of leaves, for `layer_matrix`.
_VECTORS = ("bias", "scale", "offset")
_STACKS = ("expert", "moe")  # axes before the last two count matrices
_KERNELS = ("kernel", "w", "weight")
_TO_HEADS = ("query", "key", "value", "q", "k", "v")
_FROM_HEADS = ("out", "o")
_HEAD = 256  # most values of a head
_WINDOW = 32  # widest window of a convolution, and longest scan of norms
_LINE = 7  # widest window along one axis that has no name
_CHANNELS = 16  # most channels of an image
_NORM = re.compile(r"(norm|^ln)\d*$")


class Leaf(NamedTuple):
  """Static description of one gradient leaf.

  Attributes:
    path: Its key path in the tree.
    shape: Its shape on one device.
    dtype: Its dtype.
    view: Its matrices; None if it is never sent as factors.
    placement: "own", "split" or "shared": see `own_placement`.
    shards: Axes of the mesh over which it is sharded (`comm.dataflow`).
  """

  path: str
  shape: tuple[int, ...]
  dtype: Any
  view: MatrixView | None
  placement: str = "own"
  shards: tuple[str, ...] = ()

  @property
  def size(self) -> int:
    """Number of entries on one device."""
    return math.prod(self.shape)


class Measurement(NamedTuple):
  """Measured energies of K matrices, of one exchange or averaged over some."""

  lost: jax.Array  # float32 [K], |mean of residuals|^2
  columns: jax.Array  # float32 [K, width], squared norms of the columns of Q

  @property
  def energy(self) -> jax.Array:
    """|mean of gradients plus residuals|^2; float32 [K]."""
    return self.lost + jnp.sum(self.columns, axis=1)

  @property
  def lost_share(self) -> jax.Array:
    """Share of the energy lost by compression; float32 [K]."""
    return share(self.lost, self.energy)


def share(part: jax.Array, whole: jax.Array) -> jax.Array:
  """Returns part / whole; 0 if both are 0."""
  return part / jnp.where(whole > 0, whole, 1.0)


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


def own_placement(path: str, shape: tuple[int, ...]) -> str:
  """Returns "own": by default no leaf is common to several pipeline stages.

  A placement says which part of a leaf a stage holds:

    own     layers that no other stage has, such as its blocks
    split   a part of a tensor that all stages use together, such as rows of
            the embedding; its gradient is complete once stage 0 is done
    shared  the same values as all stages, such as the final norm; the stages
            sum its gradient, and it is always sent dense

  Args:
    path: The leaf's key path.
    shape: The leaf's shape on one stage.
  """
  del path, shape
  return "own"


def is_variable(leaf: Any) -> bool:
  """Returns whether this is a variable of Flax NNX, which wraps an array."""
  return hasattr(leaf, "get_value") and hasattr(leaf, "get_metadata")


def without_variables(tree: Any) -> Any:
  """Returns a tree with the arrays in place of NNX's variables."""
  return jax.tree.map(
    lambda x: x.get_value() if is_variable(x) else x, tree, is_leaf=is_variable
  )


def arrays_of(tree: Any) -> Any:
  """Drops all leaves without a shape, such as the functions of a model."""
  return jax.tree.map(lambda x: x if hasattr(x, "shape") else None, tree)


def leaves_in(
  tree: Any,
  view_fn: ViewFn = layer_matrix,
  placement_fn: PlacementFn = own_placement,
  shards: Sequence[tuple[str, ...]] | None = None,
) -> tuple[Leaf, ...]:
  """Describes the leaves of a gradient tree, in `jax.tree` order.

  Args:
    tree: Arrays or `jax.ShapeDtypeStruct`s.
    view_fn: Returns a leaf's view from its path and shape.
    placement_fn: Returns a leaf's placement from its path and shape.
    shards: The axes over which each leaf is sharded; None if none is.

  Returns:
    One `Leaf` per leaf.

  Raises:
    TypeError: if a leaf is not real floating.
    ValueError: if a view does not hold as many values as its leaf, or a
      placement is none of `PLACEMENTS`.
  """
  leaves = []
  # With `is_variable`, paths are the same with and without NNX's variables.
  values = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_variable)
  shards = shards or [()] * len(values)
  for (key_path, value), axes in zip(values, shards, strict=True):
    path, value = jax.tree_util.keystr(key_path), without_variables(value)
    shape, dtype = tuple(jnp.shape(value)), jnp.result_type(value)
    if not jnp.issubdtype(dtype, jnp.floating):
      raise TypeError(
        f"`updates` must have real floating leaves, got {dtype} at {path};"
        " leave such leaves out with optax.masked or optax.partition."
      )
    view = view_fn(path, shape)
    if view is not None:
      view = MatrixView(*view)
      if math.prod(view) != math.prod(shape):
        raise ValueError(
          f"`matrix_view` must keep the number of values, got {tuple(view)}"
          f" for leaf {path} of shape {shape}; return (count, rows, cols)"
          f" whose product is {math.prod(shape)}, or None to send it dense."
        )
    placement = placement_fn(path, shape)
    if placement not in PLACEMENTS:
      raise ValueError(
        f"`placement` must return one of {PLACEMENTS}, got {placement!r} for"
        f" leaf {path}; return 'own' for a leaf that only one stage holds."
      )
    view = None if placement == "shared" else view
    leaves.append(Leaf(path, shape, dtype, view, placement, axes))
  return tuple(leaves)


def require_local(
  gradients: Sequence[jax.Array],
  leaves: Sequence[Leaf],
  axis_name: AxisName,
  axes: Axes | None = None,
) -> None:
  """Raises if JAX's types show that gradients are already summed over the axis.

  Args:
    gradients: The leaves passed to `update`.
    leaves: Their descriptions.
    axis_name: The bound axes of the replicas.
    axes: All axes that do not shard leaves, to check that without types there
      are no more; None checks nothing.

  Raises:
    ValueError: if varying types are tracked and a leaf does not vary over all
      of the axes, or if they are not tracked and leaves may be sharded.
  """
  if collectives.num_devices(axis_name) == 1 or not gradients:
    return
  if not collectives.tracks_varying(axis_name):
    mesh = jax.sharding.get_abstract_mesh()
    if axes is not None and mesh.manual_axes:
      _require_no_more(mesh, axes)
    return
  summed = [
    leaf.path
    for gradient, leaf in zip(gradients, leaves, strict=True)
    if not all(is_varying(gradient, axis) for axis in names(axis_name))
  ]
  if summed:
    raise ValueError(
      f"`updates` must be local gradients that vary over axis {axis_name!r},"
      f" got gradients equal on all replicas at {summed[0] or 'the root'}"
      f" ({len(summed)} of {len(leaves)} leaves): under shard_map, jax.grad"
      " with respect to replicated parameters sums them over the axis,"
      " uncompressed;"
      f" differentiate with respect to jax.lax.pcast(params, {axis_name!r},"
      ' to="varying") instead, and drop any pmean or psum of the gradients. If'
      " the step does so already: only one reducer may see a leaf, so drop the"
      " other from the chain; and optax.MultiSteps types gradients as equal on"
      " all replicas, so use edgc_jax.accumulate in its place."
    )


def _require_no_more(mesh: jax.sharding.AbstractMesh, axes: Axes) -> None:
  """Raises if the mesh has bound axes that may shard leaves, without types."""
  more = sorted(set(mesh.manual_axes) - axes.known)
  more = [axis for axis in more if mesh.shape[axis] > 1]
  if more:
    raise ValueError(
      f"`check_vma` must be True, its default, on a mesh with further axes, got"
      f" False with {more}: only JAX's types show which leaves they shard. Name"
      " axes that split the batch alone in the reducer's `fast_axis`."
    )


def require_same_leaves(updates: Any, like: Any) -> None:
  """Raises unless the gradients have the leaves of the parameters.

  Args:
    updates: The tree passed to `update`.
    like: A tree of the state with an entry for every leaf that `init` saw.

  Raises:
    ValueError: if a leaf is missing (a gradient is None, for example) or new.
  """
  is_entry = lambda x: isinstance(x, optax.MaskedNode)  # noqa: E731
  now, then = (
    {
      jax.tree_util.keystr(path)
      for path, _ in jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_entry)
    }
    for tree in (updates, like)
  )
  missing, new = sorted(then - now), sorted(now - then)
  if missing or new:
    found = f"none at {missing[0]}" if missing else f"one more at {new[0]}"
    raise ValueError(
      f"`updates` must have the leaves of the parameters that `init` saw, got"
      f" {found} ({len(missing)} missing, {len(new)} more); a gradient that is"
      " None is no leaf, so pass zeros, or split the tree with optax.partition"
      " before `init`."
    )


def require_shapes(
  name: str,
  leaves: Sequence[Leaf],
  arrays: Sequence[jax.Array],
  shapes: Sequence[tuple[int, ...]],
) -> None:
  """Raises unless the state's arrays have the shapes of one replica.

  Only shapes distinguish the arrays of one replica from global ones.

  Args:
    name: Of the arrays.
    leaves: The leaves that they belong to.
    arrays: The arrays; may be empty.
    shapes: Expected shapes.

  Raises:
    ValueError: if an array has another shape.
  """
  for leaf, x, shape in zip(leaves, arrays, shapes, strict=False):
    if tuple(x.shape) != tuple(shape):
      raise ValueError(
        f"`state` must be the state of one replica, with a {name} of shape"
        f" {tuple(shape)} for the leaf at {leaf.path or 'the root'}, got"
        f" {tuple(x.shape)}; under jax.shard_map create it inside, with"
        " jax.shard_map(tx.init, mesh=mesh, in_specs=PartitionSpec(),"
        " out_specs=edgc_jax.state_specs(tx, params)), and resize a state of"
        " another number of replicas with edgc_jax.resize_replicas."
      )
