"""The gradient transformation whose rank follows the entropy: edgc."""

import dataclasses
from typing import Any

import optax

from edgc_jax import validation
from edgc_jax.adaptation import windows
from edgc_jax.adaptation.allocation import Allocation, Allocator
from edgc_jax.adaptation.controller import Controller
from edgc_jax.adaptation.entropy import Sampling
from edgc_jax.adaptation.policy import EntropyPolicy, FixedPolicy, Policy
from edgc_jax.adaptation.rank_rule import RankRule
from edgc_jax.comm.agreement import CHECK_EVERY
from edgc_jax.comm.codes import code_of
from edgc_jax.pipeline.stages import Stages
from edgc_jax.plan import link_model
from edgc_jax.plan.ladder import Ladder
from edgc_jax.plan.leaves import ViewFn, own_placement, trailing_matrix
from edgc_jax.plan.link_model import CompressionModel, LinkModel
from edgc_jax.plan.plan import Plan, by_exchange, make_plan, require_ratio
from edgc_jax.reducers.base import make_reducer


def edgc(
  axis_name: str = "data",
  *,
  rank_max: int | None = None,
  rank_min: int | None = None,
  total_steps: int | None = None,
  window: int | None = None,
  warmup_steps: int | None = None,
  min_ratio: float = 2.0,
  wire_dtype: Any = "float32",
  matrix_view: ViewFn | None = None,
  link: LinkModel | None = None,
  compression: CompressionModel | None = None,
  sampling: Sampling | None = None,
  rule: RankRule = RankRule(),
  allocation: Allocation = Allocation(),
  stages: Stages | None = None,
  seed: int = 714,
  check_every: int = CHECK_EVERY,
) -> optax.GradientTransformationExtraArgs:
  """Averages gradients through factors whose rank follows their entropy.

  Every window, the mean of sampled gradient entropies H is compared with
  H_ref, the mean of the last window of a warm-up. The rank r becomes the one
  at which the model expects the same absolute error:

    T(r) = e^(exponent (H_ref - H)) T(rank_max)

  with T the energy fraction lost by rank-r approximation of a random matrix
  (`adaptation.error_model`). The exchange at a rank is the one of `powersgd`;
  the residual is kept over all rank changes. The rank is chosen in the graph:
  one program is compiled, and at each step it sends the bytes of the rank in
  use.

  On pipeline stages (`stages`) every stage has an entropy, a controller and a
  rank of its own for its own leaves. Stage 0 ends its backward pass last and
  follows the rule. Aligned by slack, stage s takes the largest rank whose
  modelled all-reduce ends no later than the one of stage 0:

    T(r_s) <= T(r_0) + s backward_seconds,   or dense, if that fits

  Leaves split over all stages are exchanged at the rank of stage 0, shared
  ones dense, both in a second exchange after the first. For their gradients to
  be computed after the first, too, give `update` the function

    late_updates(after)   a tree like `updates`, with the late ones in place

  where `after(x)` is x, but not before this stage's own leaves are exchanged.

  Wire: as `powersgd` at the rank in use, or dense; entropy samples add a few
  values per matrix, once in 1 / step_rate steps. Over stages: 12 bytes a step,
  and 8 a window.

  Args:
    axis_name: Axis averaged over; must be bound where `update` runs.
    rank_max: Largest rank, and the rank of the first window after warm-up.
      None is 32, or with a `link` the largest rank that is no slower than dense
      (`plan.ladder.rank_ceiling`), at most 16 ranks then being spread below it.
      Ranks at which no leaf would be compressed are left out of the ladder.
    rank_min: Smallest rank; None is a quarter of rank_max, rounded down to
      `rule.rank_multiple`.
    total_steps: Steps of the run, if known: sets the window, the warm-up and
      the sampling in proportion, where these are not given.
    window: Steps between two choices of the rank. None is a fortieth of
      `total_steps`, at most 1000; 1000 if that is not given.
    warmup_steps: First steps, before the rule, rounded up to whole windows,
      at least one. None is a tenth of `total_steps`, or 1000.
    min_ratio: Least m n / (r (m + n)) at which a matrix is compressed.
    wire_dtype: As for `powersgd`.
    matrix_view: From a leaf's path and shape to (count, rows, cols), or None
      for dense; by default `edgc_jax.trailing_matrix`.
    link: Time of an all-reduce over the replicas, measured (`measure_link`)
      or given by hand; slack needs it.
    compression: Time of computing an exchange (`measure_compression`); None
      is no time.
    sampling: Steps and entries whose entropy is sampled. None is `Sampling()`,
      or `Sampling.for_window` if `total_steps` is given.
    rule: How the rank follows the entropy.
    allocation: How matrices share the bytes that a rank allows.
    stages: Pipeline stages; None if every device holds the whole model.
    seed: Seed of the first factors.
    check_every: Steps from one comparison of the replicas to the next: of
      parameters, or of updates if `update` is not given parameters, up to
      rounding. 40 bytes; `metrics` counts the comparisons that found replicas
      apart.

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
    EDGC, arXiv:2511.10333. Differences: the entropy is the entropy of the local
    gradient all through training and is differential; g is the square root
    of T from the Marchenko-Pastur law instead of a Monte Carlo estimate; the
    reference stays fixed; ranks of stages are rounded down, so that none ends
    after stage 0, which rounding up does. See docs/algorithm.md.

  >>> tx = optax.chain(edgc(total_steps=400), optax.adamw(3e-4))
  """
  link_model.require_models(link, compression)
  compression = compression or CompressionModel(0.0, 0.0)
  ladder = Ladder(rank_max, rank_min, rule.rank_multiple, link, compression)
  window, warmup_steps = windows.choose_windows(
    total_steps, window, warmup_steps
  )
  if sampling is None:
    sampling = Sampling()
    if total_steps is not None:
      sampling = Sampling.for_window(window)
  windows.require_windows(window, warmup_steps, rule, sampling)
  require_ratio(min_ratio)
  code = code_of(wire_dtype)
  is_aligned = stages is not None and stages.align == "slack"
  if is_aligned:
    _require_times(link, stages)
  view = matrix_view or trailing_matrix
  placement = stages.placement if stages else own_placement
  stage_axis = stages.axis_name if stages else None

  def plan_for(tree: optax.Params) -> Plan:
    whole = make_plan(tree, (0,), min_ratio, view, placement, code=code)
    ranks = ladder.given or ladder.ranks_on_link(by_exchange(whole)[0])
    whole = dataclasses.replace(whole, ladder=ranks, spread=allocation.spread)
    return whole.without_idle_ranks()

  def policy_for(plan: Plan) -> Policy:
    if not any(plan.ladder):
      return FixedPolicy({0: 0})
    seconds = None
    if is_aligned and plan.compressible:
      seconds = link_model.exchange_seconds(plan, link, compression)
    controller = Controller.for_plan(
      plan,
      window=window,
      warmup_steps=warmup_steps,
      rule=rule,
      stage_axis=stage_axis,
      rung_seconds=seconds,
      backward_seconds=stages.backward_seconds if is_aligned else 0.0,
    )
    allocator = None
    if allocation.granularity == "matrix" and plan.compressible:
      allocator = Allocator(plan, allocation)
    return EntropyPolicy(plan, controller, allocator, axis_name, sampling)

  return make_reducer(
    axis_name, plan_for, policy_for, seed, stage_axis, check_every=check_every
  )


def _require_times(link: LinkModel | None, stages: Stages) -> None:
  """Raises unless there are times to align stages by."""
  for name, value, measure in (
    ("link", link, "measure_link"),
    ("backward_seconds", stages.backward_seconds, "measure_backward"),
  ):
    validation.require(
      value is not None,
      name,
      value,
      "given if stages are aligned by their slack",
      f"measure it with edgc_jax.{measure}, or pass Stages(align='none')",
    )
