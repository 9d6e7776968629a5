"""A small model whose matrices are sharded within each replica.

Two matrices are sharded over all axes of the shards: over "fsdp" they are
gathered before use, and the batch is split; over "tensor" every device computes
a part of the hidden layer. One matrix and a vector are whole on every device.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import PartitionSpec as P

import edgc_jax
from edgc_jax.state.metrics import find
from edgc_jax.state.state import Checks
from helpers import meshes

SIZE, HIDDEN, BATCH = 64, 128, 32
SPECS = {
  "bias": P(),
  "down": P("tensor", "fsdp"),
  "up": P("fsdp", "tensor"),
  "whole": P(),
}


def first_params() -> dict[str, jax.Array]:
  """Returns the parameters before the first step, whole."""
  random = np.random.default_rng(0)
  draw = lambda *shape: jnp.asarray(  # noqa: E731
    random.standard_normal(shape) / np.sqrt(shape[0]), jnp.float32
  )
  return {
    "bias": jnp.zeros(SIZE),
    "down": draw(HIDDEN, SIZE),
    "up": draw(SIZE, HIDDEN),
    "whole": draw(SIZE, SIZE),
  }


def batch_at(step: int) -> tuple[jax.Array, jax.Array]:
  """Returns inputs and targets, [BATCH, SIZE] each, of a fixed teacher."""
  teacher = np.random.default_rng(1).standard_normal((SIZE, SIZE))
  x = np.random.default_rng(100 + step).standard_normal((BATCH, SIZE))
  x = x * np.linspace(0.2, 1.8, SIZE)  # so gradients of shards differ in size
  y = np.tanh(x @ teacher / np.sqrt(SIZE))
  return jnp.asarray(x, jnp.float32), jnp.asarray(y, jnp.float32)


def _axes_in(spec: P, mesh: jax.sharding.Mesh) -> P:
  """Drops the axes that a mesh does not have."""
  return P(*[axis if axis in mesh.shape else None for axis in spec])


def mesh_of(**shape: int) -> jax.sharding.Mesh:
  """Returns a mesh of the first devices, by the names and sizes of its axes."""
  return meshes.mesh_of(tuple(shape.values()), names=tuple(shape))


class ShardedRun:
  """Trains on a mesh with an axis "data" and any of "fsdp" and "tensor"."""

  def __init__(self, tx: Any, **shape: int):
    self.mesh, self.bound = mesh_of(**shape), shape
    self.param_specs = {n: _axes_in(s, self.mesh) for n, s in SPECS.items()}
    self.tx = tx
    shapes = jax.eval_shape(first_params)
    self.specs = edgc_jax.state_specs(
      tx, shapes, mesh=self.mesh, param_specs=self.param_specs
    )
    self.first_params = self.place(first_params(), self.param_specs)
    self.restart()
    split = tuple(a for a in ("data", "fsdp") if a in shape)
    self.step_fn = jax.jit(
      jax.shard_map(
        self._step,
        mesh=self.mesh,
        in_specs=(self.param_specs, self.specs, (P(split), P(split))),
        out_specs=(self.param_specs, self.specs, P()),
      )
    )

  @functools.cached_property
  def first_state(self) -> Any:
    """The state before the first step."""
    init = jax.shard_map(
      self.tx.init,
      mesh=self.mesh,
      in_specs=(self.param_specs,),
      out_specs=self.specs,
    )
    return jax.jit(init)(self.first_params)

  @property
  def state(self) -> Any:
    """The state; the first one is made when it is read."""
    return self.first_state if self._state is None else self._state

  @state.setter
  def state(self, state: Any) -> None:
    self._state = state

  def restart(self) -> "ShardedRun":
    """Goes back to the first step, without another compilation."""
    self.params, self.state = dict(self.first_params), None
    return self

  def place(self, tree: Any, specs: Any) -> Any:
    """Places a tree on the mesh, as specs say."""
    return jax.tree.map(
      lambda x, s: jax.device_put(x, jax.sharding.NamedSharding(self.mesh, s)),
      tree,
      specs,
    )

  def _loss(self, params: Any, batch: Any) -> jax.Array:
    x, y = batch
    up, down = params["up"], params["down"]
    if "fsdp" in self.bound:
      up = lax.all_gather(up, "fsdp", axis=0, tiled=True)
      down = lax.all_gather(down, "fsdp", axis=1, tiled=True)
    out = jax.nn.relu(x @ up) @ down
    if "tensor" in self.bound:
      out = lax.psum(out, "tensor")
    out = out @ params["whole"] + params["bias"]
    # The gradient is summed over the axis, so this makes it a mean.
    return jnp.mean((out - y) ** 2) / self.bound.get("fsdp", 1)

  def _step(self, params: Any, state: Any, batch: Any) -> tuple:
    local = lax.pcast(params, "data", to="varying")
    loss, gradients = jax.value_and_grad(self._loss)(local, batch)
    updates, state = self.tx.update(gradients, state, params)
    if find(state, Checks):
      loss = edgc_jax.after_update(loss, state)
    loss = lax.pmean(loss, "data")
    if "fsdp" in self.bound:
      loss = lax.psum(loss, "fsdp")
    return optax.apply_updates(params, updates), state, loss

  def train(self, steps: int, start: int = 0) -> list[float]:
    """Returns the loss of each step."""
    losses = []
    for i in range(start, start + steps):
      self.params, self.state, loss = self._compiled(
        self.params, self.state, batch_at(i)
      )
      losses.append(float(loss))
    return losses

  @functools.cached_property
  def _compiled(self) -> jax.stages.Compiled:
    arguments = (self.params, self.state, batch_at(0))
    return self.step_fn.lower(*arguments).compile()

  def compiled(self) -> str:
    """Returns the text of the compiled step."""
    return self._compiled.as_text()
