"""The only home of collectives and of what is known about the axis they use.

Everything else in the package calls these, so that one file shows all that
may travel, and one place turns JAX's errors into errors of ours.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from edgc_jax.comm import cpu_backend
from edgc_jax.comm.dataflow import in_turn, is_varying, one_by_one


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

  Between CPU hosts small leaves travel as one (`cpu_hosts.joined`).
  """
  return _reduced(functools.partial(lax.pmean, axis_name=axis_name), tree)


def total(tree: Any, axis_name: str) -> Any:
  """Sum over an axis of every leaf; as `mean`."""
  return _reduced(functools.partial(lax.psum, axis_name=axis_name), tree)


def all_true(flag: jax.Array, axis_name: str | tuple[str, ...]) -> jax.Array:
  """Whether `flag` (bool, any shape) holds on every device; 4 bytes each."""
  return least(flag.astype(jnp.int32), axis_name) > 0


def device_index(axis_name: str) -> jax.Array:
  """This device's position along an axis; int32 [], varying over it."""
  return lax.axis_index(axis_name)


def exchange_parts(tree: Any, axis_name: str) -> Any:
  """Part j of every leaf [N, ...] goes to device j; what comes is [N, ...].

  On the wire half of what an all-reduce of the leaf is. An all-to-all, but by
  rotation between CPU hosts (`cpu_hosts`).
  """
  devices = num_devices(axis_name)
  # A permute waits for all devices of a mesh, and stages may not be at it.
  is_alone = jax.sharding.get_abstract_mesh().size == devices
  exchange = functools.partial(
    lax.all_to_all, split_axis=0, concat_axis=0, tiled=True
  )
  if cpu_backend.spans_hosts() and devices == 2:
    exchange = _swapped
  elif cpu_backend.spans_hosts() and is_alone:
    exchange = _rotated

  def swap(leaf: jax.Array) -> jax.Array:
    parts = leaf.reshape(devices, -1)
    return exchange(parts, axis_name).reshape(leaf.shape)

  return one_by_one(swap, tree)


def gather(tree: Any, axis_name: str) -> Any:
  """Every leaf of all devices, as [N, ...], the same on all.

  On the wire half of what an all-reduce of the result is.
  """
  to = "invarying" if tracks_varying(axis_name) else "varying"
  devices = num_devices(axis_name)
  is_cut = cpu_backend.spans_hosts() and cpu_backend.is_mutual(1, devices)

  def collect(leaf: jax.Array) -> jax.Array:
    gathered = functools.partial(lax.all_gather, axis_name=axis_name, to=to)
    flat = leaf.ravel()
    whole = (
      cpu_backend.in_messages(gathered, flat) if is_cut else gathered(flat)
    )
    return whole.reshape(devices, *leaf.shape)

  return one_by_one(collect, tree)


def from_first(tree: Any, axis_name: str) -> Any:
  """The first device's leaves, on all devices along the axis.

  Bit for bit, but for the sign of a zero.
  """
  num_devices(axis_name)  # raises where the axis is unbound
  is_first = lax.axis_index(axis_name) == 0

  def is_key(x: jax.Array) -> bool:
    return jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)

  def kept(x: jax.Array) -> jax.Array:
    x = jax.random.key_data(x) if is_key(x) else x
    x = x.astype(jnp.int32) if x.dtype == bool else x
    return jnp.where(is_first, x, jnp.zeros_like(x))

  def whole(x: jax.Array, s: jax.Array) -> jax.Array:
    if is_key(x):
      return jax.random.wrap_key_data(s, impl=jax.random.key_impl(x))
    return s.astype(x.dtype)

  sums = total(jax.tree.map(kept, tree), axis_name)
  return jax.tree.map(whole, tree, sums)


def send(tree: Any, axis_name: str, pairs: Sequence[tuple[int, int]]) -> Any:
  """Each (source, target) moves source's leaves to target; others get zeros."""
  return lax.ppermute(tree, axis_name, perm=list(pairs))


def least(value: jax.Array, axis_name: str | tuple[str, ...]) -> jax.Array:
  """The smallest on any device along an axis, of each entry."""
  return lax.pmin(value, axis_name)


def spread(value: jax.Array, axis_name: str) -> jax.Array:
  """The largest difference between devices of any entry; float32 [].

  8 bytes on the wire for each entry, which must be finite.
  """
  value = as_varying(value, axis_name)
  highest, negated_lowest = lax.pmax(jnp.stack([value, -value]), axis_name)
  return jnp.max(highest + negated_lowest)


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


def tracks_varying(axis_name: str) -> bool:
  """Whether varying types are tracked here at all.

  They are under `shard_map` with its default `check_vma=True`, and not under
  `pmap` or `check_vma=False`, where every value counts as unvarying.
  """
  return is_varying(lax.axis_index(axis_name), axis_name)


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


def zeros_like_type(aval: Any) -> jax.Array:
  """Zeros of an abstract value's shape, dtype and varying axes."""
  zeros = jnp.zeros(aval.shape, aval.dtype)
  axes = aval.manual_axis_type.varying if aval.manual_axis_type else ()
  return lax.pcast(zeros, tuple(axes), to="varying") if axes else zeros


def _reduced(reduce: Callable[[Any], Any], tree: Any) -> Any:
  if cpu_backend.spans_hosts():
    return cpu_backend.reduce_joined(reduce, tree)
  return reduce(tree)


def _swapped(parts: jax.Array, axis_name: str) -> jax.Array:
  """Part j of [2, n] to device j, each as one that both gather."""
  own = device_index(axis_name)

  def swap(part: jax.Array) -> jax.Array:
    both = lax.all_gather(part, axis_name)
    return lax.dynamic_index_in_dim(both, 1 - own, keepdims=False)

  part = lax.dynamic_index_in_dim(parts, 1 - own, keepdims=False)
  part = cpu_backend.in_messages(swap, part)
  return lax.dynamic_update_index_in_dim(parts, part, 1 - own, 0)


def _rotated(parts: jax.Array, axis_name: str) -> jax.Array:
  """Part j of [N, n] to device j, to the next one first, then one further."""
  devices, own = num_devices(axis_name), device_index(axis_name)
  received, last = parts, []  # what is one's own is there
  for shift in range(1, devices):
    pairs = [(i, (i + shift) % devices) for i in range(devices)]
    rotate = functools.partial(send, axis_name=axis_name, pairs=pairs)
    target, source = (own + shift) % devices, (own - shift) % devices
    part = lax.dynamic_index_in_dim(parts, target, keepdims=False)
    part = in_turn(part, last)
    if cpu_backend.is_mutual(shift, devices):
      part = cpu_backend.in_messages(rotate, part)
    else:
      part = rotate(part)
    received = lax.dynamic_update_index_in_dim(received, part, source, 0)
    last = [part]
  return received
