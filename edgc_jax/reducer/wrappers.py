"""Wraps chains that communicate: in time, and after bad steps.

`accumulate` and `skip_nonfinite` replace wrappers of optax, which decide
separately on each replica: that deadlocks or wastes bytes if the wrapped chain
has collectives. With these all replicas decide the same. `after_update` orders
other collectives of a step after the collectives of a reducer. `mean_over` is a
link before a reducer, for axes with fast links.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from edgc_jax import validation
from edgc_jax.leaves import checks as leaf_checks
from edgc_jax.leaves.leaf import NOT_LIKE_PARAMS, is_placeholder
from edgc_jax.mesh.sharding import (
  mesh_here,
  require_mesh,
  specs_of,
  start_on_mesh,
)
from edgc_jax.reducer.transformation import transformation
from edgc_jax.state.metrics import find
from edgc_jax.state.state import (
  AccumulateState,
  Checks,
  LocalStepsState,
  PerReplica,
  SkipStats,
)
from edgc_jax.wire import collectives, order
from edgc_jax.wire.order import AxisName, varying_axes


class SkipNonfiniteState(NamedTuple):
  """State of `skip_nonfinite`: its counters, and the state of the chain."""

  stats: SkipStats
  inner_state: Any


class MeanOverState(NamedTuple):
  """State of `mean_over`: none. A name of its own, for `metrics`."""


def mean_over(axis_name: AxisName) -> optax.GradientTransformation:
  """Averages gradients over axes with fast links, uncompressed.

  It comes before a reducer, which then averages over the slow axis:

    tx = optax.chain(mean_over("fast"), edgc("slow"), optax.adamw(3e-4))

  Gradients that JAX's types show to be equal along an axis stay as they are.

  Wire: the bytes of the gradients over the fast axes, in their own dtype.

  Args:
    axis_name: The axis, or a tuple of axes, bound where `update` runs.

  Returns:
    A gradient transformation without a state.

  Raises:
    ValueError: in `update`, if an axis is not bound.

  >>> tx = optax.chain(mean_over("fast"), optax.sgd(0.1))
  """
  order.require_names("axis_name", axis_name)
  return optax.GradientTransformation(
    lambda params: MeanOverState(),
    lambda updates, state, params=None: (
      collectives.mean_where_varying(updates, axis_name),
      state,
    ),
  )


def accumulate(
  tx: optax.GradientTransformation,
  every: int,
  axis_name: AxisName = "data",
  *,
  mesh: Mesh | None = None,
  param_specs: Any = None,
) -> optax.GradientTransformationExtraArgs:
  """Averages gradients over `every` calls, then applies one update.

  The calls in between send nothing: they add to a local float32 mean, and
  return zeros. A cycle that another `every` began ends at this one, with the
  mean of its calls. The wrapped chain with its collectives runs only at every
  `every`-th call, and its options count these, such as `total_steps` of `edgc`.
  (`optax.MultiSteps` runs it at each call.)

  Args:
    tx: The chain to wrap, reducer first.
    every: Calls per update, at least 1.
    axis_name: The axis of the replicas, for plain `jax.jit`.
    mesh, param_specs: As for `on_mesh`.

  Returns:
    A gradient transformation.

  Raises:
    TypeError: if `tx` is no transformation, or `every` no Python integer.
    ValueError: if `every` is below 1; in `update`, if `late_updates` is given.

  >>> tx = accumulate(optax.sgd(1.0), every=4)
  """
  validation.require_transformation("tx", tx)
  validation.require_int("every", every, 1)
  tx = optax.with_extra_args_support(tx)
  require_mesh(mesh, axis_name, param_specs)

  def start(params: optax.Params, count: int) -> Any:
    return jax.tree.map(
      lambda p: jnp.zeros((count, *jnp.shape(p)), jnp.float32), params
    )

  def init_fn(params: optax.Params) -> AccumulateState:
    if is_placeholder(params):
      inner = tx.init(params)
      return AccumulateState(NOT_LIKE_PARAMS, NOT_LIKE_PARAMS, inner)
    here = mesh_here(mesh, axis_name, param_specs)
    if here is None:
      sums = start(params, 1)
    else:
      specs = specs_of(param_specs, params, here)
      sums = start_on_mesh(start, params, specs, here, axis_name)
    step = jnp.zeros((), jnp.int32)
    return AccumulateState(step, PerReplica(sums), tx.init(params))

  def update_fn(
    updates: optax.Updates,
    state: AccumulateState,
    params: optax.Params | None = None,
    **extra_args: Any,
  ) -> tuple[optax.Updates, AccumulateState]:
    leaf_checks.require_state(state, AccumulateState)
    leaf_checks.require_same_leaves(updates, state.accumulated.values)
    validation.require(
      extra_args.get("late_updates") is None,
      "late_updates",
      extra_args.get("late_updates"),
      "None under `accumulate`, which would read it at the last call only",
      "accumulate in the pipeline, with more microbatches",
    )
    _require_like_sums(updates, state.accumulated.values)
    # Of this cycle, which may have begun with another `every`:
    # mean' = mean + (gradient - mean) / calls
    calls = state.mini_step + 1
    total = jax.tree.map(
      lambda a, g: a + (g.astype(jnp.float32) - a) / calls,
      state.accumulated.values,
      updates,
    )
    is_last = calls >= every

    def exchange(inner_state: Any) -> tuple[optax.Updates, Any]:
      means = jax.tree.map(
        lambda a, g: a.reshape(g.shape).astype(g.dtype), total, updates
      )
      return tx.update(means, inner_state, params, **extra_args)

    shapes = jax.eval_shape(exchange, state.inner_state)[0]

    def wait(inner_state: Any) -> tuple[optax.Updates, Any]:
      return jax.tree.map(collectives.zeros_like_type, shapes), inner_state

    averaged, inner_state = jax.lax.cond(
      order.branch_index(is_last), exchange, wait, state.inner_state
    )
    return averaged, AccumulateState(
      jnp.where(is_last, 0, calls),
      PerReplica(jax.tree.map(lambda a: jnp.where(is_last, 0.0, a), total)),
      inner_state,
    )

  return transformation(init_fn, update_fn)


def _require_like_sums(updates: Any, sums: Any) -> None:
  """Raises unless gradients are local, [*shape], or stacked as the sums."""
  found = jax.tree_util.tree_leaves_with_path(updates)
  for (path, g), a in zip(found, jax.tree.leaves(sums), strict=False):
    validation.require(
      jnp.shape(g) in (a.shape, a.shape[1:]) and jnp.size(g) == a.size,
      "updates",
      jnp.shape(g),
      f"gradients of the shape {a.shape} of the sums, or of {a.shape[1:]} on"
      f" one replica, at {jax.tree_util.keystr(path)}",
      "in plain jax.jit call jax.set_mesh before init, or pass mesh= to"
      " accumulate, too, and its axis_name if it is not 'data'",
    )


def skip_nonfinite(
  tx: optax.GradientTransformation,
  axis_name: AxisName | None = "data",
  max_consecutive: int = 10,
) -> optax.GradientTransformationExtraArgs:
  """Skips steps with a non-finite gradient, on all replicas together.

  Gradients are checked before and after the exchange. A skipped step returns
  zeros and leaves the state of the whole wrapped chain unchanged, bit for bit,
  including Adam's moments and all counters except `diverged_steps`.
  `edgc_jax.metrics` counts the skips, and warns after `max_consecutive` in a
  row; its other statistics are then from the step before.

  Wire: 4 bytes, after all other collectives of the update: each step waits for
  the link once more, over Gloo N - 1 round trips.

  Args:
    tx: The chain to wrap, reducer first.
    axis_name: Axis over which replicas agree; with pipeline stages both axes,
      ("data", "stage"); None in plain `jax.jit`, where one program decides for
      all.
    max_consecutive: Number of skips in a row from which `metrics` warns.

  Returns:
    A gradient transformation.

  Raises:
    TypeError: if `tx` is no transformation, or `max_consecutive` no integer.
    ValueError: if `max_consecutive` is below 1; in `init`, if `tx` holds
      `local_steps`; in `update`, if an axis is not bound, or gradients vary
      over an axis that `axis_name` does not name.

  >>> tx = skip_nonfinite(optax.chain(optax.adam(1e-3)), "data")
  """
  validation.require_transformation("tx", tx)
  validation.require_int("max_consecutive", max_consecutive, 1)
  if axis_name is not None:
    order.require_names("axis_name", axis_name)
  axes = order.names(axis_name)
  tx = optax.with_extra_args_support(tx)

  def init_fn(params: optax.Params) -> SkipNonfiniteState:
    stats = SkipStats(
      jnp.zeros((), jnp.int32),
      jnp.zeros((), jnp.int32),
      jnp.array(max_consecutive, jnp.int32),
    )
    inner_state = tx.init(params)
    validation.require(
      not find(inner_state, LocalStepsState),
      "tx",
      "a chain with local_steps",
      "one without it: local_steps skips steps and rounds itself",
      "leave skip_nonfinite out",
    )
    return SkipNonfiniteState(stats, inner_state)

  def update_fn(
    updates: optax.Updates,
    state: SkipNonfiniteState,
    params: optax.Params | None = None,
    **extra_args: Any,
  ) -> tuple[optax.Updates, SkipNonfiniteState]:
    leaf_checks.require_state(state, SkipNonfiniteState)
    for name in axes:
      collectives.num_devices(name)  # raises if the axis is not bound
    bound = order.bound_axes()
    validation.require(
      bool(axes) or not bound,
      "axis_name",
      axis_name,
      f"the axis of the replicas where one is bound ({list(bound)} here)",
      "pass None in plain jax.jit only",
    )
    # The chain always runs: a branch would have to contain its collectives, and
    # return the same types on both sides. If the step is skipped, its results
    # are dropped.
    averaged, inner_state = tx.update(
      updates, state.inner_state, params, **extra_args
    )
    ok = _all_finite(updates, state.inner_state, inner_state, axes)
    validation.require(
      not (left := varying_axes(ok)),
      "axis_name",
      axis_name,
      f"all axes that gradients vary over ({left} are missing)",
      "name all of them, or stages decide differently",
    )
    counts = [checks.diverged_steps for checks in find(inner_state, Checks)]
    averaged, inner_state = jax.tree.map(
      lambda new, old: jnp.where(ok, new, old),
      (averaged, inner_state),
      (jax.tree.map(jnp.zeros_like, averaged), state.inner_state),
    )
    inner_state = _with_diverged(inner_state, counts)
    skipped, old = (~ok).astype(jnp.int32), state.stats
    stats = SkipStats(
      skipped_steps=old.skipped_steps + skipped,
      consecutive_skips=jnp.where(ok, 0, old.consecutive_skips + 1),
      # Of this run: a checkpoint may have another one.
      max_consecutive=jnp.full_like(old.max_consecutive, max_consecutive),
    )
    return averaged, SkipNonfiniteState(stats, inner_state)

  return transformation(init_fn, update_fn)


def _all_finite(
  updates: optax.Updates, before: Any, after: Any, axes: tuple[str, ...]
) -> jax.Array:
  """Returns whether no gradient was non-finite, before or in the exchange.

  Whether a reducer skipped the step depends on all its exchanges, so replicas
  agree last, and until then no stage waits for another.

  Args:
    updates: The gradients that the chain was given.
    before, after: Its state before the step, and after it.
    axes: Over which the replicas agree; none in plain `jax.jit`.
  """
  seen, was = find(after, Checks), find(before, Checks)
  counts = [checks.diverged_steps for checks in seen]
  if axes:
    finite = [order.all_finite(updates)]
  else:  # if there are replicas, first on each: one flag crosses their axis
    stacked = order.after_all(updates, counts)
    lengths = {jnp.shape(x)[:1] for x in jax.tree.leaves(updates)}
    is_stacked = len(lengths) == 1 and () not in lengths
    check = jax.vmap(order.all_finite) if is_stacked else order.all_finite
    finite = [jnp.all(check(stacked))]
  finite += [
    new.skipped_steps == old.skipped_steps
    for new, old in zip(seen, was, strict=True)
  ]
  ok = order.in_turn(jnp.all(order.together(finite)), counts)
  return collectives.all_true(ok, axes) if axes else ok


def _with_diverged(state: Any, counts: list[jax.Array]) -> Any:
  """Returns a state with the newest counts of steps that found divergence.

  Diverged replicas may be the reason for the skips.
  """
  kept = iter(counts)

  def put(x: Any) -> Any:
    is_checks = isinstance(x, Checks)
    return x._replace(diverged_steps=next(kept)) if is_checks else x

  return jax.tree.map(put, state, is_leaf=lambda x: isinstance(x, Checks))


def after_update(tree: Any, opt_state: optax.OptState) -> Any:
  """Returns `tree` unchanged, with a data dependency on a reducer's update.

  Use it before other collectives of a step, such as the mean of a loss. On
  CPUs, XLA may start a collective that does not depend on the update during the
  collectives of the update, earlier on one device than on another, and mix up
  their values (`docs/pitfalls.md`). Only CPU devices need it; on others it does
  nothing. It sends nothing. Collectives that the gradients depend on, as inside
  a loss, run before the update anyway.

  Args:
    tree: The arrays to average, such as a loss.
    opt_state: The state that `update` returned, in the same `shard_map`,
      `pmap` or `jit`.

  Returns:
    The same tree.

  Raises:
    ValueError: if `opt_state` holds no reducer's state.

  >>> def mean_loss(loss, opt_state):
  ...   return jax.lax.pmean(after_update(loss, opt_state), "data")
  """
  found = find(opt_state, Checks)
  validation.require(
    bool(found),
    "opt_state",
    type(opt_state),
    "a state with a reducer's state in it",
    "pass the state that `update` of a chain with edgc() returned",
  )
  return order.after_all(tree, found)
