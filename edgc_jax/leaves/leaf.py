"""Leaves of a gradient: what is static about each, and what its state keeps.

Everything static runs while JAX traces: shapes and ranks are Python integers.
"""

import dataclasses
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from edgc_jax import validation
from edgc_jax.leaves.views import (
  MatrixView,
  TransposedView,
  ViewFn,
  layer_matrix,
)

PlacementFn = Callable[[str, tuple[int, ...]], str]
ShardsFn = Callable[[Any], Sequence[tuple[str, ...]]]
PLACEMENTS = ("own", "split", "shared")


@dataclasses.dataclass(frozen=True)
class Leaf:
  """What is static about one leaf, or about a stack of equal leaves.

  Attributes:
    path: Its key path in the tree.
    shape: Its shape on one device.
    dtype: Its dtype.
    view: Its matrices; None if it is always sent dense.
    order: Order of its axes in the view; None if they keep theirs.
    placement: "own", "split" or "shared": see `own_placement`.
    shards: Axes of the mesh over which it is sharded (`wire.order.Axes`).
    method: Sends it (`reducer.rounds.Method`).
    cap: Most columns of the factors of its matrices; 0 without factors.
    width: Columns of the factors Q in the state, from the cap and the largest
      rank that a matrix may get.
    is_fixed: Whether its factors always have that width. If not, the columns in
      use are packed.
    is_encoded: Whether its values are encoded when it is sent dense.
    has_residual: Whether its state keeps a residual.
    exchange: Index of the exchange that sends it, from 0.
  """

  path: str
  shape: tuple[int, ...]
  dtype: Any
  view: MatrixView | None
  placement: str = "own"
  shards: tuple[str, ...] = ()
  method: Any = None
  cap: int = 0
  width: int = 0
  is_fixed: bool = False
  is_encoded: bool = False
  has_residual: bool = False
  exchange: int = 0
  order: tuple[int, ...] | None = None

  def arranged(self) -> "Leaf":
    """Returns the leaf whose shape is its view, without another order."""
    if self.order is None:
      return self
    return dataclasses.replace(self, shape=tuple(self.matrices), order=None)

  def to_view(self, x: jax.Array) -> jax.Array:
    """Puts the axes of an array like the leaf into the order of the view."""
    if self.order is None:
      return x
    return x.transpose(self.order).reshape(self.view)

  def from_view(self, x: jax.Array) -> jax.Array:
    """Reverses `to_view`."""
    if self.order is None:
      return x
    shape = [self.shape[axis] for axis in self.order]
    return x.reshape(shape).transpose(np.argsort(self.order))

  @property
  def size(self) -> int:
    """Number of entries on one device."""
    return math.prod(self.shape)

  @property
  def matrices(self) -> MatrixView:
    """Its view, if it has one, as all compressed leaves."""
    assert self.view is not None, f"{self.path} is sent dense"
    return self.view

  @property
  def is_compressed(self) -> bool:
    """Whether its matrices are compressed at some rank."""
    return bool(self.method and self.method.compresses)

  @property
  def is_late(self) -> bool:
    """Whether its gradient is complete only once stage 0 is done."""
    return self.placement != "own"

  @property
  def is_shared(self) -> bool:
    """Whether all stages hold it, and sum its gradient."""
    return self.placement == "shared"

  @property
  def sides(self) -> tuple[int, int]:
    """Heights of P, on the smaller side of a matrix, and of Q."""
    short, long = sorted(self.matrices[1:])
    return short, long

  @property
  def shape_of_q(self) -> tuple[int, int, int] | None:
    """Shape of the factors Q in its state; None without factors."""
    if not self.width:
      return None
    return self.matrices.count, self.width, self.sides[1]

  @property
  def is_tall(self) -> bool:
    """Whether matrices have more rows than columns."""
    return self.matrices.rows > self.matrices.cols

  def columns(self, rank: int) -> int:
    """Returns the columns of its factors at a rank: min(rank, cap)."""
    return min(rank, self.cap)


class LeafStats(NamedTuple):
  """Statistics of the k matrices of one leaf; None if not measured.

  On pipeline stages and shards, arrays have the leading axes of `Parts`.
  """

  rank: jax.Array  # int32 [k], columns in the newest step; 0 is dense
  error: jax.Array | None = None  # float32 [k], share of the energy not sent
  entropy: jax.Array | None = None  # float32 [k], nats
  predicted_error: jax.Array | None = None  # float32 [k], by the model


class LeafState(NamedTuple):
  """What is kept of one leaf; a field is None if the leaf does not have it."""

  # float32 [k, width, n], the columns of Q as rows; equal on all replicas
  factor_q: jax.Array | None = None
  # float32, the shape of the leaf; each replica's own (`PerReplica` in a state)
  residual: Any = None
  stats: LeafStats | None = None


def is_leaf_state(x: Any) -> bool:
  """Returns whether this is the state of one leaf, for `jax.tree.map`."""
  return isinstance(x, LeafState)


def cap_of(view: MatrixView | None, min_ratio: float, least_rank: int) -> int:
  """Returns the most columns that factors of a matrix may have.

    columns <= m n / (min_ratio (m + n)),  at most m and n

  Args:
    view: The matrices.
    min_ratio: Least ratio of the values of a matrix and of its factors.
    least_rank: The smallest rank of the ladder.

  Returns:
    The cap; 0 if even the smallest rank saves less than `min_ratio`.

  >>> cap_of(MatrixView(1, 64, 64), 2.0, 8), cap_of(MatrixView(1, 20, 20), 2, 8)
  (16, 0)
  """
  if view is None or math.prod(view) == 0:
    return 0
  rows, cols = view[1:]
  cap = min(rows, cols)
  if min_ratio:
    cap = int(min(cap, rows * cols / (min_ratio * (rows + cols))))
  return cap if cap >= min(least_rank, rows, cols) else 0


def joined(leaves: Sequence[Leaf]) -> Leaf:
  """Returns several leaves as one: their matrices, or entries, together."""
  first = leaves[0]
  if not first.is_compressed:
    shape = (sum(leaf.size for leaf in leaves),)
    return dataclasses.replace(first, view=None, shape=shape)
  count = sum(leaf.matrices.count for leaf in leaves)
  view = first.matrices._replace(count=count)
  return dataclasses.replace(first, view=view, shape=tuple(view))


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


# What `init` returns in place of a state for `optax.tree.map_params`: no array
# of a reducer is like a parameter, since residuals have an axis of replicas.
NOT_LIKE_PARAMS: Any = object()


def is_placeholder(params: Any) -> bool:
  """Returns whether `optax.tree.map_params` calls `init`."""
  return type(params).__name__ == "_ParamsPlaceholder"


def masked_paths(tree: Any) -> list[str]:
  """Returns the paths of leaves that `optax.masked` hides."""
  is_masked = lambda x: isinstance(x, optax.MaskedNode)  # noqa: E731
  found = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_masked)
  return [jax.tree_util.keystr(path) for path, x in found if is_masked(x)]


def require_arrays(params: Any) -> None:
  """Raises unless a tree of parameters holds any array."""
  validation.require(
    bool(jax.tree.leaves(arrays_of(params))),
    "params",
    params,
    "a tree with arrays, or with their jax.ShapeDtypeStructs",
    "pass the parameters of the model",
  )


def leaves_in(
  tree: Any,
  view_fn: ViewFn = layer_matrix,
  placement_fn: PlacementFn = own_placement,
  shards_fn: ShardsFn | None = None,
) -> tuple[Leaf, ...]:
  """Describes the leaves of a gradient tree, in `jax.tree` order.

  Args:
    tree: Arrays or `jax.ShapeDtypeStruct`s.
    view_fn: Returns a leaf's view from its path and shape.
    placement_fn: Returns a leaf's placement from its path and shape.
    shards_fn: Returns the axes over which each leaf of a tree is sharded; None
      if none is.

  Returns:
    One `Leaf` per leaf, without a method.

  Raises:
    TypeError: if a leaf is not real floating.
    ValueError: if a view does not hold as many values as its leaf, or a
      placement is none of `PLACEMENTS`.
  """
  leaves = []
  # With `is_variable`, paths are the same with and without NNX's variables.
  values = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_variable)
  dtypes = [_dtype_of(without_variables(value)) for _, value in values]
  for (key_path, _), dtype in zip(values, dtypes, strict=True):
    if not jnp.issubdtype(dtype, jnp.floating):
      raise TypeError(
        f"`updates` must have real floating leaves, got {dtype} at"
        f" {jax.tree_util.keystr(key_path)}; convert Python numbers with"
        " jnp.asarray, and leave others out with optax.masked or"
        " optax.partition."
      )
  shards = shards_fn(tree) if shards_fn else [()] * len(values)
  for (key_path, value), dtype, axes in zip(
    values, dtypes, shards, strict=True
  ):
    path, value = jax.tree_util.keystr(key_path), without_variables(value)
    shape = tuple(jnp.shape(value))
    view, order = view_fn(path, shape), None
    if isinstance(view, TransposedView):
      order, view = tuple(view.order), view.view
      if sorted(order) != list(range(len(shape))):
        raise ValueError(
          f"`matrix_view` must order all {len(shape)} axes, got {order} for"
          f" leaf {path} of shape {shape}; name each axis once."
        )
    if view is not None:
      view = _view_of(view, path)
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
    order = order if view else None
    leaves.append(Leaf(path, shape, dtype, view, placement, axes, order=order))
  return tuple(leaves)


def _dtype_of(value: Any) -> Any:
  """Returns the dtype of a leaf; of what is no array of JAX, NumPy's."""
  if not hasattr(value, "shape"):
    return np.dtype(object)
  try:
    return jnp.result_type(value)
  except TypeError:
    return np.asarray(value).dtype


def _view_of(view: Any, path: str) -> MatrixView:
  """Returns what `matrix_view` has returned as three integers.

  Raises:
    TypeError: if it is something else.
  """
  try:
    count, rows, cols = map(operator.index, view)
    return MatrixView(count, rows, cols)
  except (TypeError, ValueError) as error:
    raise TypeError(
      "`matrix_view` must return (count, rows, cols) or None, got"
      f" {validation.shown(view)} for leaf {path}; return three integers."
    ) from error


def split_by_leaf(leaves: Sequence[Leaf], values: jax.Array) -> list[jax.Array]:
  """Splits an array over all matrices of leaves, [K, ...], by leaf.

  Matrices are ordered by leaf, then along the stack.
  """
  start, parts = 0, []
  for leaf in leaves:
    parts.append(values[start : start + leaf.matrices.count])
    start += leaf.matrices.count
  return parts
