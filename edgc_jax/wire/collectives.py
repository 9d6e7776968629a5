"""All collectives of the package, and queries about the axis they run over.

No other module calls `psum` and the like, so this file shows everything that
the package communicates. Errors about unbound axes are raised here, too.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from edgc_jax.wire import cpu_backend
from edgc_jax.wire.joining import as_one
from edgc_jax.wire.order import AxisName, in_turn, is_key, is_varying, names


def num_devices(axis_name: AxisName, argument: str = "axis_name") -> int:
  """Returns the number of devices along a bound axis, a Python integer.

  Args:
    axis_name: The axis of the replicas or of the stages.
    argument: Name of the user's argument that gave the axis, for the error.

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
      " you have. In plain jax.jit call jax.set_mesh(mesh) before init, with a"
      " mesh that has the axis, and pass None as the axis of skip_nonfinite."
    ) from error


def has_axis(axis_name: AxisName) -> bool:
  """Returns whether `pmap`, `shard_map` or `vmap` binds an axis here."""
  try:
    lax.axis_size(axis_name)
  except NameError:
    return False
  return True


def mean(tree: Any, axis_name: AxisName) -> Any:
  """Averages every leaf over an axis, in one variadic all-reduce.

  Between CPU hosts small leaves are joined (`cpu_backend.reduce_joined`).
  """
  return _reduce(functools.partial(lax.pmean, axis_name=axis_name), tree)


def total(tree: Any, axis_name: AxisName) -> Any:
  """Sums every leaf over an axis; as `mean`."""
  return _reduce(functools.partial(lax.psum, axis_name=axis_name), tree)


def mean_where_varying(tree: Any, axis_name: AxisName) -> Any:
  """Averages every leaf over those of the axes that it varies over.

  If JAX does not track an axis, every leaf counts as varying over it.
  """
  num_devices(axis_name)  # raises if the axis is unbound
  untracked = [a for a in names(axis_name) if not tracks_varying(a)]

  def average(x: jax.Array) -> jax.Array:
    axes = untracked + [a for a in names(axis_name) if is_varying(x, a)]
    return lax.pmean(x, tuple(axes)) if axes else x

  return jax.tree.map(average, tree)


def all_true(flag: jax.Array, axis_name: AxisName) -> jax.Array:
  """Returns whether `flag` (bool, any shape) is true on every device.

  Elementwise; sends 4 bytes per entry.
  """
  return least(flag.astype(jnp.int32), axis_name) > 0


def device_index(axis_name: AxisName) -> jax.Array:
  """Returns this device's index along an axis; int32 [], varying over it."""
  return lax.axis_index(axis_name)


def exchange_parts(tree: Any, axis_name: AxisName) -> Any:
  """Sends part j of every leaf [N, ...] to device j; returns [N, ...].

  Sends half the bytes of an all-reduce of the leaves. An all-to-all of all of
  them; between CPU hosts swaps and rotations (`cpu_backend`).
  """
  leaves, structure = jax.tree.flatten(tree)
  if not leaves:
    return tree
  devices = num_devices(axis_name)
  # A permute waits for all devices of the mesh, and other stages may be in a
  # branch without it. Two devices swap without one.
  is_alone = jax.sharding.get_abstract_mesh().size == devices
  exchange = functools.partial(
    lax.all_to_all, split_axis=0, concat_axis=0, tiled=True
  )
  if cpu_backend.spans_hosts() and (is_alone or devices == 2):
    exchange = _rotate_parts

  joined, split = as_one([leaf.reshape(devices, -1) for leaf in leaves])
  received = split(exchange(joined, axis_name))
  return jax.tree.unflatten(
    structure,
    [x.reshape(leaf.shape) for x, leaf in zip(received, leaves, strict=True)],
  )


def gather(tree: Any, axis_name: AxisName) -> Any:
  """Gathers every leaf of all devices as [N, ...], equal on all devices.

  Sends half the bytes of an all-reduce of the result, in one collective.
  """
  leaves, structure = jax.tree.flatten(tree)
  if not leaves:
    return tree
  is_tracked = tracks_varying(axis_name)
  to = "invarying" if is_tracked else "varying"
  devices = num_devices(axis_name)
  joined, split = as_one([leaf.reshape(1, -1) for leaf in leaves])
  whole = lax.all_gather(joined.ravel(), axis_name, to=to)
  gathered = zip(split(whole), leaves, strict=True)
  return jax.tree.unflatten(
    structure, [x.reshape(devices, *leaf.shape) for x, leaf in gathered]
  )


def from_first(tree: Any, axis_name: AxisName) -> Any:
  """Broadcasts the leaves of the first device to all devices along the axis.

  Exact to the bit, except for the sign of zeros. Leaves may be PRNG keys.
  """
  num_devices(axis_name)  # raises if the axis is unbound
  is_first = lax.axis_index(axis_name) == 0

  def masked(x: jax.Array) -> jax.Array:
    x = jax.random.key_data(x) if is_key(x) else x
    x = x.astype(jnp.int32) if x.dtype == bool else x
    return jnp.where(is_first, x, jnp.zeros_like(x))

  def restored(x: jax.Array, s: jax.Array) -> jax.Array:
    if is_key(x):
      return jax.random.wrap_key_data(s, impl=jax.random.key_impl(x))
    return s.astype(x.dtype)

  sums = total(jax.tree.map(masked, tree), axis_name)
  return jax.tree.map(restored, tree, sums)


def send(
  tree: Any, axis_name: AxisName, pairs: Sequence[tuple[int, int]]
) -> Any:
  """Sends leaves from source to target for each (source, target) in `pairs`.

  Returns zeros on devices that are no target.
  """
  return lax.ppermute(tree, axis_name, perm=list(pairs))


def least(value: jax.Array, axis_name: AxisName) -> jax.Array:
  """Returns the elementwise minimum over an axis."""
  return lax.pmin(value, axis_name)


def difference(value: jax.Array, axis_name: AxisName) -> jax.Array:
  """Returns the largest difference of any entry between devices; float32 [].

  Sends 8 bytes per entry; all entries must be finite.
  """
  value = as_varying(value, axis_name)
  highest, negated_lowest = lax.pmax(jnp.stack([value, -value]), axis_name)
  return jnp.max(highest + negated_lowest)


def compare(value: jax.Array, axis_name: AxisName) -> jax.Array:
  """Compares a float scalar between the replicas; sends 12 bytes.

  Args:
    value: float32 [], local.
    axis_name: The bound axis.

  Returns:
    int32 []: 1 if all values are equal, -1 if not, and 0 if the comparison
    says nothing, since a value is not finite or all are zero.
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


def tracks_varying(axis_name: AxisName) -> bool:
  """Returns whether JAX tracks which values vary over the axis.

  It does under `shard_map` with its default `check_vma=True`. Under `pmap` or
  with `check_vma=False` every value counts as unvarying.
  """
  return is_varying(lax.axis_index(axis_name), axis_name)


def as_varying(tree: Any, axis_name: AxisName) -> Any:
  """Types every leaf as varying over the axes; sends nothing."""
  tracked = [axis for axis in names(axis_name) if tracks_varying(axis)]
  if not tracked:
    return tree

  def cast(x: jax.Array) -> jax.Array:
    missing = tuple([axis for axis in tracked if not is_varying(x, axis)])
    return lax.pcast(x, missing, to="varying") if missing else x

  return jax.tree.map(cast, tree)


def zeros_like_type(aval: Any) -> jax.Array:
  """Returns zeros of the shape, dtype, sharding and varying axes of `aval`."""
  # A sharding that types show; the mesh of others has no such axis.
  where = getattr(aval, "sharding", None)
  is_shown = where is not None and any(where.spec)
  zeros = jnp.zeros(
    aval.shape, aval.dtype, out_sharding=where if is_shown else None
  )
  axes = aval.manual_axis_type.varying if aval.manual_axis_type else ()
  return as_varying(zeros, tuple(axes))


def _reduce(reduce: Callable[[Any], Any], tree: Any) -> Any:
  """Applies `reduce` to the leaves; between CPU hosts, joins small ones."""
  if cpu_backend.spans_hosts():
    return cpu_backend.reduce_joined(reduce, tree)
  return reduce(tree)


def _rotate_parts(parts: jax.Array, axis_name: AxisName) -> jax.Array:
  """Exchanges the parts [N, n] of N devices in N - 1 rotations.

  Every device sends to the next device first, then to the second next, ...
  Devices that send to each other swap.
  """
  devices, device = num_devices(axis_name), device_index(axis_name)
  received, last = parts, []  # the device's own part is in place
  for shift in range(1, devices):
    target, source = (device + shift) % devices, (device - shift) % devices
    part = lax.dynamic_index_in_dim(parts, target, keepdims=False)
    part = in_turn(part, last)
    if 2 * shift == devices:
      part = _swap(part, axis_name)
    else:
      pairs = [(i, (i + shift) % devices) for i in range(devices)]
      part = send(part, axis_name, pairs)
    received = lax.dynamic_update_index_in_dim(received, part, source, 0)
    last = [part]
  return received


def _swap(values: jax.Array, axis_name: AxisName) -> jax.Array:
  """Returns the values of the device half way around the axis.

  An all-gather between pairs of devices; `cpu_backend` says why.
  """
  half = num_devices(axis_name) // 2
  pairs = [[i, i + half] for i in range(half)] if half > 1 else None
  place = device_index(axis_name) // half  # in its pair
  both = lax.all_gather(values, axis_name, axis_index_groups=pairs)
  return lax.dynamic_index_in_dim(both, 1 - place, keepdims=False)
