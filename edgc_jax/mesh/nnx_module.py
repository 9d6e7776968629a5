"""Differentiates a module of Flax NNX as a function of plain trees."""

import sys
from collections.abc import Callable
from typing import Any

import jax

from edgc_jax.wire import collectives, order
from edgc_jax.wire.order import AxisName


def is_module(params: Any) -> bool:
  """Returns whether this is a module of Flax NNX."""
  nnx = sys.modules.get("flax.nnx")
  return nnx is not None and isinstance(params, nnx.Module)


def without_module(
  loss_fn: Callable[..., Any],
  module: Any,
  wrt: Any,
  axis_name: AxisName,
  has_aux: bool,
) -> tuple[Callable[..., Any], Any, Any]:
  """Returns a loss of plain trees in place of a loss of a module.

  Returns:
    A loss of the parameters, the other variables and the further arguments,
    which also returns the other variables as it left them; and both trees.
  """
  nnx = sys.modules["flax.nnx"]
  kinds = nnx.Param if wrt is None else wrt, ...
  graph, params, others = nnx.split(module, *kinds)

  def loss_of(params: Any, others: Any, *args: Any) -> tuple[Any, Any]:
    index = collectives.device_index(axis_name)

    def own_key(x: Any) -> Any:
      if not order.is_key(x):
        return x
      # Scanned layers have an array of keys.
      keys = jax.vmap(jax.random.fold_in, (0, None))(x.ravel(), index)
      return keys.reshape(x.shape)

    own = jax.tree.map(own_key, others)
    module = nnx.merge(graph, params, own)
    value = loss_fn(module, *args)
    left = nnx.split(module, *kinds)[2]
    # The keys of all replicas stay equal.
    left = jax.tree.map(lambda x, y: x if order.is_key(x) else y, others, left)
    value, aux = value if has_aux else (value, None)
    return value, (aux, left)

  return loss_of, params, others


def update_module(module: Any, variables: Any) -> None:
  """Gives a module the values of some of its variables."""
  sys.modules["flax.nnx"].update(module, variables)
