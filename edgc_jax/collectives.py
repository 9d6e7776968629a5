"""The only home of collectives and of what is known about the axis they use.

Everything else in the package calls these, so that one file shows all that
may travel, and one place turns JAX's errors into errors of ours.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.flatten_util import ravel_pytree

# Bytes; of a smaller leaf the round trip weighs more than a copy does.
_SMALL = 2**20
# Bytes to each peer at a time between CPU hosts, if that is not too often.
_MESSAGE, _MOST_MESSAGES = 2**17, 64


def num_devices(axis_name: str, argument: str = "axis_name") -> int:
  """Number of devices along a bound axis, known when tracing.

  Args:
    axis_name: The axis that gradients are averaged over, or of the stages.
    argument: What the caller's user calls it.

  Returns:
    The size.

  Raises:
    ValueError: if no enclosing `pmap` or `shard_map` binds the axis.
  """
  try:
    return lax.axis_size(axis_name)
  except NameError as error:
    raise ValueError(
      f"`{argument}` must be an axis bound where it is used, got"
      f" {axis_name!r}, which is not; call this inside jax.shard_map over a"
      f" mesh with that axis or, for replicas, inside"
      f" jax.pmap(..., axis_name={axis_name!r}), or pass the name of the axis"
      " you have."
    ) from error


def mean(tree: Any, axis_name: str) -> Any:
  """Mean over an axis of every leaf; one variadic all-reduce for the tree.

  Between CPU hosts small leaves travel as one (see `_joined`).
  """
  return _joined(lambda x: lax.pmean(x, axis_name), tree)


def total(tree: Any, axis_name: str) -> Any:
  """Sum over an axis of every leaf; as `mean`."""
  return _joined(lambda x: lax.psum(x, axis_name), tree)


def all_true(flag: jax.Array, axis_name: str | tuple[str, ...]) -> jax.Array:
  """Whether `flag` (bool, any shape) holds on every device; 4 bytes each."""
  return lax.pmin(flag.astype(jnp.int32), axis_name) > 0


def device_index(axis_name: str) -> jax.Array:
  """This device's position along an axis; int32 [], varying over it."""
  return lax.axis_index(axis_name)


def exchange_parts(tree: Any, axis_name: str) -> Any:
  """Part j of every leaf [N, ...] goes to device j; what comes is [N, ...].

  On the wire half of what an all-reduce of the leaf is.
  """

  def swap(parts: jax.Array) -> jax.Array:
    return lax.all_to_all(parts, axis_name, 0, 0, tiled=True)

  leaves, structure = jax.tree.flatten(tree)
  received: list[jax.Array] = []
  for leaf in leaves:
    flat = in_turn(leaf.reshape(leaf.shape[0], -1), received[-1:])
    received.append(_in_messages(swap, flat).reshape(leaf.shape))
  return jax.tree.unflatten(structure, received)


def gather(tree: Any, axis_name: str) -> Any:
  """Every leaf of all devices, as [N, ...], the same on all.

  On the wire half of what an all-reduce of the result is.
  """
  to = "invarying" if tracks_varying(axis_name) else "varying"

  def collect(part: jax.Array) -> jax.Array:
    return lax.all_gather(part[0], axis_name, to=to)

  leaves, structure = jax.tree.flatten(tree)
  gathered: list[jax.Array] = []
  for leaf in leaves:
    flat = in_turn(leaf.reshape(1, -1), gathered[-1:])
    whole = _in_messages(collect, flat)
    gathered.append(whole.reshape(num_devices(axis_name), *leaf.shape))
  return jax.tree.unflatten(structure, gathered)


def from_first(tree: Any, axis_name: str) -> Any:
  """The first device's leaves, on all devices along the axis."""
  is_first = lax.axis_index(axis_name) == 0
  return lax.psum(
    jax.tree.map(lambda x: jnp.where(is_first, x, 0), tree), axis_name
  )


def send(tree: Any, axis_name: str, pairs: Sequence[tuple[int, int]]) -> Any:
  """Each (source, target) moves source's leaves to target; others get zeros."""
  return lax.ppermute(tree, axis_name, perm=list(pairs))


def least(value: jax.Array, axis_name: str) -> jax.Array:
  """The smallest on any device along an axis, of each entry."""
  return lax.pmin(value, axis_name)


def after(tree: Any, earlier: Any) -> Any:
  """A tree as it is, not to be had before all of another (their last values).

  The condition of a `where`, or of a branch where that would make a leaf vary
  over more axes, is always true, as no compiler can tell.
  """
  may_send = None
  for leaf in jax.tree.leaves(earlier):
    if leaf.size:
      value = leaf[(-1,) * leaf.ndim].astype(jnp.float32)
      is_true = ~(value > 0) | (value > -1)
      may_send = is_true if may_send is None else may_send & is_true
  if may_send is None:
    return tree
  axes = set(varying_axes(may_send))

  def wait(leaf: jax.Array) -> jax.Array:
    if axes <= set(varying_axes(leaf)):
      return jnp.where(may_send, leaf, jnp.zeros_like(leaf))
    return lax.cond(may_send, lambda x: x, jnp.zeros_like, leaf)

  return jax.tree.map(wait, tree)


def in_turn(tree: Any, earlier: Any) -> Any:
  """As `after` on CPUs, where collectives may overtake each other.

  XLA's CPU backend (of JAX 0.10.2) holds a collective back until those before
  it have started, and takes a conditional or a loop for started when those in
  it have not. What needs nothing of its results overtakes them, on one device
  sooner than on another, and operands that do not belong together are mixed
  up: stages as CPU devices of one process had their memory overwritten. So
  where one of two collectives is in a branch or a loop, the second waits for
  the first. Accelerators keep their order by themselves.
  """
  return after(tree, earlier) if jax.default_backend() == "cpu" else tree


def num_messages(num_bytes: int) -> int:
  """How many follow each other where so many bytes go to each peer.

  For `exchange_parts` and `gather`; the reason is with `_in_messages`.
  """
  if not _is_between_cpu_hosts():
    return 1
  return min(max(1, num_bytes // _MESSAGE), _MOST_MESSAGES)


def compare(value: jax.Array, axis_name: str) -> jax.Array:
  """Whether a float scalar is equal on all replicas; 12 bytes on the wire.

  Args:
    value: float32 [], local.
    axis_name: The bound axis.

  Returns:
    int32 []: 1 if it is, -1 if not, and 0 where that would tell nothing: a
    replica's value is not finite, or all are zero.
  """
  is_finite = jnp.isfinite(value)
  value = jnp.where(is_finite, value, 0.0)
  broken = (~is_finite).astype(value.dtype)
  highest, negated_lowest, any_broken = lax.pmax(
    jnp.stack([value, -value, broken]), axis_name
  )
  is_zero = (highest == 0) & (negated_lowest == 0)
  verdict = jnp.where(highest == -negated_lowest, 1, -1)
  return jnp.where((any_broken > 0) | is_zero, 0, verdict)


def is_varying(value: jax.Array, axis_name: str) -> bool:
  """Whether JAX tracks `value` as different per replica (when tracing)."""
  names = {axis_name} if isinstance(axis_name, str) else set(axis_name)
  return bool(names & set(jax.typeof(value).manual_axis_type.varying))


def tracks_varying(axis_name: str) -> bool:
  """Whether varying types are tracked here at all.

  They are under `shard_map` with its default `check_vma=True`, and not under
  `pmap` or `check_vma=False`, where every value counts as unvarying.
  """
  return is_varying(lax.axis_index(axis_name), axis_name)


def varying_axes(tree: Any) -> tuple[str, ...]:
  """All axes that some leaf is tracked to vary over (when tracing)."""
  axes = set()
  for leaf in jax.tree.leaves(tree):
    kind = jax.typeof(leaf).manual_axis_type
    axes |= set(kind.varying if kind else ())
  return tuple(sorted(axes))


def as_varying(tree: Any, axis_name: str) -> Any:
  """Every leaf typed as varying over the axis; no data moves."""
  return jax.tree.map(
    lambda x: (
      x
      if is_varying(x, axis_name) or not tracks_varying(axis_name)
      else lax.pcast(x, axis_name, to="varying")
    ),
    tree,
  )


def _joined(reduce: Callable[[Any], Any], tree: Any) -> Any:
  """Reduces all leaves, between CPU hosts small ones of a kind as one array.

  There XLA reduces the operands of an all-reduce one after the other, each with
  the round trips of a ring; and a leaf of few bytes is all round trip. A kind
  is a dtype and the axes that JAX tracks values to vary over, which joined
  values would share.
  """
  if not _is_between_cpu_hosts():
    return reduce(tree)
  leaves, structure = jax.tree.flatten(jax.tree.map(jnp.asarray, tree))
  kinds: dict[Any, list[int]] = {}
  for index, leaf in enumerate(leaves):
    is_small = leaf.nbytes < _SMALL
    kind = (leaf.dtype, varying_axes(leaf)) if is_small else index
    kinds.setdefault(kind, []).append(index)
  joined = [
    ravel_pytree([leaves[i] for i in indices]) for indices in kinds.values()
  ]
  reduced = reduce([flat for flat, _ in joined])
  for indices, (_, cut), flat in zip(
    kinds.values(), joined, reduced, strict=True
  ):
    for index, leaf in zip(indices, cut(flat), strict=True):
      leaves[index] = leaf
  return jax.tree.unflatten(structure, leaves)


def _in_messages(
  collective: Callable[[jax.Array], jax.Array], parts: jax.Array
) -> jax.Array:
  """A collective of [k, n] to [N, n], between CPU hosts in short messages.

  Gloo sends a long message one way at a time: 4 MB to and from each of 2 hosts
  at 100 Mbit/s took 0.66 s, and 0.36 s in messages of 128 KiB, where the link
  alone takes 0.32. Each message waits for the one before it, so that on links
  of long latency there must not be many.
  """
  values = parts.shape[1]
  count = num_messages(values * parts.dtype.itemsize)
  if count == 1:
    return collective(parts)
  length = -(-values // count)
  count = values // length
  whole = parts[:, : count * length].reshape(-1, count, length)
  _, results = lax.scan(
    lambda carry, part: (carry, collective(part)), None, whole.swapaxes(0, 1)
  )
  done = results.swapaxes(0, 1).reshape(results.shape[1], -1)
  if count * length == values:
    return done
  rest = in_turn(parts[:, count * length :], done)
  return jnp.concatenate([done, collective(rest)], axis=1)


def _is_between_cpu_hosts() -> bool:
  return jax.default_backend() == "cpu" and jax.process_count() > 1


def zeros_like_type(aval: Any) -> jax.Array:
  """Zeros of an abstract value's shape, dtype and varying axes."""
  zeros = jnp.zeros(aval.shape, aval.dtype)
  axes = aval.manual_axis_type.varying if aval.manual_axis_type else ()
  return lax.pcast(zeros, tuple(axes), to="varying") if axes else zeros
