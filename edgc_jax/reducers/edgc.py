"""The gradient transformation whose rank follows the entropy: edgc."""

import dataclasses
from typing import Any

import optax

from edgc_jax import validation
from edgc_jax.adaptation.allocation import Allocator
from edgc_jax.adaptation.controller import Controller
from edgc_jax.adaptation.policy import EntropyPolicy, FixedPolicy, Policy
from edgc_jax.comm.sentinel import CHECK_EVERY
from edgc_jax.plan import link_model as links
from edgc_jax.plan.ladder import Ladder
from edgc_jax.plan.leaves import (
  PlacementFn,
  ViewFn,
  own_placement,
  trailing_matrix,
)
from edgc_jax.plan.link_model import CompressionModel, LinkModel
from edgc_jax.plan.plan import Plan, by_exchange, make_plan
from edgc_jax.reducers import arguments
from edgc_jax.reducers.base import make_reducer

ALIGNMENTS = ("slack", "none")
# How many times the rank of its rung a matrix may have.
_SPREAD = 3


def edgc(
  axis_name: str = "data",
  *,
  stage_axis: str | None = None,
  rank_max: int | None = None,
  rank_min: int | None = None,
  window: int = 1000,
  warmup_steps: int = 1000,
  max_warmup_steps: int | None = None,
  warmup_rank: int | str | None = "max",
  step_rate: float = 0.1,
  entry_rate: float = 0.25,
  estimator: str = "gaussian",
  bins: int = 1000,
  rule: str = "cqm",
  exponent: float = 2,
  rank_multiple: int = 4,
  max_rank_step: int | None = None,
  min_ratio: float = 2.0,
  granularity: str = "matrix",
  curves: str = "calibrated",
  scale_exponent: float = 1.0,
  align: str = "slack",
  link: LinkModel | None = None,
  compression: CompressionModel | None = None,
  backward_seconds: float | None = None,
  matrix_view: ViewFn | None = None,
  placement: PlacementFn | None = None,
  wire_dtype: Any = "float32",
  alternating: bool = False,
  refresh_every: int | None = None,
  seed: int = 714,
  check_every: int = CHECK_EVERY,
) -> optax.GradientTransformationExtraArgs:
  """Averages gradients through factors whose rank follows their entropy.

  Every window, the mean of sampled gradient entropies H is compared with
  that of the last window of a warm-up, H_ref, and the rank r becomes
  the one at which the model expects the same absolute error:

    T(r) = e^(exponent (H_ref - H)) T(rank_max)

  with T the energy fraction lost by rank-r approximation of a random matrix
  (`spectrum`). The exchange at a rank is that of `powersgd`; the residual is
  kept over all rank changes. The rank is chosen in the graph: one program is
  compiled, and at each step it sends the bytes of the rank in use.

  On pipeline stages (`stage_axis`) every stage has an entropy, a controller
  and a rank of its own for its own leaves. Stage 0 ends its backward pass
  last and follows the rule. Aligned by slack, stage s takes the largest rank
  whose modelled all-reduce ends no later than that of stage 0:

    T(r_s) <= T(r_0) + s backward_seconds,   or dense, if that fits

  Leaves split over all stages are exchanged at the rank of stage 0, shared
  ones dense, both in a second exchange after the first. For its gradients to
  be computed after the first, too, give `update` the function

    late_updates(after)   a tree like `updates`, with what came late in place

  where `after(x)` is x, but not before this stage's own leaves are exchanged.

  Wire: as `powersgd` at the rank in use, or dense; entropy samples add a few
  values per matrix, once in 1 / step_rate steps. Over stages: 8 bytes a step,
  and 8 a window.

  Args:
    axis_name: Axis averaged over; must be bound where `update` runs.
    stage_axis: Axis of the pipeline stages, bound by `jax.shard_map`; None if
      every device holds the whole model.
    rank_max: Largest rank, and that of the first window after warm-up. None
      is 32, or with a `link` the largest rank that is no slower than dense
      (`link.rank_ceiling`), at most 16 ranks then being spread below it.
      Ranks at which no leaf would be compressed are left out of the ladder.
    rank_min: Smallest rank; None is a quarter of rank_max, rounded down to
      `rank_multiple`.
    window: Steps between two choices of the rank.
    warmup_steps: First steps, before the rule, rounded up to whole windows,
      at least one. A tenth of the run is usual.
    max_warmup_steps: Longest that warm-up may go on while the model expects
      rank_min to lose too much; None is twice `warmup_steps`.
    warmup_rank: Rank of the warm-up, "max" for rank_max; None is dense. One
      between two ranks of the ladder is the lower, one above all the largest.
    step_rate: Share of steps whose entropy is sampled.
    entry_rate: Share of entries read in such a step.
    estimator: "gaussian" or "histogram".
    bins: Bins of the histogram.
    rule: "cqm", the model above, or "linear", the heuristic of the public
      codes: rank in proportion to the last change of entropy.
    exponent: Of e^(H_ref - H) on the squared error T; 2 keeps the absolute
      error constant.
    rank_multiple: Ranks are multiples of this.
    max_rank_step: Largest change of rank from one window to the next; None
      is 4, or the step of the ladder if that is more.
    min_ratio: Least m n / (r (m + n)) at which a matrix is compressed.
    granularity: "matrix": the rank of the rule says how many bytes a stage
      sends, and its matrices share them so that together they lose least, each
      with 2 columns at least, at most three times the rank but no more than
      the larger of 64 and twice the rank, and between half and twice of what
      it had in the window before; or "stage": all have this rank. Leaves split
      over stages keep one rank.
    curves: For "matrix", what tells how much a column removes: "calibrated",
      the model above stretched to each matrix's measured error, "energy",
      each column's measured energy, or "entropy", the model as it stands.
    scale_exponent: For "matrix", how the errors of matrices compare: each is
      divided by this power of the root mean square of its entries. 0 makes
      the sum of absolute errors least, 2 that of relative ones.
    align: "slack", or "none": each stage follows its own entropy alone.
    link: Time of an all-reduce over the replicas, measured (`measure_link`)
      or given by hand; slack needs it.
    compression: Time of computing an exchange (`measure_compression`); None
      is no time.
    backward_seconds: Time of one microbatch's backward pass on a stage
      (`measure_backward`); slack needs it.
    matrix_view: From a leaf's path and shape to (count, rows, cols), or None
      for dense; by default `edgc_jax.trailing_matrix`.
    placement: From a leaf's path and shape to "own" (layers of one stage, the
      default), "split" (a tensor split over all stages, such as rows of the
      embedding) or "shared" (the same on all stages; their gradients are
      summed, if JAX has not done that).
    wire_dtype: As for `powersgd`.
    alternating: As for `powersgd`: one factor a step.
    refresh_every: As for `powersgd`.
    seed: Seed of the first factors.
    check_every: Steps from one comparison of the replicas to the next: of
      parameters, or of updates if `update` is not given parameters, up to
      rounding. 40 bytes; `metrics` counts those that found replicas apart.

  Returns:
    A gradient transformation, from local gradients to their mean. A step in
    which any replica or stage has a non-finite gradient returns zeros and
    leaves residual and Q as they were.

  Raises:
    TypeError: if an argument that decides shapes is not a Python number.
    ValueError: if an argument is out of range, or slack lacks its times.

  Warns:
    RuntimeWarning: if on this link dense is faster at every rank, and used.

  References:
    EDGC, arXiv:2511.10333. Differences: the entropy is that of the local
    gradient all through training and is differential; g is the square root
    of T from the Marchenko-Pastur law instead of a Monte Carlo estimate; the
    reference stays fixed; ranks of stages are rounded down, so that none
    overshoots stage 0, which rounding up does. See docs/algorithm.md.

  >>> tx = optax.chain(edgc(axis_name="data"), optax.adamw(3e-4))
  """
  arguments.require_models(link, compression)
  compression = compression or CompressionModel(0.0, 0.0)
  ladder = Ladder(rank_max, rank_min, rank_multiple, link, compression)
  if max_warmup_steps is None:
    max_warmup_steps = 2 * warmup_steps
  arguments.require_windows(window, warmup_steps, max_warmup_steps, step_rate)
  arguments.require_sampling(entry_rate, estimator, bins)
  arguments.require_warmup_rank(warmup_rank)
  if max_rank_step is not None:
    validation.require_int("max_rank_step", max_rank_step, rank_multiple)
  arguments.require_rule(rule, exponent)
  arguments.require_allocation(granularity, curves, scale_exponent)
  validation.require_one_of("align", align, ALIGNMENTS)
  arguments.require_ratio(min_ratio)
  arguments.require_placement(placement, stage_axis)
  travel = arguments.travel(wire_dtype, alternating, refresh_every)
  is_aligned = stage_axis is not None and align == "slack"
  if is_aligned:
    arguments.require_times(link, backward_seconds)
  view, placed = matrix_view or trailing_matrix, placement or own_placement

  def plan_for(tree: optax.Params) -> Plan:
    whole = make_plan(tree, (0,), min_ratio, view, placed, **travel)
    ranks = ladder.ranks(by_exchange(whole)[0])
    spread = _SPREAD if granularity == "matrix" else 1
    whole = dataclasses.replace(whole, ladder=ranks, spread=spread)
    return whole.without_idle_ranks()

  def policy_for(plan: Plan) -> Policy:
    ranks = [rank for rank in plan.ladder if rank]
    if not ranks:
      return FixedPolicy({0: 0})
    seconds = None
    if is_aligned and plan.compressible:
      seconds = links.exchange_seconds(plan, link, compression)
    controller = Controller.for_plan(
      plan,
      window=window,
      warmup_steps=warmup_steps,
      max_warmup_steps=max_warmup_steps,
      warmup_rung=arguments.warmup_rung(ranks, warmup_rank),
      rule=rule,
      exponent=float(exponent),
      max_rank_step=arguments.rank_step(ranks, max_rank_step),
      stage_axis=stage_axis,
      rung_seconds=seconds,
      backward_seconds=backward_seconds or 0.0,
    )
    allocator = None
    if granularity == "matrix" and plan.compressible:
      allocator = Allocator(plan, curves, float(scale_exponent))
    return EntropyPolicy(
      plan,
      controller,
      allocator,
      axis_name,
      period=round(1 / step_rate),
      entry_rate=entry_rate,
      estimator=estimator,
      bins=bins,
    )

  return make_reducer(
    axis_name,
    plan_for,
    policy_for,
    seed,
    stage_axis,
    check_every=check_every,
  )
