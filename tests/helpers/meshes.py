"""Runs a transformation on fake devices, through pmap or shard_map.

Both look the same to a test: gradients have a leading axis of replicas, and
updates and states are returned as the transformation made them.
"""

import functools
import itertools
from typing import Any
from unittest import mock

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import edgc_jax
from edgc_jax.leaves.leaf import is_leaf_state
from edgc_jax.state.state import ReducerState, map_leaves
from edgc_jax.wire import cpu_backend

AXIS = "data"
_NUMBERS = itertools.count()


def between_hosts():
  """Returns a context in which devices pass for CPU hosts."""
  return mock.patch.object(cpu_backend, "spans_hosts", return_value=True)


def mesh_of(shape=(2, 4), axis_type=AxisType.Auto):
  """Returns a mesh of the first devices; one axis is the data axis."""
  names = ("stage", "data")[-len(shape) :]
  return jax.make_mesh(
    shape,
    names,
    (axis_type,) * len(shape),
    devices=jax.devices()[: np.prod(shape)],
  )


def replicated(tree, mesh):
  """Places arrays on a mesh: a step of others compiles twice."""
  return jax.device_put(tree, NamedSharding(mesh, P()))


def traced_once(
  tx: optax.GradientTransformationExtraArgs,
) -> optax.GradientTransformationExtraArgs:
  """Returns `tx` with an update that raises if it is traced a second time."""

  def update(*args, **kwargs):
    return tx.update(*args, **kwargs)

  # chex counts by source and name: each `tx` needs a name of its own, so that
  # it is counted alone, also over several tests.
  update.__name__ = f"update_{next(_NUMBERS)}"
  return tx._replace(update=chex.assert_max_traces(update, n=1))


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
    self.step_fn = self._pmap(
      lambda gradients, state: tx.update(gradients, state, params)
    )

  def step(self, gradients):
    """Returns the updates of one step as [replicas, ...] arrays."""
    updates, self.state = self.step_fn(gradients, self.state)
    return jax.tree.map(np.asarray, updates)

  def residual(self):
    """The residuals as [replicas, ...] arrays."""
    return jax.tree.map(np.asarray, residuals(self.state))

  def compiled(self, gradients):
    return self.step_fn.lower(gradients, self.state).compile().as_text()


class ShardMap:
  """Same as `Pmap` through shard_map, with varying types tracked."""

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

    def update(gradients, state):
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
    """Returns the updates of one step as [replicas, ...] arrays.

    By their type they are replicated: this reads each replica's copy.
    """
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
      residuals(self.state),
    )

  def compiled(self, gradients):
    return self.step_fn.lower(gradients, self.state).compile().as_text()


BACKENDS = {"pmap": Pmap, "shard_map": ShardMap}


def find(state: Any) -> Any:
  """Returns the reducer's state inside any optimiser state."""
  is_leaf = lambda x: isinstance(x, ReducerState)  # noqa: E731
  leaves = jax.tree.leaves(state, is_leaf=is_leaf)
  return next(leaf for leaf in leaves if is_leaf(leaf))


def residuals(state: Any) -> Any:
  """Returns the residuals of all leaves, in a tree like the parameters.

  Leaves without one have an `optax.MaskedNode`.
  """
  return _field(state, "residual")


def factors(state: Any) -> Any:
  """Returns Q of all leaves, as `residuals`."""
  return _field(state, "factor_q")


def _field(state: Any, name: str) -> Any:
  def get(leaf: Any) -> Any:
    value = getattr(leaf, name)
    return optax.MaskedNode() if value is None else value

  return map_leaves(get, find(state).leaves)


def with_field(state: Any, name: str, tree: Any) -> Any:
  """Returns a reducer's state with other residuals ("residual") or Q."""
  leaves = jax.tree.map(
    lambda leaf, x: leaf._replace(
      **{name: None if isinstance(x, optax.MaskedNode) else x}
    ),
    state.leaves,
    tree,
    is_leaf=lambda x: is_leaf_state(x) or isinstance(x, optax.MaskedNode),
  )
  return state._replace(leaves=leaves)


def first_replica(tree: Any) -> Any:
  """Returns the first replica of leaves [replicas, ...]."""
  return jax.tree.map(lambda x: x[0], tree)


def assert_replicas_equal(tree: Any) -> None:
  """Raises unless all replicas hold the same in leaves [replicas, ...]."""
  first = jax.tree.map(lambda x: np.broadcast_to(x[:1], x.shape), tree)
  chex.assert_trees_all_equal(tree, first)


DIVERGED_BYTES = 4 * 2 * 5  # highest and lowest of four projections and a flag


def window_bytes(state, replicas=1, stages=1):
  """Returns the bytes that the first replica broadcasts at a window's end.

  They are the rank, whether the warm-up is over, the ranks of matrices and, on
  stages, the rank of stage 0.

  Args:
    state: Reducer state of one device, or with a copy for each replica or
      stage.
    replicas: Number of replicas.
    stages: Number of stages.
  """
  copies = (replicas if state.count.ndim else 1) * stages
  ranks = state.allocation.ranks.size if state.allocation else 0
  decided = (2 + (stages > 1)) if state.budget else 0
  return 4 * (ranks // copies + decided)


def gradients_like(params, seed, replicas=4, scale=1.0):
  """Returns independent Gaussian gradients for each replica."""
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
  """Returns a mesh of pipeline stages times replicas."""
  return jax.make_mesh(
    (stages, replicas),
    ("stage", AXIS),
    axis_types=(AxisType.Auto,) * 2,
    devices=jax.devices()[: stages * replicas],
  )
