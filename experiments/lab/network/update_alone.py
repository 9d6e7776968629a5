"""The update of a transformation on one device, which sends nothing."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

AXIS = "data"


def gradients_like(shapes: Any) -> Any:
  """Returns random float32 gradients, from a fixed seed."""
  random = np.random.default_rng(0)  # drawing with JAX takes long to compile
  return jax.tree.map(
    lambda leaf: jax.numpy.asarray(
      random.standard_normal(leaf.shape, np.float32)
    ),
    shapes,
  )


def update_alone(
  tx: optax.GradientTransformation, gradients: Any
) -> Callable[[], Any]:
  """Compiles an update that computes all and carries its state.

  Args:
    tx: A transformation over the axis `AXIS`.
    gradients: Its gradients, on the first device of this process.

  Returns:
    The update.
  """
  mesh = Mesh(np.array(jax.local_devices()[:1]), (AXIS,))
  # An axis of one device has nothing to vary over, hence check_vma=False.
  on_device = functools.partial(
    jax.shard_map, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False
  )
  state = jax.jit(on_device(tx.init))(gradients)

  # The state first: JAX lends the memory of a donated array to the first
  # output of its shape.
  def state_first(gradients: Any, state: Any) -> Any:
    updates, state = on_device(tx.update)(gradients, state)
    return state, updates

  update = jax.jit(state_first, donate_argnums=1)
  compiled = update.lower(gradients, state).compile()

  def run() -> Any:
    nonlocal state
    state, updates = compiled(gradients, state)
    return state, updates

  return run
