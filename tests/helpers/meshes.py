"""Runs a transformation on fake devices, through pmap or shard_map.

Both look the same to a test: gradients have a leading axis of replicas, and
updates and states are returned as the transformation made them.
"""

import functools
import itertools
import math
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
from edgc_jax.state.state import PerReplica, ReducerState, map_leaves
from edgc_jax.wire import cpu_backend

AXIS = "data"
_NUMBERS = itertools.count()


def between_hosts():
  """Returns a context in which devices pass for CPU hosts."""
  return mock.patch.object(cpu_backend, "spans_hosts", return_value=True)


def mesh_of(shape=(2, 4), axis_type=AxisType.Auto, names=None):
  """Returns a mesh of the first devices; by default one axis is of replicas."""
  names = names or ("stage", AXIS)[-len(shape) :]
  types = (
    axis_type if isinstance(axis_type, tuple) else (axis_type,) * len(shape)
  )
  devices = jax.devices()[: math.prod(shape)]
  return jax.make_mesh(shape, names, types, devices=devices)


def replicated(tree, mesh):
  """Places arrays on a mesh: a step of others compiles twice."""
  return jax.device_put(tree, NamedSharding(mesh, P()))


def traced_once(tx: Any) -> Any:
  """Returns `tx` with an update that raises if it is traced a second time."""

  def update(*args, **kwargs):
    return tx.update(*args, **kwargs)

  # chex counts by source and name: each `tx` needs a name of its own, so that
  # it is counted alone, also over several tests.
  update.__name__ = f"update_{next(_NUMBERS)}"
  return tx._replace(update=chex.assert_max_traces(update, n=1))


class Run:
  """Steps of a transformation for scripted gradients."""

  def __init__(
    self, tx, params, mesh=4, specs=None, binding="shard_map", axis_name=AXIS,
    update=None, gradient_specs=None, update_specs=None, check_vma=True,
  ):  # fmt: skip
    """Makes the first state, and a step that is compiled when it is called.

    Args:
      tx: Transformation over the replicas.
      params: Global arrays.
      mesh: Mesh, or the number of replicas.
      specs: Specs of the parameters; none for replicated ones.
      binding: What binds the axis: "shard_map", "pmap" or "vmap".
      axis_name: Axes of the replicas.
      update: Function of gradients, state and parameters of a device, without
        `tx`: by default gradients lose their axis of replicas.
      gradient_specs: Specs of gradients; by default all axes of the mesh lead,
        or those of the replicas where parameters have specs.
      update_specs: Specs of updates; by default those of parameters.
      check_vma: As of `jax.shard_map`.
    """
    self.tx = tx
    if binding in ("pmap", "vmap"):
      getattr(self, f"_bind_{binding}")(params, mesh)
      return
    self.mesh = mesh_of((mesh,)) if isinstance(mesh, int) else mesh
    self.replicas = self.mesh.size
    how = {} if specs is None else {"param_specs": specs}
    self.specs = edgc_jax.state_specs(
      tx, params, axis_name, mesh=self.mesh, **how
    )
    self.param_specs = P() if specs is None else specs
    named = lambda s: NamedSharding(self.mesh, s)  # noqa: E731
    self.params = jax.device_put(params, jax.tree.map(named, self.param_specs))
    if gradient_specs is None and specs is None:
      gradient_specs = P(tuple(self.mesh.shape))
    elif gradient_specs is None:
      gradient_specs = jax.tree.map(lambda s: P(axis_name, *s), specs)
    self._places = jax.tree.map(named, gradient_specs)
    on_mesh = functools.partial(
      jax.shard_map, mesh=self.mesh, check_vma=check_vma
    )
    init = on_mesh(tx.init, in_specs=(self.param_specs,), out_specs=self.specs)
    self.init = jax.jit(init)
    self.first_state = self.state = self.init(self.params)

    def plain_update(gradients, state, params):
      return tx.update(jax.tree.map(lambda g: g[0], gradients), state, params)

    step = on_mesh(
      update or plain_update,
      in_specs=(gradient_specs, self.specs, self.param_specs),
      out_specs=(update_specs or self.param_specs, self.specs),
    )
    self.step_fn = jax.jit(lambda g, state: step(g, state, params))

  def _bind_pmap(self, params, replicas):
    self.replicas, devices = replicas, jax.devices()[:replicas]
    bind = functools.partial(jax.pmap, axis_name=AXIS, devices=devices)
    init = bind(lambda _: self.tx.init(params))
    self.first_state = self.state = init(jnp.arange(replicas))
    self.step_fn = bind(lambda g, state: self.tx.update(g, state, params))

  def _bind_vmap(self, params, replicas):
    axes, self.replicas = edgc_jax.state_axes(self.tx, params), replicas
    bind = functools.partial(jax.vmap, axis_name=AXIS, axis_size=replicas)
    init = bind(self.tx.init, in_axes=None, out_axes=axes)
    self.first_state = self.state = jax.jit(init)(params)
    update = bind(
      self.tx.update, in_axes=(0, axes, None), out_axes=(None, axes)
    )
    self.step_fn = jax.jit(lambda g, state: update(g, state, params))

  def restart(self):
    """Goes back to the first state, without another compilation."""
    self.state = self.first_state
    return self

  def _placed(self, gradients):
    has_mesh = hasattr(self, "mesh")
    return jax.device_put(gradients, self._places) if has_mesh else gradients

  def step(self, gradients):
    """Returns the updates of one step."""
    updates, self.state = self.step_fn(self._placed(gradients), self.state)
    return jax.tree.map(np.asarray, updates)

  def residual(self):
    """The residuals as [replicas, ...] arrays."""
    found = jax.tree.map(np.asarray, residuals(self.state))
    # Under pmap and vmap each replica has an axis of itself.
    is_mesh = hasattr(self, "mesh")
    return jax.tree.map(lambda e: e if is_mesh else e[:, 0], found)

  def metrics(self):
    return edgc_jax.metrics(self.state)

  def compiled(self, gradients):
    """Returns the text of the step, compiled once for this and all steps."""
    if not isinstance(self.step_fn, jax.stages.Compiled):
      lowered = self.step_fn.lower(self._placed(gradients), self.state)
      self.step_fn = lowered.compile()
    return self.step_fn.as_text()


class Pmap(Run):
  """State and updates keep pmap's leading axis of replicas."""

  def __init__(self, tx, params, replicas=4):
    super().__init__(tx, params, replicas, binding="pmap")


class ShardMap(Run):
  """Same as `Pmap` through shard_map, with varying types tracked."""

  def __init__(self, tx, params, replicas=4):
    super().__init__(tx, params, replicas)

  def step(self, gradients):
    """Returns the updates of one step as [replicas, ...] arrays.

    By their type they are replicated: this reads each replica's copy.
    """
    updates, self.state = self.step_fn(self._placed(gradients), self.state)
    return jax.tree.map(
      lambda u: np.stack([np.asarray(s.data) for s in u.addressable_shards]),
      updates,
    )


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
    value = value.values if isinstance(value, PerReplica) else value
    return optax.MaskedNode() if value is None else value

  return map_leaves(get, find(state).leaves)


def with_field(state: Any, name: str, tree: Any) -> Any:
  """Returns a reducer's state with other residuals ("residual") or Q."""

  def put(leaf: Any, x: Any) -> Any:
    x = None if isinstance(x, optax.MaskedNode) else x
    is_local = name == "residual" and x is not None
    return leaf._replace(**{name: PerReplica(x) if is_local else x})

  leaves = jax.tree.map(
    put,
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


CHECK_BYTES = 4 * 3  # a checksum, its negative, and a flag
DIVERGED_BYTES = 4 * 2 * 5  # highest and lowest of four projections and a flag


def sample_bytes(matrices, sampling):
  """Counts, magnitudes and squares of each matrix, and sums or all bins."""
  is_histogram = sampling.estimator == "histogram"
  return 4 * (3 * matrices + (sampling.bins if is_histogram else matrices))


def window_bytes(state, replicas=1, stages=1):
  """Returns the bytes that the first replica broadcasts at a window's end.

  They are the rank, whether the warm-up is over, the ranks of matrices and, on
  stages, the rank of stage 0. The state is of one device, or with a copy for
  each replica or stage.
  """
  copies = (replicas if state.count.ndim else 1) * stages
  ranks = state.allocation.ranks.size if state.allocation else 0
  decided = (2 + (stages > 1)) if state.budget else 0
  return 4 * (ranks // copies + decided)


def gradients_like(params, seed, replicas=4, scale=1.0):
  """Returns independent Gaussian gradients for each replica."""
  random = np.random.default_rng(seed)

  def draw(p):
    values = scale * random.standard_normal((replicas, *p.shape))
    return jnp.asarray(values, p.dtype)

  return jax.tree.map(draw, params)


def stage_mesh(stages, replicas):
  """Returns a mesh of pipeline stages times replicas."""
  return mesh_of((stages, replicas))
