"""Builds the gradient transformation of every reducer.

A reducer takes the local gradients of a replica and returns their mean. Each
`update` has six parts:

  open       checks the arguments, and describes the leaves, from shapes alone
  choose     the budget chooses the rank, the allocation each matrix's share
  exchange   M = gradient + residual; replicas average M, compressed
  agree      replicas and stages agree on whether the step counts
  keep       updates, residuals and Q, unless a gradient was not finite
  account    bytes, errors and entropies of the step, for `metrics`

On pipeline stages there are two exchanges. A stage's own leaves are sent first,
at its own rank, as soon as its backward pass is done. The other leaves, split
over the stages or shared by them, have to wait for stage 0 anyway. They are
sent next, at its rank, so until then no stage waits for another.

On shards every device plans for its own parts of the leaves, with factors and
columns of its own. All shards of a stage have one rank, and all devices skip
the same steps.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from edgc_jax import validation
from edgc_jax.budget.allocation import ErrorAllocator, Measured
from edgc_jax.budget.base import Budget, Report
from edgc_jax.leaves import checks as leaf_checks
from edgc_jax.leaves import review
from edgc_jax.leaves.leaf import (
  NOT_LIKE_PARAMS,
  Leaf,
  LeafState,
  LeafStats,
  is_leaf_state,
  is_placeholder,
  leaves_in,
  masked_paths,
  own_placement,
  split_by_leaf,
  without_variables,
)
from edgc_jax.leaves.views import ViewFn, layer_matrix
from edgc_jax.mesh.on_mesh import on_mesh
from edgc_jax.reducer import rounds
from edgc_jax.reducer.rounds import Energies, Exchanged, Input, Outcome
from edgc_jax.reducer.transformation import transformation
from edgc_jax.stages.gradients import (
  LateUpdates,
  late_gradients,
  require_stages,
)
from edgc_jax.stages.stages import Stages
from edgc_jax.state import growth
from edgc_jax.state.growth import Growth
from edgc_jax.state.state import (
  Checks,
  Parts,
  ReducerState,
  Stats,
  stacked,
  unstacked,
)
from edgc_jax.wire import agreement, collectives, cpu_backend, order
from edgc_jax.wire.channel import Channel
from edgc_jax.wire.codes import Code
from edgc_jax.wire.order import Axes, AxisName, names


class Plan(NamedTuple):
  """Static: how the leaves of a tree are sent."""

  leaves: tuple[Leaf, ...]  # in tree order, with their methods
  budget: Budget
  allocator: ErrorAllocator | None = None  # None: all matrices have the rank

  @property
  def shards(self) -> tuple[str, ...]:
    """Axes over which any leaf is sharded, sorted."""
    return shards_of(self.leaves)

  @property
  def exchanges(self) -> list[list[int]]:
    """The indices of the leaves of each exchange; the first may be empty."""
    return exchanges_of(self.leaves)

  @property
  def last_early(self) -> int:
    """Index of the last exchange that does not wait for stage 0."""
    return max([x.exchange for x in self.leaves if not x.is_late], default=0)

  @property
  def sampled(self) -> list[int]:
    """Indices of the leaves whose matrices the budget sees."""
    return [i for i, leaf in enumerate(self.leaves) if is_sampled(leaf)]

  @property
  def is_measured(self) -> bool:
    """Whether the errors of all compressed leaves are known."""
    return all(x.method.measures for x in self.leaves if x.is_compressed)

  @property
  def feeds_back(self) -> bool:
    """Whether any leaf has a residual."""
    return any(leaf.has_residual for leaf in self.leaves)

  def by_leaf(self, values: jax.Array | None) -> list[jax.Array | None]:
    """Splits an array over the sampled matrices, [K, ...], by leaf."""
    parts: list[Any] = [None] * len(self.leaves)
    if values is not None:
      own = split_by_leaf([self.leaves[i] for i in self.sampled], values)
      for i, part in zip(self.sampled, own, strict=True):
        parts[i] = part
    return parts


class Choice(NamedTuple):
  """What budget and allocation chose for one step."""

  budget: Any  # their states
  allocation: Any
  levels: tuple[jax.Array, jax.Array]  # of this stage, and of stage 0; int32 []
  ranks: list[jax.Array | None]  # int32 [k] of each leaf with matrices
  sample: Any


@dataclasses.dataclass(frozen=True)
class Reducer:
  """Local gradients to their mean: `init` and `update` of a transformation.

  Attributes:
    axes: Those averaged over, bound where `update` runs, and of the stages.
    plan_for: From leaves without methods to the plan.
    matrix_view: Returns the view of a leaf.
    placement: Returns the placement of a leaf.
    code: Encoding of values on the wire; None is float32.
    min_ratio: For a warning alone.
    seed: Seed of the first Q, and of all random draws in the steps.
    check_every: Steps from one comparison of the replicas to the next.
  """

  axes: Axes
  plan_for: Callable[[tuple[Leaf, ...]], Plan]
  matrix_view: ViewFn = layer_matrix
  placement: Callable = own_placement
  code: Code | None = None
  min_ratio: float = 0.0
  seed: int = 714
  check_every: int = agreement.CHECK_EVERY

  def init(self, params: optax.Params) -> Any:
    """Returns the state before the first step."""
    if is_placeholder(params):
      return NOT_LIKE_PARAMS
    plan = self._plan(params)
    budget, by_error = plan.budget, plan.allocator is not None
    replicas = None
    if order.is_bound(self.axes.replicas):
      replicas = collectives.num_devices(self.axes.replicas)
    found = review.Reviewed(
      self.axes, plan.leaves, budget, self.code, by_error, replicas
    )
    review.at_init(found, self.min_ratio)
    self._require_all_bound(plan)
    states = rounds.first_states(plan.leaves, jax.random.key(self.seed))
    own, shares = budget.init(), ()
    if plan.allocator:
      shares = plan.allocator.init(budget.first_level)
    # A new array for every field: an array used twice cannot be donated.
    report = jax.tree.map(jnp.copy, _report(plan, own, shares))
    zero = functools.partial(jnp.zeros, (), jnp.float32)
    count, rank, *counters = (jnp.zeros((), jnp.int32) for _ in range(5))
    dense_bytes = 4.0 * sum(leaf.size for leaf in plan.leaves)
    errors = (zero(), zero()) if plan.is_measured else (None, None)
    stats = Stats(
      rank, zero(), zero(), jnp.float32(dense_bytes), *errors,
      report.entropy, report.predicted_error,
      jnp.copy(count) if plan.feeds_back else None,
    )  # fmt: skip

    def zeros(leaf: Leaf, kind: Any, is_kept: bool) -> jax.Array | None:
      return jnp.zeros(leaf.matrices.count, kind) if is_kept else None

    ranks = [zeros(x, jnp.int32, x.is_compressed) for x in plan.leaves]
    errors = [
      zeros(x, jnp.float32, x.is_compressed and x.method.measures)
      for x in plan.leaves
    ]
    left_out = jnp.array(len(masked_paths(params)), jnp.int32)
    state = ReducerState(
      count,
      # NNX updates a variable as a whole, so its array's state is not inside.
      _as_tree(
        without_variables(params),
        _with_stats(plan, states, ranks, errors, report),
      ),
      own,
      shares,
      stats,
      Checks(*counters, left_out),
      growth.init() if plan.feeds_back else (),
    )
    # Without shards `init` may run where no axis is bound.
    stage = names(self.axes.stage) if plan.shards else ()
    return stacked(state, self._parts(plan), stage, plan.shards)

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
    plan, gradients, params, state = self._open(updates, state, params)
    # Collectives over shards in the backward pass come first.
    early = [g for g, x in zip(gradients, plan.leaves, strict=True)
             if not x.is_late]  # fmt: skip
    channel = Channel(self.axes.replicas, early if plan.shards else ())
    verdict = agreement.compare_gradients(
      [gradients[i] for i in plan.exchanges[0]],
      state.checks.identical_steps,
      channel,
    )
    choice = self._choose(plan, state, gradients, channel)
    late = functools.partial(self._late, plan, updates, late_updates)
    exchanged = self._exchange(plan, state, choice, gradients, late, channel)
    found, is_finite, norms = exchanged
    applied = [one.update for one in found] if params is None else params
    ok, checks = self._agree(plan, state, verdict, is_finite, applied, channel)
    found = self._keep(state, found, ok)
    ok &= is_finite
    if norms is not None and isinstance(state.growth, Growth):
      due = growth.is_due(state.count)
      state = state._replace(growth=growth.update(state.growth, norms, due))
    state = self._account(plan, state, choice, found, ok, channel.num_bytes)
    state = state._replace(checks=checks)
    averaged = _as_tree(updates, [one.update for one in found])
    parts, stage = self._parts(plan), names(self.axes.stage)
    return averaged, stacked(state, parts, stage, plan.shards)

  def _plan(self, tree: Any) -> Plan:
    return self.plan_for(
      leaves_in(tree, self.matrix_view, self.placement, self.axes.shards)
    )

  def _require_all_bound(self, plan: Plan) -> None:
    """Raises if the compiler has axes, and single entries are read."""
    reads = [x.is_compressed and not x.cap for x in plan.leaves]
    if plan.budget.samples or self.code or any(reads):
      order.require_all_bound()

  def _parts(self, plan: Plan) -> Parts:
    return Parts(self.axes.stage is not None, bool(plan.shards))

  def _open(
    self,
    updates: optax.Updates,
    state: ReducerState,
    params: optax.Params | None,
  ) -> tuple[Plan, list[jax.Array], list[jax.Array] | None, ReducerState]:
    """Checks a step's arguments, and drops the leading axes of the state.

    Returns:
      The plan; the gradient and the parameter of each leaf; the state.
    """
    axes = self.axes
    collectives.num_devices(axes.replicas)  # raises if it is not bound
    cpu_backend.prepare()
    leaf_checks.require_state(state, ReducerState)
    plan = self._plan(updates)  # raises if a leaf is not real floating
    self._require_all_bound(plan)
    parts, gradients = self._parts(plan), jax.tree.leaves(updates)
    leaf_checks.require_same_leaves(updates, state.leaves)
    own_params = leaf_checks.params_of(params, updates, plan.leaves)
    if own_params is not None:
      leaf_checks.warn_of_narrow_gradients(gradients, plan.leaves, own_params)
    leaf_checks.require_local(gradients, plan.leaves, axes.replicas, axes)
    if any(parts):
      require_stages(gradients, plan.leaves, own_params, axes.stage)
    opened = unstacked(state, parts)
    for leaf, own in zip(plan.leaves, _states(state), strict=True):
      leaf_checks.require_shapes(leaf, own)
    return plan, gradients, own_params, opened

  def _choose(
    self,
    plan: Plan,
    state: ReducerState,
    gradients: Sequence[jax.Array],
    channel: Channel,
  ) -> Choice:
    """Closes a window if it ends, samples, and chooses the ranks."""
    count, budget = state.count, plan.budget
    kept: tuple[Any, Any] = (state.budget, state.allocation)
    if budget.window:
      kept = channel.cond(
        (count > 0) & (count % budget.window == 0),
        lambda kept: self._close_window(plan, kept, count, channel),
        lambda kept: kept,
        kept,
      )
    stacks = [
      plan.leaves[i].to_view(gradients[i]).reshape(plan.leaves[i].view)
      for i in plan.sampled
    ]
    sample = budget.sample(stacks, count, channel)
    levels = budget.levels(kept[0], count)
    shares = None
    if plan.allocator:
      shares = plan.allocator.ranks(kept[1], levels[0])
    ranks = [
      _uniform(leaf, budget.ladder, levels[leaf.is_late])
      if own is None
      else own
      for leaf, own in zip(plan.leaves, plan.by_leaf(shares), strict=True)
    ]
    return Choice(*kept, levels, ranks, sample)

  def _close_window(
    self,
    plan: Plan,
    kept: tuple[Any, Any],
    count: jax.Array,
    channel: Channel,
  ) -> tuple[Any, Any]:
    """Returns budget and allocation of the next window, as the first decides.

    All replicas compute them from equal inputs. But ranks are discrete, and a
    replica that rounds differently by one ulp might take another branch of the
    program, with collectives of another size.
    """
    budget, shares = kept
    budget, ranks = plan.budget.close_window(budget, count), None
    if plan.allocator:
      level, _ = plan.budget.levels(budget, count)
      variance = plan.budget.variance(budget)
      shares = plan.allocator.share_out(shares, level, variance)
      ranks = shares.ranks
    decision, stage = plan.budget.decision(budget), self.axes.stage
    if stage and collectives.num_devices(stage, "stage_axis") > 1:
      channel.count(plan.budget.stage_bytes)
    channel.follow(decision)  # stage 0's rank is sent over the stages
    decision, ranks = channel.from_first((decision, ranks))
    budget = plan.budget.decided(budget, decision)
    if plan.allocator:
      level, _ = plan.budget.levels(budget, count)
      level += jnp.zeros_like(kept[1].level)  # by type it varies over shards
      shares = shares._replace(level=level, ranks=ranks)
    return budget, shares

  def _exchange(
    self,
    plan: Plan,
    state: ReducerState,
    choice: Choice,
    gradients: list[jax.Array],
    late: Callable[..., tuple[list[jax.Array], bool]],
    channel: Channel,
  ) -> Exchanged:
    """Exchanges the stage's own leaves, then the others; with feedback."""
    states, outcomes = _states(state), dict[int, Outcome]()
    due = growth.is_due(state.count)
    key = jax.random.fold_in(jax.random.key(self.seed), state.count)
    all_finite, norms = [], []
    for e, members in enumerate(plan.exchanges):
      found = rounds.exchange(
        [
          _arranged(plan.leaves[i], gradients[i], states[i], choice.ranks[i])
          for i in members
        ],
        channel,
        plan.budget.ladder,
        choice.levels[e > plan.last_early],
        jax.random.fold_in(key, e),
        self.code,
        due,
      )
      for i, own in zip(members, found.outcomes, strict=True):
        outcomes[i] = own._replace(
          update=plan.leaves[i].from_view(own.update),
          residual=jax.tree.map(plan.leaves[i].from_view, own.residual),
        )
      all_finite.append(found.is_finite)
      norms += [] if found.norms is None else [found.norms]
      if e == plan.last_early:
        is_finite = channel.ordered(found.is_finite)
        gradients, is_late = late(gradients, is_finite)
        if is_late:  # they wait for this exchange, and the next one for sums
          shared = [i for i, x in enumerate(plan.leaves) if x.is_shared]
          channel.follow([gradients[i] for i in shared])
    return Exchanged(
      [outcomes[i] for i in range(len(plan.leaves))],
      jnp.all(jnp.stack(all_finite)),
      sum(norms) if norms else None,
    )

  def _late(
    self,
    plan: Plan,
    updates: optax.Updates,
    late_updates: LateUpdates | None,
    gradients: list[jax.Array],
    first_is_finite: jax.Array,
  ) -> tuple[list[jax.Array], bool]:
    """Returns complete gradients, and whether some were completed now."""
    axes, is_late = self.axes, late_updates is not None
    is_late |= any(x.is_late for x in plan.leaves) and axes.stage is not None
    if is_late:
      gradients = late_gradients(
        updates, late_updates, first_is_finite, plan.leaves, axes
      )
    return gradients, is_late

  def _agree(
    self,
    plan: Plan,
    state: ReducerState,
    verdict: jax.Array,
    is_finite: jax.Array,
    applied: Any,
    channel: Channel,
  ) -> tuple[jax.Array, Checks]:
    """Lets replicas and stages agree on whether the step counts.

    Returns:
      Whether it does, bool []; the counters.
    """
    # Non-finite steps are compared, too: if one replica alone has a non-finite
    # parameter, all replicas skip every step until this detects it.
    is_due = (state.count % self.check_every == 0) | ~is_finite
    diverged = agreement.have_diverged(applied, is_due, state.count, channel)
    ok, identical, has_diverged, stage_bytes = agreement.agree(
      is_finite, verdict, diverged, self.axes.stage, plan.shards
    )
    channel.count(stage_bytes)
    checks = Checks(
      state.checks.skipped_steps + (~ok).astype(jnp.int32),
      agreement.count_identical(state.checks.identical_steps, identical),
      state.checks.diverged_steps + has_diverged,
      state.checks.left_out,
    )
    return ok, checks

  def _keep(
    self, state: ReducerState, found: Sequence[Outcome], ok: jax.Array
  ) -> list[Outcome]:
    """Returns the outcomes; zeros and the old states if the step is not ok."""

    def kept(new: Outcome, old: LeafState) -> Outcome:
      before = Outcome(
        jnp.zeros_like(new.update), old.residual, old.factor_q, new.energies
      )
      return jax.tree.map(lambda n, o: jnp.where(ok, n, o), new, before)

    return list(map(kept, found, _states(state)))

  def _account(
    self,
    plan: Plan,
    state: ReducerState,
    choice: Choice,
    found: Sequence[Outcome],
    ok: jax.Array,
    sent: jax.Array,
  ) -> ReducerState:
    """Accounts for the step: the next state, with the numbers to report."""
    budget = plan.budget.observe(choice.budget, choice.sample, ok)
    shares = choice.allocation
    if plan.allocator:
      # Added up over steps, whose units differ.
      own = _joined([found[i] for i in plan.sampled])
      square = jnp.square(own.unit)
      measured = Measured(own.lost * square, own.total * square)
      shares = plan.allocator.observe(shares, choice.levels[0], measured, ok)
    report = _report(plan, budget, shares)
    stats, is_measured = _next_stats(state, sent, found, ok)
    rank = jnp.array(plan.budget.ladder, jnp.int32)[choice.levels[0]]
    rank *= any(leaf.cap for leaf in plan.leaves)  # 0 if all leaves are dense
    states, errors = [], []
    for one, old in zip(found, _states(state), strict=True):
      states.append(LeafState(one.factor_q, one.residual))
      error = old.stats and old.stats.error  # None if not measured
      if error is not None and one.energies is not None:
        new = _ratio(one.energies.lost, one.energies.total)
        error = jnp.where(is_measured, new, error)
      errors.append(error)
    leaves = _with_stats(plan, states, choice.ranks, errors, report)
    return ReducerState(
      jnp.asarray(optax.safe_increment(state.count)),
      _as_tree(state.leaves, leaves),
      budget,
      shares,
      stats._replace(
        rank=rank,
        entropy=report.entropy,
        predicted_error=report.predicted_error,
        diverging_windows=state.growth.windows
        if isinstance(state.growth, Growth)
        else None,
      ),
      state.checks,
      state.growth,
    )


def make_reducer(
  axis_name: AxisName,
  plan_for: Callable[[tuple[Leaf, ...]], Plan],
  *,
  matrix_view: ViewFn | None = None,
  stages: Stages | None = None,
  **options: Any,
) -> optax.GradientTransformationExtraArgs:
  """Builds a transformation from local gradients to their mean.

  Args:
    axis_name: As for `edgc`.
    plan_for: Gives leaves their methods, and returns the plan.
    matrix_view, stages: As for `edgc`.
    **options: Attributes of `Reducer`.
  """
  validation.require_kind("stages", stages, Stages, 'pass Stages("stage")')
  validation.require_function(
    "matrix_view", matrix_view, "a leaf's path and shape"
  )
  order.require_names("axis_name", axis_name)
  reducer = Reducer(
    Axes(axis_name, stages.axis_name if stages else None),
    plan_for,
    matrix_view or layer_matrix,
    stages.placement if stages else own_placement,
    **options,
  )
  validation.require_int("check_every", reducer.check_every, 1)
  validation.require_seed("seed", reducer.seed)
  tx = transformation(reducer.init, reducer.update)
  return tx if stages else on_mesh(tx, axis_name=axis_name)


def shards_of(leaves: Sequence[Leaf]) -> tuple[str, ...]:
  """Returns the axes over which any leaf is sharded, sorted."""
  return tuple(sorted(set().union(*[leaf.shards for leaf in leaves])))


def by_exchange(leaves: Sequence[Leaf]) -> tuple[Leaf, ...]:
  """Gives each leaf the index of its exchange.

  A stage sends its own leaves once its backward pass is done. The other leaves
  wait for stage 0, and are sent at its rank. On shards each combination of axes
  that shards leaves has an exchange: factors must not depend on what differs
  over further axes. The first one is that of most compressed entries, over all
  shards, since a budget sees it alone. What is sent dense goes with it.
  """
  own = _numbered([leaf for leaf in leaves if not leaf.is_late], 0)
  after = 1 + max(own.values(), default=0)
  index = own | _numbered([leaf for leaf in leaves if leaf.is_late], after)
  return tuple(dataclasses.replace(x, exchange=index[x.path]) for x in leaves)


def _numbered(leaves: Sequence[Leaf], start: int) -> dict[str, int]:
  """Returns the indices of the exchanges of some leaves, by path."""
  sizes: dict[tuple[str, ...], int] = {}
  for leaf in leaves:
    if leaf.is_compressed or leaf.is_encoded:
      shards = math.prod(map(collectives.num_devices, leaf.shards))
      size = leaf.size * shards if leaf.is_compressed else 0
      sizes[leaf.shards] = sizes.get(leaf.shards, 0) + size
  first = max(sizes, key=lambda axes: sizes[axes], default=())
  in_order = [first, *(axes for axes in sizes if axes != first)]

  def index(leaf: Leaf) -> int:
    has_own = leaf.is_compressed or leaf.is_encoded
    return start + (in_order.index(leaf.shards) if has_own else 0)

  return {leaf.path: index(leaf) for leaf in leaves}


def exchanges_of(leaves: Sequence[Leaf]) -> list[list[int]]:
  """Returns the indices of the leaves of each exchange."""
  last = max((leaf.exchange for leaf in leaves), default=0)
  return [
    [i for i, leaf in enumerate(leaves) if leaf.exchange == e]
    for e in range(last + 1)
  ]


def is_sampled(leaf: Leaf) -> bool:
  """Returns whether a budget sees the matrices of a leaf."""
  return leaf.exchange == 0 and leaf.is_compressed


def matrices_of(leaves: Sequence[Leaf]) -> tuple[Leaf, ...]:
  """Returns the leaf of each matrix that a budget sees: of the first exchange.

  Ordered by leaf, then along the stack.
  """
  own = filter(is_sampled, leaves)
  return tuple(leaf for leaf in own for _ in range(leaf.matrices.count))


def _arranged(
  leaf: Leaf, gradient: jax.Array, state: LeafState, ranks: Any
) -> Input:
  """Returns a leaf as it goes into an exchange, in the order of its view."""
  residual = jax.tree.map(leaf.to_view, state.residual)
  state = state._replace(residual=residual)
  return Input(leaf.arranged(), leaf.to_view(gradient), state, ranks)


def _as_tree(tree: Any, values: Sequence[Any]) -> Any:
  """Arranges one value for each leaf in a tree like `tree`."""
  structure = jax.tree.structure(tree, is_leaf=is_leaf_state)
  return jax.tree.unflatten(structure, values)


def _states(state: ReducerState) -> list[LeafState]:
  """Returns the states of all leaves in order."""
  return jax.tree.leaves(state.leaves, is_leaf=is_leaf_state)


def _uniform(
  leaf: Leaf, ladder: Sequence[int], level: jax.Array
) -> jax.Array | None:
  """Returns the columns of matrices that all have the rank; int32 [k]."""
  if not leaf.is_compressed:
    return None
  columns = np.array([leaf.columns(rank) for rank in ladder], np.int32)
  return jnp.broadcast_to(jnp.asarray(columns)[level], leaf.matrices.count)


def _with_stats(
  plan: Plan,
  states: Sequence[LeafState],
  ranks: Sequence[Any],
  errors: Sequence[Any],
  report: Report,
) -> list[LeafState]:
  """Returns the states of the leaves with their statistics."""
  columns = (
    ranks,
    errors,
    plan.by_leaf(report.entropies),
    plan.by_leaf(report.predicted_errors),
  )
  return [
    own._replace(stats=LeafStats(*values)) if leaf.is_compressed else own
    for leaf, own, *values in zip(plan.leaves, states, *columns, strict=True)
  ]


def _report(plan: Plan, budget: Any, shares: Any) -> Report:
  """Returns the diagnostics of budget and allocation."""
  report = plan.budget.report(budget)
  return plan.allocator.report(shares, report) if plan.allocator else report


def _next_stats(
  state: ReducerState,
  sent: jax.Array,
  found: Sequence[Outcome],
  is_finite: jax.Array,
) -> tuple[Stats, jax.Array]:
  """Returns the statistics of a step, and whether its errors are finite.

  Errors keep their old values if they are not.
  """
  old, error, norm = state.stats, jnp.float32(0.0), jnp.float32(0.0)
  # mean' = mean + (bytes - mean) / steps
  more = (sent - old.mean_wire_bytes) / (state.count + 1)
  stats = old._replace(
    wire_bytes=sent, mean_wire_bytes=old.mean_wire_bytes + more
  )
  if old.relative_error is None or old.residual_norm is None:
    return stats, is_finite
  if any(one.energies is not None for one in found):
    own = _joined(found)
    unit = jnp.max(own.unit)
    lost, total, residual, _ = jax.tree.map(
      lambda x: jnp.sum(x * jnp.square(own.unit / unit)), own
    )
    # |mean residual|^2 / |mean M|^2
    error, norm = _ratio(lost, total), unit * residual**0.5
  flags = [is_finite, jnp.isfinite(error), jnp.isfinite(norm)]
  is_measured = jnp.all(order.together(flags))
  stats = stats._replace(
    relative_error=jnp.where(is_measured, error, old.relative_error),
    residual_norm=jnp.where(is_measured, norm, old.residual_norm),
  )
  return stats, is_measured


def _joined(found: Sequence[Outcome]) -> Energies:
  """Returns the energies of all measured matrices, each with its unit."""
  energies = [one.energies for one in found if one.energies is not None]
  each = [x._replace(unit=jnp.full_like(x.lost, x.unit)) for x in energies]
  return jax.tree.map(lambda *xs: order.together(xs), *each)


def _ratio(part: jax.Array, whole: jax.Array) -> jax.Array:
  """Returns part / whole; 0 if both are 0."""
  return part / jnp.where(whole > 0, whole, 1.0)
