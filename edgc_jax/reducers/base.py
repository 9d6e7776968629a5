"""Builds the gradient transformation of every reducer.

Reducers differ in exchange, ladder and policy. Each `update` has six parts:

  open       checks the arguments and plans the exchange, from shapes alone
  choose     the policy chooses the rung, and the rank of each matrix
  exchange   M = gradient + residual; replicas average M, compressed
  agree      replicas and stages agree on whether the step counts
  keep       updates, residuals and Q, unless a gradient was not finite
  account    bytes, errors and entropies of the step, for `metrics`

On pipeline stages there are two exchanges. A stage's own leaves are sent first,
at its own rung, as soon as its backward pass is done. The other leaves, split
over the stages or shared by them, have to wait for stage 0 anyway. They are
sent next, at its rung, so until then no stage waits for another.

On shards every device plans for its own parts of the leaves, with factors and
ranks of its own. All shards are on one rung, and skip the same steps.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from edgc_jax import validation
from edgc_jax.adaptation.policy import Choice, Policy, PolicyState
from edgc_jax.comm import agreement, collectives, cpu_backend, dataflow
from edgc_jax.comm.dataflow import Axes, AxisName, FastAxis
from edgc_jax.compression import error_feedback, low_rank
from edgc_jax.compression.base import Exchange, ExchangeFn, ExchangeState
from edgc_jax.pipeline.gradients import (
  LateUpdates,
  late_gradients,
  require_stages,
)
from edgc_jax.pipeline.stages import Stages
from edgc_jax.plan import leaves as leaves_of
from edgc_jax.plan import review
from edgc_jax.plan.leaves import ViewFn, layer_matrix, own_placement
from edgc_jax.plan.plan import Plan, by_exchange
from edgc_jax.state.base import ReducerState, stacked, unstacked
from edgc_jax.state.statistics import (
  Account,
  Checks,
  Stats,
  as_tree,
  first_stats,
  from_tree,
  masked_leaves,
  matrix_stats,
  measurement_of,
  next_stats,
  total_energies,
)


class Step(NamedTuple):
  """One step, as its parts share it."""

  plan: Plan  # of all leaves
  plans: tuple[Plan, ...]  # of the leaves exchanged together
  lead: int  # leading axes of parts of the state
  policy: Policy
  updates: optax.Updates
  own: list[jax.Array]  # gradients of this stage alone; all without stages
  params: optax.Params | None
  late_updates: LateUpdates | None
  count: jax.Array  # int32 [], steps done


class Agreed(NamedTuple):
  """Verdicts that replicas and stages share after the exchange of a step."""

  is_finite: jax.Array  # bool [], on this stage
  ok: jax.Array  # bool [], on all stages
  identical: jax.Array  # int32 [], verdict on the gradients
  parted: jax.Array  # int32 [], whether the replicas of any part have parted
  wire_bytes: jax.Array  # float32 []


@dataclasses.dataclass(frozen=True)
class Reducer:
  """Local gradients to their mean: `init` and `update` of a transformation.

  Attributes:
    axes: Those averaged over, bound where `update` runs, and of the stages.
    plan_for: Maps a tree of parameters or gradients to the plan.
    policy_for: Maps the first plan, and the axes of shards, to the policy.
    seed: Seed of the first Q, and of all random draws in the steps.
    exchange: Averages over the replicas.
    check_every: Steps from one comparison of the replicas to the next.
  """

  axes: Axes
  plan_for: Callable[[Any], Plan]
  policy_for: Callable[[Plan, tuple[str, ...]], Policy]
  seed: int = 0
  exchange: ExchangeFn = low_rank.exchange
  check_every: int = agreement.CHECK_EVERY

  def init(self, params: optax.Params) -> ReducerState:
    """Returns the state before the first step."""
    plan = self.plan_for(params)
    plans = by_exchange(plan)
    review.at_init(plan, plans, self.axes)
    policy = self.policy_for(plans[0], plan.shards)
    if type(plan) is not Plan or plan.code or policy.samples:
      dataflow.require_all_bound()  # they read entries, not matrices alone
    factors = [low_rank.init_factors(part, self.seed) for part in plans]
    residuals = list(map(error_feedback.init_residual, plans))
    report = policy.report(policy.init())
    zeros = [jnp.zeros(len(part.matrices), jnp.float32) for part in plans]
    ranks = [jnp.zeros(len(part.matrices), jnp.int32) for part in plans]
    matrices = matrix_stats(plans, params, report, ranks, zeros)
    # A new array for every field: an array used twice cannot be donated.
    count, *counters = (jnp.zeros((), jnp.int32) for _ in range(4))
    state = ReducerState(
      count,
      *policy.init(),
      _exchange_state(plans, params, factors, residuals),
      first_stats(plan.dense_bytes, report, matrices),
      Checks(*counters, jnp.array(masked_leaves(params), jnp.int32)),
    )
    return stacked(state, self._lead(plan), plan.shards)

  def update(
    self,
    updates: optax.Updates,
    state: ReducerState,
    params: optax.Params | None = None,
    *,
    late_updates: LateUpdates | None = None,
    **_: Any,
  ) -> tuple[optax.Updates, ReducerState]:
    """Returns the mean of local gradients, and the next state."""
    step, state = self._open(updates, state, params, late_updates)
    carried = _carried(step.plans, state.exchange)
    compared, choice = self._choose(step, state)
    results = self._exchange(step, choice, *carried)
    agreed = self._agree(step, compared, results)
    averaged, kept = self._keep(step, results, agreed, *carried)
    control, stats = self._account(step, state, choice, results, agreed)
    checks = Checks(
      state.checks.skipped_steps + (~agreed.ok).astype(jnp.int32),
      agreement.count_identical(state.checks.identical_steps, agreed.identical),
      state.checks.parted_steps + agreed.parted,
      state.checks.left_out,
    )
    count = optax.safe_increment(step.count)
    state = ReducerState(count, *control, kept, stats, checks)
    if step.lead:
      state = stacked(state, step.lead, step.plan.shards or (self.axes.stage,))
    return averaged, state

  def _open(
    self,
    updates: optax.Updates,
    state: ReducerState,
    params: optax.Params | None,
    late_updates: LateUpdates | None,
  ) -> tuple[Step, ReducerState]:
    """Checks a step's arguments, and drops the stage axis of the state."""
    axes = self.axes
    collectives.num_devices(axes.replicas)  # raises if it is not bound
    cpu_backend.prepare()
    if axes.fast:
      updates = collectives.mean_where_varying(updates, axes.fast)
    plan = self.plan_for(updates)  # raises if a leaf is not real floating
    plans, lead = by_exchange(plan), self._lead(plan)
    gradients = jax.tree.leaves(updates)
    leaves_of.require_same_leaves(updates, state.stats.matrices.rank)
    leaves_of.require_local(gradients, plan.leaves, axes.replicas, axes)
    if lead:
      require_stages(gradients, plan.leaves, params, axes.stage)
    if lead or state.stats.rank.ndim > state.count.ndim:
      state = unstacked(state, lead)
    policy = self.policy_for(plans[0], plan.shards)
    own = [gradients[i] for i in plans[0].positions]
    if plan.shards:  # collectives over shards in the backward pass come first
      own[:1] = dataflow.in_turn(own[:1], gradients)
    rest = (updates, own, params, late_updates, state.count)
    return Step(plan, plans, lead, policy, *rest), state

  def _lead(self, plan: Plan) -> int:
    """Returns the leading axes of state: [stage], [stage, shard], or none."""
    return 2 if plan.shards else int(self.axes.stage is not None)

  def _choose(
    self, step: Step, state: ReducerState
  ) -> tuple[agreement.Check, Choice]:
    """Chooses the rung. Before that, in the first steps, compares replicas."""
    compared = agreement.compare_gradients(
      step.own, state.checks.identical_steps, self.axes.replicas
    )
    control = PolicyState(state.controller, state.allocator)
    earlier = (compared.verdict, step.own[:1])
    return compared, step.policy.choose(control, step.own, step.count, earlier)

  def _exchange(
    self,
    step: Step,
    choice: Choice,
    factors: Sequence[list[jax.Array]],
    residuals: Sequence[list[jax.Array]],
  ) -> list[Exchange]:
    """Exchanges the stage's own leaves, then the others; with feedback."""
    key = jax.random.fold_in(jax.random.key(self.seed), step.count)
    is_late = step.late_updates is not None
    is_late |= len(step.plans) > 1 and self.axes.stage is not None
    leaves, ranks = jax.tree.leaves(step.updates), choice.ranks
    results, earlier = [], choice.last
    for i, plan in enumerate(step.plans):
      result = self.exchange(
        plan,
        choice.lead_rung if i else choice.rung,
        [leaves[place] for place in plan.positions],
        residuals[i],
        factors[i],
        jax.random.fold_in(key, i),
        self.axes.replicas,
        ranks,
        earlier,
      )
      results.append(result)
      ranks, earlier = None, (result.is_finite,)
      if is_late and i == 0:
        earlier = ()  # late gradients wait for the exchange already
        leaves = late_gradients(
          step.updates,
          step.late_updates,
          result.is_finite,
          step.plan,
          self.axes.replicas,
          self.axes.stage,
        )
    return results

  def _agree(
    self, step: Step, compared: agreement.Check, results: Sequence[Exchange]
  ) -> Agreed:
    """Lets replicas and stages agree on whether the step counts."""
    is_finite = jnp.all(jnp.stack([result.is_finite for result in results]))
    # Non-finite steps are compared, too: if one replica alone has a non-finite
    # parameter, all replicas skip every step until this detects it.
    is_due = (step.count % self.check_every == 0) | ~is_finite
    applied = step.params
    if applied is None:
      applied = [result.averaged for result in results]
    parted = agreement.have_parted(
      applied,
      dataflow.in_turn(is_due, is_finite),
      step.count,
      self.axes.replicas,
    )
    ok, identical, has_parted, stage_bytes = agreement.agree(
      is_finite,
      compared.verdict,
      parted.verdict,
      self.axes.stage,
      step.plan.shards,
    )
    sent = compared.wire_bytes + parted.wire_bytes + stage_bytes
    return Agreed(is_finite, ok, identical, has_parted, sent)

  def _keep(
    self,
    step: Step,
    results: Sequence[Exchange],
    agreed: Agreed,
    factors: Sequence[list[jax.Array]],
    residuals: Sequence[list[jax.Array]],
  ) -> tuple[optax.Updates, ExchangeState]:
    """Returns updates, Q and residuals; zeros and the old ones if not ok."""
    new = [[r.averaged, r.factors, r.residual] for r in results]
    # An exchange keeps the old state if it was not finite itself; with several
    # exchanges or stages, another one may not have been.
    if len(results) > 1 or step.lead:
      old = [
        [jax.tree.map(jnp.zeros_like, r.averaged), q, e]
        for r, q, e in zip(results, factors, residuals, strict=True)
      ]
      new = jax.tree.map(lambda n, o: jnp.where(agreed.ok, n, o), new, old)
    averaged, structure = jax.tree.flatten(step.updates)
    for plan, (means, _, _) in zip(step.plans, new, strict=True):
      for i, mean in zip(plan.positions, means, strict=True):
        averaged[i] = mean
    kept = _exchange_state(
      step.plans,
      step.updates,
      [factors for _, factors, _ in new],
      [residual for _, _, residual in new],
    )
    return jax.tree.unflatten(structure, averaged), kept

  def _account(
    self,
    step: Step,
    state: ReducerState,
    choice: Choice,
    results: Sequence[Exchange],
    agreed: Agreed,
  ) -> tuple[PolicyState, Stats]:
    """Accounts for the step: the policy's state, and the numbers to report."""
    plans = step.plans
    rungs = [choice.rung, *[choice.lead_rung] * (len(plans) - 1)]
    measured = [measurement_of(result) for result in results]
    # The policy sums over steps, whose units differ.
    squared = jnp.square(results[0].unit)
    lost, columns = measured[0]
    own = measured[0]._replace(lost=lost * squared, columns=columns * squared)
    control = step.policy.observe(choice, own, agreed.ok)
    report = step.policy.report(control)
    replicas = collectives.num_devices(self.axes.replicas)
    ranks, sent = [], choice.wire_bytes + agreed.wire_bytes
    for plan, rung in zip(plans, rungs, strict=True):
      ranks.append(jnp.asarray(plan.uniform_ranks)[rung])
      sent += jnp.asarray(plan.wire_bytes_by_rung(replicas))[rung]
    if choice.ranks is not None:
      ranks[0] = choice.ranks
    errors = [m.lost_share for m in measured]
    account = Account(
      rank=jnp.array(plans[0].ladder, jnp.int32)[choice.rung],
      rung=choice.rung,
      wire_bytes=sent,
      **total_energies(results, measured),
      is_finite=agreed.is_finite,
      report=report,
      matrices=matrix_stats(plans, step.updates, report, ranks, errors),
    )
    return control, next_stats(state.stats, account, step.count)


def make_reducer(
  axis_name: AxisName,
  plan_for: Callable[..., Plan],
  policy_for: Callable[[Plan, tuple[str, ...]], Policy],
  *,
  matrix_view: ViewFn | None = None,
  stages: Stages | None = None,
  fast_axis: AxisName | FastAxis | None = None,
  **options: Any,
) -> optax.GradientTransformationExtraArgs:
  """Builds a transformation from local gradients to their mean.

  `plan_for` makes the plan of a tree, with `matrix_view`, `placement` and
  `shards`; `options` are attributes of `Reducer`. The rest is as for `edgc`.
  """
  validation.require_kind("stages", stages, Stages, 'pass Stages("stage")')
  dataflow.require_names("axis_name", axis_name)
  if not isinstance(fast_axis, FastAxis | None):
    fast_axis = FastAxis(fast_axis)
  axes = Axes(axis_name, stages.axis_name if stages else None, fast_axis)
  plan_for = functools.partial(
    plan_for,
    matrix_view=matrix_view or layer_matrix,
    placement=stages.placement if stages else own_placement,
    shards=axes.shards,
  )
  reducer = Reducer(axes, plan_for, policy_for, **options)
  validation.require_int("check_every", reducer.check_every, 1)
  return optax.GradientTransformationExtraArgs(reducer.init, reducer.update)


def _exchange_state(
  plans: Sequence[Plan],
  tree: Any,
  factors: Sequence[Sequence[jax.Array]],
  residuals: Sequence[Sequence[jax.Array]],
) -> ExchangeState:
  """Arranges factors and residuals in trees like the parameters."""
  places = [plan.places(plan.compressible) for plan in plans]
  fed_back = [plan.places(plan.with_residual) for plan in plans]
  return ExchangeState(
    as_tree(places, tree, factors) if plans[0].has_factors else (),
    as_tree(fed_back, tree, residuals) if plans[0].has_residual else (),
  )


def _carried(
  plans: Sequence[Plan], state: ExchangeState
) -> tuple[list[list[jax.Array]], list[list[jax.Array]]]:
  """Returns Q and the residuals of each plan.

  Raises:
    ValueError: if an array has another shape than the state of one replica.
  """
  places = [plan.places(plan.compressible) for plan in plans]
  fed_back = [plan.places(plan.with_residual) for plan in plans]
  factors, residuals = map(from_tree, (places, fed_back), state)
  for plan, q, e in zip(plans, factors, residuals, strict=True):
    kept = [plan.leaves[i] for i in plan.compressible]
    leaves_of.require_shapes("factor_q", kept, q, plan.factor_shapes)
    kept = [plan.leaves[i] for i in plan.with_residual]
    leaves_of.require_shapes("residual", kept, e, [x.shape for x in kept])
  return factors, residuals
