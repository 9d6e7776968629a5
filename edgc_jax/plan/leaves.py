"""Which leaves of a gradient are matrices, and how they are looked at.

A leaf is compressed as a stack of `count` matrices [rows, cols]; the view is
a row-major reshape, so no data moves. Shapes and ranks are Python integers:
everything here happens while tracing.
"""

import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from edgc_jax.comm import collectives
from edgc_jax.comm.dataflow import is_varying


class MatrixView(NamedTuple):
  """A leaf seen as `count` matrices of `rows` x `cols`."""

  count: int
  rows: int
  cols: int


ViewFn = Callable[[str, tuple[int, ...]], MatrixView | None]
PlacementFn = Callable[[str, tuple[int, ...]], str]
PLACEMENTS = ("own", "split", "shared")


class Leaf(NamedTuple):
  """The static facts of one gradient leaf.

  Attributes:
    path: Where it is in the tree.
    shape: Its shape on one device.
    dtype: Its dtype.
    view: The matrices in it, None if it is never sent as factors.
    placement: "own", "split" or "shared": see `own_placement`.
  """

  path: str
  shape: tuple[int, ...]
  dtype: Any
  view: MatrixView | None
  placement: str = "own"

  @property
  def size(self) -> int:
    return math.prod(self.shape)


class Measurement(NamedTuple):
  """Energies of K matrices in one exchange, or their means over a window."""

  lost: jax.Array  # float32 [K], |mean of residuals|^2
  columns: jax.Array  # float32 [K, width], squared norms of the columns of Q

  @property
  def energy(self) -> jax.Array:
    """Energy of the mean of gradients and residuals; float32 [K]."""
    return self.lost + jnp.sum(self.columns, axis=1)

  @property
  def lost_share(self) -> jax.Array:
    """Share of the energy that was not sent; float32 [K]."""
    return share(self.lost, self.energy)


def share(part: jax.Array, whole: jax.Array) -> jax.Array:
  """Returns part / whole; 0 where both are 0."""
  return part / jnp.where(whole > 0, whole, 1.0)


def trailing_matrix(path: str, shape: tuple[int, ...]) -> MatrixView | None:
  """The default view: [..., m, n] is a stack of matrices [m, n].

  This is the convention of `jnp.linalg`, and what scanned or stacked layers
  need. Kernels with split or spatial axes are better folded by a view of the
  user's own, such as an attention kernel [768, 12, 64] into (1, 768, 768).

  Args:
    path: The leaf's key path, for views that choose by name.
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


def own_placement(path: str, shape: tuple[int, ...]) -> str:
  """The default placement on pipeline stages: every leaf is its stage's own.

  A stage holds of a leaf

    own     layers that no other stage has, such as its blocks
    split   a part of a tensor that all stages use together, such as rows of
            the embedding; its gradient is there when stage 0 is done
    shared  the same as all stages, such as the final norm; stages sum its
            gradient, and it is always sent dense

  Args:
    path: The leaf's key path.
    shape: The leaf's shape on one stage.

  Returns:
    "own".
  """
  del path, shape
  return "own"


def describe(
  tree: Any,
  view_fn: ViewFn = trailing_matrix,
  placement_fn: PlacementFn = own_placement,
) -> list[Leaf]:
  """Lists the leaves of a gradient tree, in `jax.tree` order.

  Args:
    tree: Arrays or `jax.ShapeDtypeStruct`s.
    view_fn: Chooses each leaf's view from its path and shape.
    placement_fn: Chooses each leaf's placement likewise.

  Returns:
    One `Leaf` per leaf.

  Raises:
    TypeError: if a leaf is complex or an integer.
    ValueError: if a view does not hold as many values as its leaf, or a
      placement is none of `PLACEMENTS`.
  """
  leaves = []
  for key_path, value in jax.tree_util.tree_leaves_with_path(tree):
    path, shape = jax.tree_util.keystr(key_path), tuple(jnp.shape(value))
    dtype = jnp.result_type(value)
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
        f" leaf {path}; return 'own' for what one stage alone holds."
      )
    view = None if placement == "shared" else view
    leaves.append(Leaf(path, shape, dtype, view, placement))
  return leaves


def require_local(
  gradients: Sequence[jax.Array], leaves: Sequence[Leaf], axis_name: str
) -> None:
  """Raises where JAX's types show gradients already summed over the axis.

  Args:
    gradients: The leaves, as they come into `update`.
    leaves: What is known about each.
    axis_name: The bound axis of the replicas.

  Raises:
    ValueError: if varying types are tracked and a leaf does not vary.
  """
  if collectives.num_devices(axis_name) == 1 or not gradients:
    return
  if not collectives.tracks_varying(axis_name):
    return
  summed = [
    leaf.path
    for gradient, leaf in zip(gradients, leaves, strict=True)
    if not is_varying(gradient, axis_name)
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
      " that is done: only one reducer may see a leaf, so drop the other from"
      " the chain; and optax.MultiSteps holds gradients as equal on all"
      " replicas, so use edgc_jax.accumulate in its place."
    )


def require_same_leaves(updates: Any, like: Any) -> None:
  """Raises where gradients have other leaves than the parameters had.

  Args:
    updates: The tree that came into `update`.
    like: A tree of the state with an entry for every leaf that `init` saw.

  Raises:
    ValueError: if a leaf is missing, None for example, or was not there.
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
    what = f"none at {missing[0]}" if missing else f"one more at {new[0]}"
    raise ValueError(
      f"`updates` must have the leaves of the parameters that `init` saw, got"
      f" {what} ({len(missing)} missing, {len(new)} more); a gradient that is"
      " None has no place in them, so give zeros, or split the tree with"
      " optax.partition before `init`."
    )


def warn_of_dtypes(leaves: Sequence[Leaf]) -> None:
  """Warns of leaves that come back with less than they seem to have.

  Warns:
    RuntimeWarning: for float64, which is exchanged in float32, and for float16,
      in which the mean comes back and whose squares an optimiser cannot hold.
  """
  for dtype, what, remedy in (
    (
      jnp.float64,
      "exchanged in float32 and rounded to it",
      "Average such leaves with jax.lax.pmean, or train them in float32",
    ),
    (
      jnp.float16,
      "returned in float16, in which squares above 65504 are infinite, as in"
      " Adam's second moment",
      "Cast gradients to float32 before the chain, and their loss scaling off",
    ),
  ):
    paths = [leaf.path for leaf in leaves if leaf.dtype == dtype]
    if paths:
      warnings.warn(
        f"Gradients of {jnp.dtype(dtype).name} are {what}: {paths[0]}"
        f" ({len(paths)} of {len(leaves)} leaves). {remedy}.",
        RuntimeWarning,
        stacklevel=4,
      )


def require_shapes(
  leaves: Sequence[Leaf],
  residuals: Sequence[jax.Array],
  factors: Sequence[jax.Array],
  factor_shapes: Sequence[tuple[int, ...]],
) -> None:
  """Raises unless the state's arrays have the shapes that one replica has.

  Shapes are all that tells one replica's arrays from global ones.

  Args:
    leaves: The compressible leaves.
    residuals: Their residuals; may be none.
    factors: Their Q; may be none.
    factor_shapes: Shapes that Q must have.

  Raises:
    ValueError: if one has another shape.
  """
  shapes = [leaf.shape for leaf in leaves]
  for name, arrays, expected in (
    ("residual", residuals, shapes),
    ("factor_q", factors, factor_shapes),
  ):
    for leaf, x, shape in zip(leaves, arrays, expected, strict=False):
      if tuple(x.shape) != tuple(shape):
        raise ValueError(
          f"`state` must be the state of one replica, with a {name} of shape"
          f" {tuple(shape)} for the leaf at {leaf.path or 'the root'}, got"
          f" {tuple(x.shape)}; under jax.shard_map make it inside, with"
          " jax.shard_map(tx.init, mesh=mesh, in_specs=PartitionSpec(),"
          " out_specs=edgc_jax.state_specs(tx, params)), and cut a state of"
          " another number of replicas with edgc_jax.resize_replicas."
        )
