"""Builds the gradient transformation of every reducer.

Reducers differ in the exchange, in the rank ladder, and in the policy that
chooses a rung. Each step of `update` has four parts:

  choose     the policy chooses the rung, and the rank of each matrix
  exchange   M = gradient + residual; replicas average M, compressed
  keep       updates, residuals and Q, unless a gradient was not finite
  account    bytes, errors and entropies of the step, for `metrics`

On pipeline stages there are two exchanges. A stage's own leaves are sent first,
at the stage's own rung, as soon as its backward pass is done. The other leaves
(split over the stages, or shared by them) have to wait for stage 0 anyway. They
are sent after the first exchange, at the rung of stage 0, so until then no
stage waits for another.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from edgc_jax import validation
from edgc_jax.adaptation.policy import Policy, PolicyState, Report
from edgc_jax.comm import agreement, collectives, cpu_backend, dataflow
from edgc_jax.compression import error_feedback, low_rank
from edgc_jax.compression.base import Exchange, ExchangeFn, ExchangeState
from edgc_jax.pipeline.gradients import (
  LateUpdates,
  late_gradients,
  require_stages,
)
from edgc_jax.plan import leaves as leaf_checks
from edgc_jax.plan import plan as plans_of
from edgc_jax.plan.ladder import warn_if_nothing_saves
from edgc_jax.plan.leaves import Measurement
from edgc_jax.plan.plan import Plan, by_exchange
from edgc_jax.state.base import ReducerState, stacked, unstacked
from edgc_jax.state.metrics import (
  Account,
  Checks,
  MatrixStats,
  first_stats,
  next_stats,
)


def make_reducer(
  axis_name: str,
  plan_for: Callable[[Any], Plan],
  policy_for: Callable[[Plan], Policy],
  seed: int,
  stage_axis: str | None = None,
  exchange: ExchangeFn = low_rank.exchange,
  check_every: int = agreement.CHECK_EVERY,
) -> optax.GradientTransformationExtraArgs:
  """Builds a transformation from local gradients to their mean.

  Args:
    axis_name: Axis averaged over; must be bound where `update` runs.
    plan_for: From a tree of parameters or gradients to the plan.
    policy_for: From the plan of a stage's own leaves to the policy.
    seed: Seed of the first Q, and of all random draws in the steps.
    stage_axis: Axis of the pipeline stages, None if there are none.
    exchange: Averages over the replicas.
    check_every: Steps from one comparison of the replicas to the next.

  Returns:
    The transformation.

  Raises:
    ValueError: if `check_every` is below 1.
  """
  validation.require_int("check_every", check_every, 1)

  def init_fn(params: optax.Params) -> ReducerState:
    plan = plan_for(params)
    warn_if_nothing_saves(plan)
    leaf_checks.warn_of_dtypes(plan.leaves)
    plans = by_exchange(plan)
    policy = policy_for(plans[0])
    factors = [low_rank.init_factors(part, seed) for part in plans]
    residuals = [error_feedback.init_residual(part) for part in plans]
    report = policy.report(policy.init())
    zeros = [jnp.zeros(len(part.matrices), jnp.float32) for part in plans]
    ranks = [jnp.zeros(len(part.matrices), jnp.int32) for part in plans]
    matrices = _matrix_stats(plans, params, report, ranks, zeros)
    # A new array for every field: an array used twice cannot be donated.
    count, *counters = (jnp.zeros((), jnp.int32) for _ in range(4))
    state = ReducerState(
      count,
      *policy.init(),
      _exchange_state(plans, params, factors, residuals),
      first_stats(plan.dense_bytes, report, matrices),
      Checks(*counters, jnp.array(_masked_leaves(params), jnp.int32)),
    )
    return stacked(state) if stage_axis else state

  def update_fn(
    updates: optax.Updates,
    state: ReducerState,
    params: optax.Params | None = None,
    *,
    late_updates: LateUpdates | None = None,
    **extra_args: Any,
  ) -> tuple[optax.Updates, ReducerState]:
    del extra_args
    # Raises if the axis is not bound.
    replicas = collectives.num_devices(axis_name)
    cpu_backend.prepare()
    plan = plan_for(updates)  # raises if a leaf is not real floating
    gradients = jax.tree.leaves(updates)
    leaf_checks.require_same_leaves(updates, state.stats.matrices.rank)
    leaf_checks.require_local(gradients, plan.leaves, axis_name)
    if stage_axis:
      leaves = None if params is None else jax.tree.leaves(params)
      require_stages(gradients, plan.leaves, leaves, stage_axis)
      state = unstacked(state)
    plans = by_exchange(plan)
    policy = policy_for(plans[0])
    factors, residuals = _carried(plans, state.exchange)
    count = state.count
    key = jax.random.fold_in(jax.random.key(seed), count)
    own = [gradients[i] for i in plans[0].positions]

    # Choose the rung. Before that, in the first steps, compare the replicas.
    identical = state.checks.identical_steps
    compared = agreement.compare_gradients(own, identical, axis_name)
    choice = policy.choose(
      PolicyState(state.controller, state.allocator),
      own,
      count,
      (compared.verdict, own[:1]),
    )

    # Exchange the stage's own leaves, then all others.
    run = functools.partial(_exchange, exchange, axis_name)
    sent = dataflow.in_turn(own, choice.last)
    results = [
      run(
        plans[0], choice.rung, sent, factors[0], residuals[0],
        jax.random.fold_in(key, 0), choice.ranks,
      )
    ]  # fmt: skip
    rungs = [choice.rung, choice.lead_rung][: len(plans)]
    if len(plans) > 1 or late_updates is not None:
      first_is_finite = results[0].is_finite
      completed = late_gradients(
        updates, late_updates, first_is_finite, plan, axis_name, stage_axis
      )
    for i, part in enumerate(plans[1:], 1):
      late = [completed[position] for position in part.positions]
      own_key = jax.random.fold_in(key, i)
      results.append(
        run(part, rungs[i], late, factors[i], residuals[i], own_key)
      )

    # Keep the results, unless a gradient on any stage is not finite.
    is_finite = jnp.all(jnp.stack([result.is_finite for result in results]))
    # Non-finite steps are compared, too: if one replica alone has a non-finite
    # parameter, all replicas skip every step until this detects it.
    is_due = (count % check_every == 0) | ~is_finite
    applied = params
    if params is None:
      applied = [result.averaged for result in results]
    parted = agreement.have_parted(
      applied, dataflow.in_turn(is_due, is_finite), count, axis_name
    )
    ok, verdict, has_parted, stage_bytes = agreement.agree(
      is_finite, compared.verdict, parted.verdict, stage_axis
    )
    # An exchange returns zeros if it was not finite itself; with several
    # exchanges or stages, another one may not have been.
    is_alone = len(results) == 1 and not stage_axis
    for part, result in zip(plans, results, strict=True):
      for i, mean in zip(part.positions, result.averaged, strict=True):
        zero = jnp.zeros_like(mean)
        gradients[i] = mean if is_alone else jnp.where(ok, mean, zero)
    keep = lambda new, old: jax.tree.map(  # noqa: E731
      lambda n, o: jnp.where(ok, n, o), new, old
    )
    kept = _exchange_state(
      plans,
      updates,
      keep([result.factors for result in results], factors),
      keep([result.residual for result in results], residuals),
    )

    # Account for the bytes and errors of the step.
    measured = [_measurement(result) for result in results]
    # The policy sums over steps, whose units differ.
    squared = jnp.square(results[0].unit)
    own_measured = jax.tree.map(lambda x: x * squared, measured[0])
    control = policy.settle(choice, own_measured, ok)
    report = policy.report(control)
    ranks = [
      _by_rung(part.uniform_ranks, rung)
      for part, rung in zip(plans, rungs, strict=True)
    ]
    if choice.ranks is not None:
      ranks[0] = choice.ranks
    errors = [m.lost_share for m in measured]
    sent_bytes = [
      _by_rung(part.wire_bytes_by_rung(replicas), rung)
      for part, rung in zip(plans, rungs, strict=True)
    ]
    stats = next_stats(
      state.stats,
      Account(
        rank=_by_rung(np.array(plans[0].ladder, np.int32), choice.rung),
        rung=choice.rung,
        wire_bytes=sum(sent_bytes)
        + choice.wire_bytes
        + compared.wire_bytes
        + parted.wire_bytes
        + stage_bytes,
        **_energies(results, measured),
        is_finite=is_finite,
        report=report,
        matrices=_matrix_stats(plans, updates, report, ranks, errors),
      ),
      count,
    )
    new_state = ReducerState(
      optax.safe_increment(count),
      control.controller,
      control.allocator,
      kept,
      stats,
      Checks(
        state.checks.skipped_steps + (~ok).astype(jnp.int32),
        agreement.count_identical(identical, verdict),
        state.checks.parted_steps + has_parted,
        state.checks.left_out,
      ),
    )
    return (
      jax.tree.unflatten(jax.tree.structure(updates), gradients),
      stacked(new_state, stage_axis) if stage_axis else new_state,
    )

  return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _exchange(
  exchange: ExchangeFn,
  axis_name: str,
  plan: Plan,
  rung: jax.Array,
  gradients: Sequence[jax.Array],
  factors: list[jax.Array],
  residual: Sequence[jax.Array],
  key: jax.Array,
  ranks: jax.Array | None = None,
) -> Exchange:
  """Exchanges the leaves of one plan, with error feedback."""
  matrices = error_feedback.add_residual(plan, gradients, residual)
  result = exchange(plan, rung, matrices, factors, key, axis_name, ranks)
  return error_feedback.keep_error(plan, gradients, result)


def _exchange_state(
  plans: Sequence[Plan],
  tree: Any,
  factors: Sequence[Sequence[jax.Array]],
  residuals: Sequence[Sequence[jax.Array]],
) -> ExchangeState:
  """Arranges factors and residuals in trees like the parameters."""
  plan = plans[0]
  return ExchangeState(
    plans_of.as_tree(plans, tree, factors) if plan.has_factors else (),
    plans_of.as_tree(plans, tree, residuals) if plan.has_residual else (),
  )


def _carried(
  plans: Sequence[Plan], state: ExchangeState
) -> tuple[list[list[jax.Array]], list[list[jax.Array]]]:
  """Returns Q and the residuals of each plan's compressible leaves.

  Raises:
    ValueError: if an array has another shape than the state of one replica.
  """
  factors = plans_of.from_tree(plans, state.factor_q)
  residuals = plans_of.from_tree(plans, state.residual)
  for plan, q, e in zip(plans, factors, residuals, strict=True):
    leaf_checks.require_shapes(
      [plan.leaves[i] for i in plan.compressible], e, q, plan.factor_shapes
    )
  return factors, residuals


def _masked_leaves(params: Any) -> int:
  """Counts the leaves that `optax.masked` keeps from this transformation."""
  is_masked = lambda x: isinstance(x, optax.MaskedNode)  # noqa: E731
  leaves = jax.tree.leaves(params, is_leaf=is_masked)
  return sum(map(is_masked, leaves))


def _measurement(result: Exchange) -> Measurement:
  """Joins the energies of all matrices of an exchange, in its own unit."""
  if not result.columns:
    return Measurement(
      jnp.zeros((0,), jnp.float32), jnp.zeros((0, 0), jnp.float32)
    )
  width = max(c.shape[1] for c in result.columns)
  columns = [
    jnp.pad(c, ((0, 0), (0, width - c.shape[1]))) for c in result.columns
  ]
  return Measurement(jnp.concatenate(result.lost), jnp.concatenate(columns))


def _energies(
  results: Sequence[Exchange], measured: Sequence[Measurement]
) -> dict[str, jax.Array]:
  """Sums energies over all exchanges, in their largest unit squared."""
  unit = jnp.max(jnp.stack([result.unit for result in results]))

  def total(squares: Sequence[Sequence[jax.Array]]) -> jax.Array:
    return sum(
      jnp.sum(x) * jnp.square(result.unit / unit)
      for result, own in zip(results, squares, strict=True)
      for x in own
    )

  return {
    "lost": total([[m.lost] for m in measured]),
    "energy": total([[m.energy] for m in measured]),
    "residual_energy": total([result.residual_energy for result in results]),
    "unit": unit,
  }


def _matrix_stats(
  plans: Sequence[Plan],
  tree: Any,
  report: Report,
  ranks: Sequence[jax.Array],
  errors: Sequence[jax.Array],
) -> MatrixStats:
  """Splits arrays over the matrices of each plan into trees like `tree`."""

  def as_tree(values: Sequence[jax.Array]) -> Any:
    parts = plans[: len(values)]
    by_leaf = [p.by_leaf(v) for p, v in zip(parts, values, strict=True)]
    return plans_of.as_tree(parts, tree, by_leaf)

  is_measured = report.matrix_entropy is not None
  return MatrixStats(
    entropy=as_tree([report.matrix_entropy]) if is_measured else None,
    rank=as_tree(ranks),
    error=as_tree(errors),
    predicted_error=as_tree([report.matrix_predicted_error])
    if is_measured
    else None,
  )


def _by_rung(table: np.ndarray, rung: jax.Array) -> jax.Array:
  """Returns the row of a static table at a traced rung."""
  return jnp.asarray(table)[rung]
