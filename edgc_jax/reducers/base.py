"""The one gradient transformation behind all reducers.

They differ in the exchange, in their ladder of ranks and in the policy that
picks a rung. One step: choose the rung, add the residual, exchange, keep what
was not sent.

On pipeline stages there are two exchanges. A stage's own leaves go first, at
its own rung, as soon as its own backward pass is done. The rest (tensors
split over all stages, leaves shared by all) waits for stage 0 anyway: it
follows at the rung of stage 0, and only when the first exchange is done, so
that no stage has to wait for another before.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from edgc_jax import validation
from edgc_jax.adaptation.allocation import Measured
from edgc_jax.adaptation.error_model import lost_share
from edgc_jax.adaptation.policy import Policy, PolicyState, Report
from edgc_jax.comm import (
  agreement,
  collectives,
  cpu_backend,
  dataflow,
  sentinel,
)
from edgc_jax.compression import base, low_rank
from edgc_jax.compression.base import Exchange, ExchangeFn
from edgc_jax.compression.error_feedback import with_feedback
from edgc_jax.pipeline.gradients import LateUpdates, rest_of
from edgc_jax.plan.leaves import (
  require_local,
  require_same_leaves,
  warn_of_dtypes,
)
from edgc_jax.plan.plan import Plan, by_exchange, warn_if_nothing_pays
from edgc_jax.state.base import ReducerState, stacked, unstacked
from edgc_jax.state.metrics import Checks, MatrixStats, first_stats, next_stats


def make_reducer(
  axis_name: str,
  plan_for: Callable[[Any], Plan],
  policy_for: Callable[[Plan], Policy],
  seed: int,
  stage_axis: str | None = None,
  exchange: ExchangeFn = low_rank.exchange,
  check_every: int = sentinel.CHECK_EVERY,
) -> optax.GradientTransformationExtraArgs:
  """Builds a transformation from local gradients to their mean.

  Args:
    axis_name: Axis averaged over; must be bound where `update` runs.
    plan_for: From a tree of parameters or gradients to the plan.
    policy_for: From the plan of a stage's own leaves to the policy.
    seed: Seed of the first Q and of columns drawn anew.
    stage_axis: Axis of the pipeline stages, None if there are none.
    exchange: What travels.
    check_every: Steps from one comparison of the replicas to the next.

  Returns:
    The transformation.

  Raises:
    ValueError: if `check_every` is below 1.
  """
  validation.require_int("check_every", check_every, 1)

  def init_fn(params: optax.Params) -> ReducerState:
    plan = plan_for(params)
    warn_if_nothing_pays(plan)
    warn_of_dtypes(plan.leaves)
    plans = by_exchange(plan)
    policy = policy_for(plans[0])
    carried = base.pack(
      plans,
      params,
      [base.init_factors(part, seed) for part in plans],
      [base.init_residual(part) for part in plans],
    )
    report = policy.report(policy.init())
    zeros = [jnp.zeros(len(part.matrices), jnp.float32) for part in plans]
    ranks = [jnp.zeros(len(part.matrices), jnp.int32) for part in plans]
    stats = first_stats(
      plan.dense_bytes,
      report,
      _matrix_stats(plans, params, report, ranks, zeros),
    )
    # A new array for every field: one that served twice cannot be donated.
    count, *counters = (jnp.zeros((), jnp.int32) for _ in range(4))
    checks = Checks(*counters, jnp.array(_masked_leaves(params), jnp.int32))
    state = ReducerState(count, *policy.init(), carried, stats, checks)
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
    # Raises where the axis is unbound.
    replicas = collectives.num_devices(axis_name)
    cpu_backend.require_threads()
    cpu_backend.limit_lapack_threads()
    plan = plan_for(updates)  # raises on leaves that are not real floating
    gradients = jax.tree.leaves(updates)
    require_same_leaves(updates, state.stats.matrices.rank)
    require_local(gradients, plan.leaves, axis_name)
    if stage_axis:
      leaves = None if params is None else jax.tree.leaves(params)
      gradients.require_stages(gradients, plan.leaves, leaves, stage_axis)
      state = unstacked(state)
    plans = by_exchange(plan)
    own = [gradients[i] for i in plans[0].positions]
    policy = policy_for(plans[0])
    count = state.count

    identical = state.checks.identical_steps
    is_compared = agreement.is_still_open(own, identical, axis_name)
    verdict = agreement.compare_replicas(own, is_compared, axis_name)
    control = PolicyState(state.controller, state.allocator)
    choice = policy.choose(control, own, count, (verdict, own[:1]))
    factors, residuals = base.unpack(plans, state.exchange)
    key = jax.random.fold_in(jax.random.key(seed), count)

    def reduce(
      i: int,
      rung: jax.Array,
      leaves: Sequence[jax.Array],
      ranks: jax.Array | None = None,
    ) -> Exchange:
      run = lambda matrices: exchange(  # noqa: E731
        plans[i], rung, matrices, factors[i], jax.random.fold_in(key, i),
        axis_name, count=count, ranks=ranks,
      )  # fmt: skip
      return with_feedback(plans[i], leaves, residuals[i], run)

    own = dataflow.in_turn(own, choice.last)
    results = [reduce(0, choice.rung, own, choice.ranks)]
    rest = rest_of(
      updates, late_updates, results[0].is_finite, plan, axis_name, stage_axis
    )
    for i, part in enumerate(plans[1:], 1):
      leaves = [rest[position] for position in part.positions]
      results.append(reduce(i, choice.lead_rung, leaves))
    is_finite = jnp.all(jnp.stack([result.is_finite for result in results]))
    # A step that is not finite is looked at, too: a number that is not finite
    # on one replica alone would make all skip, for ever.
    is_checked = (count % check_every == 0) | ~is_finite
    applied = params
    if params is None:
      applied = [result.averaged for result in results]
    parted = sentinel.have_parted(
      applied, dataflow.in_turn(is_checked, is_finite), count, axis_name
    )
    ok, verdict, parted = agreement.agree(
      is_finite, verdict, parted, stage_axis
    )

    averaged = gradients
    # One exchange has zeros for what is not finite; there may be others.
    is_alone = len(results) == 1 and not stage_axis
    for part, result in zip(plans, results, strict=True):
      for i, mean in zip(part.positions, result.averaged, strict=True):
        zero = jnp.zeros_like(mean)
        averaged[i] = mean if is_alone else jnp.where(ok, mean, zero)
    keep = lambda new, old: jax.tree.map(  # noqa: E731
      lambda n, o: jnp.where(ok, n, o), new, old
    )
    measured = [_measured(result) for result in results]
    # The policy adds steps up, whose units differ.
    squared = jnp.square(results[0].unit)
    own_measured = jax.tree.map(lambda x: x * squared, measured[0])
    control = policy.settle(choice, own_measured, ok)
    report = policy.report(control)
    rungs = [choice.rung, choice.lead_rung][: len(plans)]
    ranks = [
      _by_rung(part.uniform_ranks, rung)
      for part, rung in zip(plans, rungs, strict=True)
    ]
    if choice.ranks is not None:
      ranks[0] = choice.ranks
    errors = [lost_share(m.lost, m.energy) for m in measured]
    unit = jnp.max(jnp.stack([result.unit for result in results]))

    def total(squares: Sequence[Sequence[jax.Array]]) -> jax.Array:
      """Over all exchanges, in the common unit."""
      return sum(
        jnp.sum(x) * jnp.square(result.unit / unit)
        for result, own in zip(results, squares, strict=True)
        for x in own
      )

    new_state = ReducerState(
      count=optax.safe_increment(count),
      controller=control.controller,
      allocator=control.allocator,
      exchange=base.pack(
        plans,
        updates,
        keep([result.factors for result in results], factors),
        keep([result.residual for result in results], residuals),
      ),
      stats=next_stats(
        state.stats,
        lost=total([[m.lost] for m in measured]),
        energy=total([[m.energy] for m in measured]),
        residual_energy=total([result.residual_energy for result in results]),
        unit=unit,
        is_finite=is_finite,
        rank=_by_rung(np.array(plans[0].ladder, np.int32), choice.rung),
        rung=choice.rung,
        wire_bytes=sum(
          _bytes_at(part, rung, replicas, count)
          for part, rung in zip(plans, rungs, strict=True)
        )
        + choice.wire_bytes
        + jnp.where(is_compared, float(agreement.CHECK_BYTES), 0.0)
        + jnp.where(
          is_checked, float(sentinel.check_bytes(applied, axis_name)), 0.0
        )
        + agreement.stage_check_bytes(stage_axis),
        count=count,
        report=report,
        matrices=_matrix_stats(plans, updates, report, ranks, errors),
      ),
      checks=Checks(
        state.checks.skipped_steps + (~ok).astype(jnp.int32),
        agreement.count_identical(identical, verdict),
        state.checks.parted_steps + parted,
        state.checks.left_out,
      ),
    )
    return (
      jax.tree.unflatten(jax.tree.structure(updates), averaged),
      stacked(new_state, stage_axis) if stage_axis else new_state,
    )

  return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _masked_leaves(params: Any) -> int:
  """How many leaves `optax.masked` keeps from this transformation."""
  is_masked = lambda x: isinstance(x, optax.MaskedNode)  # noqa: E731
  leaves = jax.tree.leaves(params, is_leaf=is_masked)
  return sum(map(is_masked, leaves))


def _measured(result: Exchange) -> Measured:
  """What an exchange says of each matrix."""
  width = max((c.shape[1] for c in result.columns), default=0)
  columns = [
    jnp.pad(c, ((0, 0), (0, width - c.shape[1]))) for c in result.columns
  ]
  if not columns:
    none = functools.partial(jnp.zeros, dtype=jnp.float32)
    return Measured(none((0,)), none((0, 0)))
  return Measured(jnp.concatenate(result.lost), jnp.concatenate(columns))


def _matrix_stats(
  plans: Sequence[Plan],
  tree: Any,
  report: Report,
  ranks: Sequence[jax.Array],
  errors: Sequence[jax.Array],
) -> MatrixStats:
  """Arrays over the matrices of each plan, cut into trees like `tree`."""

  def as_tree(values: Sequence[jax.Array]) -> Any:
    parts = plans[: len(values)]
    by_leaf = [p.by_leaf(v) for p, v in zip(parts, values, strict=True)]
    return base.like_tree(parts, tree, by_leaf)

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
  return jnp.asarray(table)[rung]


def _bytes_at(
  plan: Plan, rung: jax.Array, replicas: int, count: jax.Array
) -> jax.Array:
  """Of this step: where factors alternate, those of the one that travels."""
  table = [plan.wire_bytes_of_sides(rank, replicas) for rank in plan.ladder]
  by_side = _by_rung(np.array(table, np.float32), rung)
  sent = by_side[count % len(table[0])]
  dense = float(plan.wire_bytes(0, replicas))
  return jnp.where(plan.refreshes(count), dense, sent)
