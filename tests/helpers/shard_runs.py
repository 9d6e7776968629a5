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
from jax.sharding import AxisType, NamedSharding
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


def batch_at(step: int, rows: int = BATCH) -> tuple[jax.Array, jax.Array]:
  """Returns inputs and targets, [rows, SIZE] each, of a fixed teacher."""
  teacher = np.random.default_rng(1).standard_normal((SIZE, SIZE))
  x = np.random.default_rng(100 + step).standard_normal((rows, SIZE))
  x = x * np.linspace(0.2, 1.8, SIZE)  # so gradients of shards differ in size
  y = np.tanh(x @ teacher / np.sqrt(SIZE))
  return jnp.asarray(x, jnp.float32), jnp.asarray(y, jnp.float32)


def mesh_of(kind: Any = AxisType.Auto, **shape: int) -> jax.sharding.Mesh:
  """Returns a mesh of the first devices, by the names and sizes of its axes."""
  return meshes.mesh_of(tuple(shape.values()), kind, names=tuple(shape))


class ShardedRun:
  """Trains on a mesh with an axis "data" and any of "fsdp" and "tensor".

  `binding` says who binds which axes: "shard_map" all, "replicas" a `shard_map`
  with "data" alone, and "jit" none, by `value_and_grad`. A function for `tx`
  gets the mesh and the specs of the parameters. `whole` leaves the state of
  "replicas" without specs.
  """

  rows = BATCH

  def __init__(
    self, tx: Any, binding: str = "shard_map", kind: Any = AxisType.Auto,
    whole: bool = False, **shape: int,
  ):  # fmt: skip
    self.mesh, self.binding = mesh_of(kind, **shape), binding
    bound = {"shard_map": tuple(shape), "replicas": ("data",), "jit": ()}
    self.bound = {name: shape[name] for name in bound[binding]}
    self.param_specs = {
      name: P(*[axis if axis in shape else None for axis in spec])
      for name, spec in SPECS.items()
    }
    where = {"mesh": self.mesh, "param_specs": self.param_specs}
    is_made = hasattr(tx, "update")
    self.tx = tx if is_made else tx(**where)
    self.first_params = self.place(first_params(), self.param_specs)
    self.on_mesh = functools.partial(jax.shard_map, mesh=self.mesh)
    self.own, self.shardings, places = self.param_specs, None, None
    shapes = jax.eval_shape(first_params)
    if binding != "shard_map" and not whole:
      specs = edgc_jax.state_specs(self.tx, shapes, **where)
      self.shardings = self.named(specs)
    if binding == "replicas":
      where["param_specs"] = None if whole else self.param_specs
      where["axis_names"] = {"data"}
      self.on_mesh = functools.partial(self.on_mesh, axis_names={"data"})
      self.own = P()
    if binding != "jit":
      self.specs = edgc_jax.state_specs(self.tx, shapes, **where)
    self.restart()
    if binding == "jit":
      self.step_fn = jax.jit(self._plain_step)
      return
    if binding == "replicas":
      kept = jax.tree.map(lambda x: x.sharding, self.state)
      places = (self.named(self.param_specs), kept, None)
    split = P(tuple(a for a in ("data", "fsdp") if a in self.bound))
    step = self.on_mesh(
      self._step,
      in_specs=(self.own, self.specs, split),
      out_specs=(self.own, self.specs, P()),
    )
    self.step_fn = jax.jit(step, out_shardings=places)

  @functools.cached_property
  def first_state(self) -> Any:
    """The state before the first step."""
    init = self.tx.init
    if self.binding != "jit":
      init = self.on_mesh(init, in_specs=(self.own,), out_specs=self.specs)
    return jax.jit(init, out_shardings=self.shardings)(self.first_params)

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

  def named(self, specs: Any) -> Any:
    """Returns the shardings of specs."""
    return jax.tree.map(lambda s: NamedSharding(self.mesh, s), specs)

  def place(self, tree: Any, specs: Any) -> Any:
    """Places a tree on the mesh, as specs say."""
    return jax.tree.map(jax.device_put, tree, self.named(specs))

  def loss(self, params: Any, batch: Any) -> jax.Array:
    """Returns the loss of a device, or of the part of a batch."""
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
    loss, gradients = jax.value_and_grad(self.loss)(local, batch)
    updates, state = self.tx.update(gradients, state, params)
    if find(state, Checks):
      loss = edgc_jax.after_update(loss, state)
    loss = lax.pmean(loss, "data")
    if "fsdp" in self.bound:
      loss = lax.psum(loss, "fsdp")
    return optax.apply_updates(params, updates), state, loss

  def _plain_step(self, params: Any, state: Any, batch: Any) -> tuple:
    gradient = edgc_jax.value_and_grad(self.loss, self.mesh)
    loss, gradients = gradient(params, batch)
    updates, state = self.tx.update(gradients, state, params)
    return optax.apply_updates(params, updates), state, loss

  def train(self, steps: int, start: int = 0) -> list[float]:
    """Returns the loss of each step."""
    return [
      self.step(batch_at(i, self.rows)) for i in range(start, start + steps)
    ]

  def step(self, batch: Any) -> float:
    """Returns the loss of a batch, after a step on it."""
    self.params, self.state, loss = self._compiled(
      self.params, self.state, batch
    )
    return float(loss)

  @functools.cached_property
  def _compiled(self) -> jax.stages.Compiled:
    arguments = (self.params, self.state, batch_at(0, self.rows))
    return self.step_fn.lower(*arguments).compile()

  def compiled(self) -> str:
    """Returns the text of the compiled step."""
    return self._compiled.as_text()
