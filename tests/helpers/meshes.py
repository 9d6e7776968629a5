"""Runs a transformation on fake devices, through pmap or shard_map.

Both give the same view to a test: gradients come in with a leading axis of
replicas, and updates and states go out as the transformation made them.
"""

import contextlib
import functools
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import edgc_jax
from edgc_jax.comm import cpu_backend

AXIS = "data"


@contextlib.contextmanager
def between_hosts(message=cpu_backend._MESSAGE):
  """Pretends that devices were CPU hosts; messages are of so many bytes."""
  with (
    mock.patch.object(cpu_backend, "spans_hosts", return_value=True),
    mock.patch.object(cpu_backend, "_MESSAGE", message),
  ):
    yield


def mesh_of(shape=(2, 4), axis_type=AxisType.Auto):
  """Of the first devices, with the last of the names."""
  names = ("stage", "data")[-len(shape) :]
  return jax.make_mesh(
    shape,
    names,
    (axis_type,) * len(shape),
    devices=jax.devices()[: np.prod(shape)],
  )


class Pmap:
  """State and updates keep pmap's leading axis of replicas."""

  def __init__(self, tx, params, replicas=4):
    self.replicas = replicas
    self.devices = jax.devices()[:replicas]
    self._pmap = functools.partial(
      jax.pmap, axis_name=AXIS, devices=self.devices
    )
    init = self._pmap(lambda _: tx.init(params))
    self.first_state = self.state = init(jnp.arange(replicas))
    self.traces = 0

    def update(gradients, state):
      self.traces += 1
      return tx.update(gradients, state, params)

    self.step_fn = self._pmap(update)

  def step(self, gradients):
    """One update; returns it as [replicas, ...] arrays."""
    updates, self.state = self.step_fn(gradients, self.state)
    return jax.tree.map(np.asarray, updates)

  def residual(self):
    """The residuals as [replicas, ...] arrays."""
    return jax.tree.map(np.asarray, find(self.state).exchange.residual)

  def compiled(self, gradients):
    return self.step_fn.lower(gradients, self.state).compile().as_text()


class ShardMap:
  """The same through shard_map, with varying types tracked."""

  def __init__(self, tx, params, replicas=4):
    self.replicas = replicas
    self.mesh = jax.make_mesh(
      (replicas,),
      (AXIS,),
      axis_types=(AxisType.Auto,),
      devices=jax.devices()[:replicas],
    )
    specs = edgc_jax.state_specs(tx, params)
    init = jax.shard_map(tx.init, mesh=self.mesh, in_specs=P(), out_specs=specs)
    self.first_state = self.state = jax.jit(init)(params)
    self.traces = 0

    def update(gradients, state):
      self.traces += 1
      local = jax.tree.map(lambda g: g[0], gradients)
      return tx.update(local, state, params)

    self.step_fn = jax.jit(
      jax.shard_map(
        update,
        mesh=self.mesh,
        in_specs=(P(AXIS), specs),
        out_specs=(P(), specs),
      )
    )

  def step(self, gradients):
    """One update; replicated by its type, shown as [replicas, ...]."""
    gradients = jax.device_put(gradients, NamedSharding(self.mesh, P(AXIS)))
    updates, self.state = self.step_fn(gradients, self.state)
    return jax.tree.map(
      lambda u: np.stack([np.asarray(s.data) for s in u.addressable_shards]),
      updates,
    )

  def residual(self):
    """The residuals as [replicas, ...] arrays."""
    return jax.tree.map(
      lambda e: np.asarray(e).reshape(
        self.replicas, e.shape[0] // self.replicas, *e.shape[1:]
      ),
      find(self.state).exchange.residual,
    )

  def compiled(self, gradients):
    return self.step_fn.lower(gradients, self.state).compile().as_text()


BACKENDS = {"pmap": Pmap, "shard_map": ShardMap}


def find(state: Any) -> Any:
  """The reducer's state inside any optimiser state."""
  from edgc_jax.state.base import ReducerState

  is_leaf = lambda x: isinstance(x, ReducerState)  # noqa: E731
  leaves = jax.tree.leaves(state, is_leaf=is_leaf)
  return next(leaf for leaf in leaves if is_leaf(leaf))


PARTED_BYTES = 4 * 2 * 5  # highest and lowest of four projections and a flag


def window_bytes(state, replicas=1, stages=1):
  """All that the first replica decides at a window's end: all but sums.

  Of the state on one device, or with everything once for each replica or stage.
  """
  copies = (replicas if state.count.ndim else 1) * stages
  allocator = state.allocator and state.allocator[:3]
  controller = state.controller
  controller = controller._replace(
    entropy_sum=(), variance_sum=(), num_samples=()
  )
  leaves = jax.tree.leaves((controller._replace(lead_rung=()), allocator))
  lead = 1 if stages > 1 else 0
  return 4 * (sum(leaf.size for leaf in leaves) // copies + lead)


def gradients_like(params, seed, replicas=4, scale=1.0):
  """Independent Gaussian gradients for every replica."""
  leaves, structure = jax.tree.flatten(params)
  random = np.random.default_rng(seed)
  return jax.tree.unflatten(
    structure,
    [
      jnp.asarray(scale * random.standard_normal((replicas, *p.shape)), p.dtype)
      for p in leaves
    ],
  )


def stage_mesh(stages, replicas):
  """Pipeline stages times replicas, on the first devices."""
  return jax.make_mesh(
    (stages, replicas),
    ("stage", AXIS),
    axis_types=(AxisType.Auto,) * 2,
    devices=jax.devices()[: stages * replicas],
  )
