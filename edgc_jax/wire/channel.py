"""One order of all collectives over the replicas, and the bytes they send.

XLA's CPU backend (of JAX 0.10.2) holds a collective back until the previous
ones have started, but takes a conditional or a loop for started before the
collectives in it have. A collective that does not need their results then
overtakes them, on one device sooner than on another, and operands of different
collectives are mixed up: stages as CPU devices of one process had their memory
overwritten. And two hosts compile apart, so their compilers may put two
collectives that do not need each other in different orders. So each collective
waits for the one before it. Accelerators keep the order.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from edgc_jax.wire import collectives, order
from edgc_jax.wire.order import AxisName


class Channel:
  """Performs collectives over the replicas in order, and counts their bytes.

  While a branch is traced, its collectives are performed here, too.

  Attributes:
    axis_name: The bound axis of the replicas.
  """

  def __init__(self, axis_name: AxisName, earlier: Any = ()):
    """Begins with the next collective.

    Args:
      axis_name: The bound axis of the replicas.
      earlier: Results of collectives over other axes, which come first.
    """
    self.axis_name = axis_name
    self._fixed = 0.0  # bytes outside of branches
    self._chosen: Any = 0.0  # bytes in branches, float32 []
    self._last: Any = earlier  # results of the last collective or conditional

  @property
  def num_devices(self) -> int:
    """The replicas."""
    return collectives.num_devices(self.axis_name)

  @property
  def num_bytes(self) -> jax.Array:
    """float32 [], sent so far, counted as for an all-reduce.

    Halves of one, such as an all-gather, count half of what they return.
    """
    return jnp.asarray(self._fixed + self._chosen, jnp.float32)

  def count(self, num_bytes: float) -> None:
    """Adds bytes of collectives over other axes."""
    self._fixed += num_bytes

  def mean(self, tree: Any) -> Any:
    """Averages every leaf, in one all-reduce."""
    return self._perform(collectives.mean, tree, _bytes_of(tree))

  def total(self, tree: Any) -> Any:
    """Sums every leaf, in one all-reduce."""
    return self._perform(collectives.total, tree, _bytes_of(tree))

  def exchange_parts(self, tree: Any) -> Any:
    """Sends part j of every leaf [N, ...] to device j; returns [N, ...]."""
    return self._perform(collectives.exchange_parts, tree, _bytes_of(tree) / 2)

  def gather(self, tree: Any) -> Any:
    """Gathers every leaf of all devices as [N, ...]."""
    return self._perform(
      collectives.gather, tree, self.num_devices * _bytes_of(tree) / 2
    )

  def from_first(self, tree: Any) -> Any:
    """Broadcasts numbers of 32 bits and flags of the first device.

    One device sends nothing.
    """
    if self.num_devices == 1:
      return tree
    # Flags as int32.
    num_bytes = 4 * sum(x.size for x in jax.tree.leaves(tree))
    return self._perform(collectives.from_first, tree, num_bytes)

  def compare(self, value: jax.Array) -> jax.Array:
    """Compares a scalar (`collectives.compare`), which is sent three times."""
    return self._perform(collectives.compare, value, 3 * _bytes_of(value))

  def difference(self, value: jax.Array) -> jax.Array:
    """Returns the largest difference of entries, which are sent twice."""
    return self._perform(collectives.difference, value, 2 * _bytes_of(value))

  def follow(self, tree: Any) -> None:
    """Puts the results of collectives over other axes before the next one."""
    self._last = (self._last, tree)

  def ordered(self, tree: Any) -> Any:
    """Returns `tree`, for collectives over other axes that come next."""
    return order.in_turn(tree, self._last)

  def switch(
    self,
    index: jax.Array | int,
    branches: Sequence[Callable[..., Any]],
    *operands: Any,
  ) -> Any:
    """Runs one of the branches, which may send; all replicas the same one.

    The first array of a branch's result has to come of what it sends: what
    follows waits for it. Choices in a branch vary over no more axes than it.

    Raises:
      ValueError: if `jax.vmap` maps the index (`order.branch_index`).
    """
    return self._branch(order.branch_index(index), branches, operands)

  def cond(
    self,
    pred: jax.Array,
    yes: Callable[..., Any],
    no: Callable[..., Any] | None = None,
    *operands: Any,
  ) -> Any:
    """As `switch`, of `no` and `yes`; None for `no` returns zeros."""
    types = None
    if no is None:
      types, _ = jax.eval_shape(self._traced(yes), *operands)

    def zeros(*_: Any) -> Any:
      return jax.tree.map(collectives.zeros_like_type, types)

    index = jnp.asarray(pred).astype(jnp.int32)
    return self._branch(index, [no or zeros, yes], operands)

  def _perform(self, collective: Callable, tree: Any, num_bytes: float) -> Any:
    if not jax.tree.leaves(tree):
      return tree
    self.count(num_bytes)
    self._last = collective(self.ordered(tree), self.axis_name)
    return self._last

  def _branch(
    self,
    index: jax.Array | int,
    branches: Sequence[Callable[..., Any]],
    operands: tuple,
  ) -> Any:
    index = self.ordered(jnp.asarray(index))
    axes = order.varying_axes(index)
    traced = [self._traced(branch, axes) for branch in branches]
    found, sent = jax.lax.switch(index, traced, *operands)
    self._chosen = self._chosen + sent
    results = [x for x in jax.tree.leaves(found) if x.size]
    self._last = results[:1]
    return found

  def _traced(
    self, branch: Callable[..., Any], axes: tuple[str, ...] = ()
  ) -> Callable[..., Any]:
    """Returns a branch that returns its bytes, too.

    By type they vary over `axes`, those of the choice of a branch.
    """

    def run(*operands: Any) -> tuple[Any, jax.Array]:
      before = self.__dict__.copy()
      self.__init__(self.axis_name)
      try:
        found = branch(*operands)
        return found, collectives.as_varying(self.num_bytes, axes)
      finally:
        self.__dict__.update(before)

    return run


def _bytes_of(tree: Any) -> int:
  return sum(x.nbytes for x in jax.tree.leaves(tree))
