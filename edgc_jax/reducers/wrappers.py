"""Wrappers that know about collectives: accumulate and skip_nonfinite.

optax's own wrappers decide per replica, which deadlocks or wastes bytes when
the wrapped transformation communicates. These decide together. `after_update`
keeps other collectives of a step apart from those of a reducer.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from edgc_jax import validation
from edgc_jax.comm import collectives, dataflow
from edgc_jax.comm.dataflow import varying_axes
from edgc_jax.state.base import AccumulateState
from edgc_jax.state.metrics import Checks, SkipStats, find


class SkipNonfiniteState(NamedTuple):
  """State of `skip_nonfinite`."""

  stats: SkipStats
  inner_state: Any


def accumulate(
  tx: optax.GradientTransformation, every: int
) -> optax.GradientTransformationExtraArgs:
  """Means gradients over `every` calls, then updates once.

  Nothing travels in the calls between: a local float32 mean is kept, and the
  wrapped chain, its collectives included, runs at every `every`-th call. The
  others return zeros. (`optax.MultiSteps` runs it at each.)

  Args:
    tx: The chain to wrap, reducer first.
    every: Calls per update, at least 1.

  Returns:
    A gradient transformation.

  Raises:
    ValueError: if `every` is below 1.

  >>> tx = accumulate(optax.sgd(1.0), every=4)
  """
  validation.require_int("every", every, 1)
  tx = optax.with_extra_args_support(tx)

  def init_fn(params: optax.Params) -> AccumulateState:
    # The leading axis lets scalars be sharded over replicas like the rest.
    zeros = jax.tree.map(
      lambda p: jnp.zeros((1, *jnp.shape(p)), jnp.float32), params
    )
    return AccumulateState(jnp.zeros((), jnp.int32), zeros, tx.init(params))

  def update_fn(
    updates: optax.Updates,
    state: AccumulateState,
    params: optax.Params | None = None,
    **extra_args: Any,
  ) -> tuple[optax.Updates, AccumulateState]:
    validation.require(
      extra_args.get("late_updates") is None,
      "late_updates",
      extra_args.get("late_updates"),
      "None under `accumulate`, which would see those of the last call only",
      "accumulate in the pipeline, with more microbatches",
    )
    total = jax.tree.map(
      lambda a, g: a + g.astype(jnp.float32) / every, state.accumulated, updates
    )
    is_last = state.mini_step == every - 1

    def exchange(inner_state: Any) -> tuple[optax.Updates, Any]:
      means = jax.tree.map(lambda a, g: a[0].astype(g.dtype), total, updates)
      return tx.update(means, inner_state, params, **extra_args)

    shapes = jax.eval_shape(exchange, state.inner_state)[0]

    def wait(inner_state: Any) -> tuple[optax.Updates, Any]:
      return jax.tree.map(collectives.zeros_like_type, shapes), inner_state

    averaged, inner_state = jax.lax.cond(
      is_last, exchange, wait, state.inner_state
    )
    return averaged, AccumulateState(
      (state.mini_step + 1) % every,
      jax.tree.map(lambda a: jnp.where(is_last, 0.0, a), total),
      inner_state,
    )

  return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def skip_nonfinite(
  tx: optax.GradientTransformation,
  axis_name: str | tuple[str, ...] = "data",
  max_consecutive: int = 10,
) -> optax.GradientTransformationExtraArgs:
  """Skips, on all replicas together, steps with a non-finite gradient.

  A gradient is looked at before and after the exchange. The replicas agree (4
  bytes on the wire) when all else has been sent; a skipped step returns zeros
  and leaves the state of the whole wrapped chain, Adam's moments and counters
  included, bit for bit as it was, but for the count of steps at which replicas
  had parted. `edgc_jax.metrics` counts the skips and
  warns after `max_consecutive` in a row; the rest of what it shows is then
  that of the step before.

  Args:
    tx: The chain to wrap, reducer first.
    axis_name: Axis over which replicas agree; with pipeline stages both axes,
      ("data", "stage").
    max_consecutive: Skips in a row from which on `metrics` warns.

  Returns:
    A gradient transformation.

  Raises:
    ValueError: if `max_consecutive` is below 1.

  >>> tx = skip_nonfinite(optax.chain(optax.adam(1e-3)), "data")
  """
  validation.require_int("max_consecutive", max_consecutive, 1)
  axes = (axis_name,) if isinstance(axis_name, str) else tuple(axis_name)
  tx = optax.with_extra_args_support(tx)

  def init_fn(params: optax.Params) -> SkipNonfiniteState:
    stats = SkipStats(
      jnp.zeros((), jnp.int32),
      jnp.zeros((), jnp.int32),
      jnp.array(max_consecutive, jnp.int32),
    )
    return SkipNonfiniteState(stats, tx.init(params))

  def update_fn(
    updates: optax.Updates,
    state: SkipNonfiniteState,
    params: optax.Params | None = None,
    **extra_args: Any,
  ) -> tuple[optax.Updates, SkipNonfiniteState]:
    for name in axes:
      collectives.num_devices(name)  # raises where the axis is unbound
    # Always run: a branch would have to hold the chain's collectives, and its
    # two sides types that agree. What it made of bad gradients is dropped.
    averaged, inner_state = tx.update(
      updates, state.inner_state, params, **extra_args
    )
    finite = [dataflow.all_finite(updates)]
    # Whether a reducer inside skipped the step depends on all its exchanges,
    # so that agreeing comes last and makes no stage wait for another before.
    before, after = (
      [checks.skipped_steps for checks in find(tree, Checks)]
      for tree in (state.inner_state, inner_state)
    )
    finite += [new == old for new, old in zip(after, before, strict=True)]
    seen = find(inner_state, Checks)
    ok = dataflow.in_turn(
      jnp.all(jnp.stack(finite)), [checks.parted_steps for checks in seen]
    )
    ok = collectives.all_true(ok, axes)
    validation.require(
      not (left := varying_axes(ok)),
      "axis_name",
      axis_name,
      f"all axes that gradients vary over (those left are {left})",
      "name them all, or stages decide differently",
    )
    parted = [checks.parted_steps for checks in seen]
    averaged, inner_state = jax.tree.map(
      lambda new, old: jnp.where(ok, new, old),
      (averaged, inner_state),
      (jax.tree.map(jnp.zeros_like, averaged), state.inner_state),
    )
    # That replicas have parted may be why all skip.
    is_checks = lambda x: isinstance(x, Checks)  # noqa: E731
    counts = iter(parted)
    inner_state = jax.tree.map(
      lambda x: x._replace(parted_steps=next(counts)) if is_checks(x) else x,
      inner_state,
      is_leaf=is_checks,
    )
    skipped = (~ok).astype(jnp.int32)
    old = state.stats
    stats = SkipStats(
      skipped_steps=old.skipped_steps + skipped,
      consecutive_skips=jnp.where(ok, 0, old.consecutive_skips + 1),
      max_consecutive=old.max_consecutive,
    )
    return averaged, SkipNonfiniteState(stats, inner_state)

  return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def after_update(tree: Any, opt_state: optax.OptState) -> Any:
  """A tree as it is, to be had once a reducer's update is done.

  For a collective of your own beside `update`, the mean of a loss say. On CPUs
  XLA may start one that needs nothing of the update while those inside it are
  under way, on one device sooner than on another, and the values of the two
  are mixed up (`docs/design.md`). It is needed on CPU devices only; elsewhere
  nothing is done, and nothing travels for it anywhere. Collectives that the
  gradients need, as inside a loss, come before the update by themselves.

  Args:
    tree: What you are about to average, a loss say.
    opt_state: What `update` returned, inside the same `shard_map` or `pmap`.

  Returns:
    The tree, the same values.

  Raises:
    ValueError: if no reducer's state is in `opt_state`.

  >>> def mean_loss(loss, opt_state):
  ...   return jax.lax.pmean(after_update(loss, opt_state), "data")
  """
  found = find(opt_state, Checks)
  validation.require(
    bool(found),
    "opt_state",
    type(opt_state),
    "a state with that of a reducer in it",
    "pass what `update` of a chain with edgc() returned",
  )
  return dataflow.in_turn(tree, found)
