"""Defines `edgc`, the reducer whose rank follows the gradients' entropy."""

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
from edgc_jax.comm.dataflow import AxisName, FastAxis
from edgc_jax.pipeline.stages import Stages
from edgc_jax.plan import link_model
from edgc_jax.plan.ladder import Ladder, require_ratio
from edgc_jax.plan.leaves import ViewFn
from edgc_jax.plan.link_model import CompressionModel, LinkModel
from edgc_jax.plan.plan import Plan, by_exchange, make_plan
from edgc_jax.reducers.base import make_reducer


def edgc(
  axis_name: AxisName = "data",
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
  fast_axis: AxisName | FastAxis | None = None,
  seed: int = 714,
  check_every: int = CHECK_EVERY,
) -> optax.GradientTransformationExtraArgs:
  """Averages gradients through factors whose rank follows their entropy.

  At the end of every window, the mean H of the sampled gradient entropies is
  compared with H_ref, the mean of the last window of the warm-up. The next rank
  r is the rank at which the model expects the same absolute error as then:

    T(r) = e^(exponent (H_ref - H)) T(rank_max)

  with T the share of energy that the best approximation of rank r loses of a
  random matrix (`adaptation.error_model`). The exchange at a rank is the
  exchange of `powersgd`; residuals are kept over all changes of the rank. The
  rank is chosen in the graph: one program is compiled, and at each step it
  sends only the bytes of the rank in use.

  On pipeline stages (`stages`) every stage has its own entropy, controller and
  rank for its own leaves. Stage 0 ends its backward pass last and follows the
  rule. Aligned by slack, stage s takes the largest rank whose modelled
  all-reduce, which takes t(r_s) seconds, ends no later than stage 0's:

    t(r_s) <= t(r_0) + s backward_seconds,   or dense, if that fits

  A second exchange sends leaves that are split over the stages, at the rank of
  stage 0, and shared leaves, dense. To compute their gradients after the first
  exchange, too, pass `update` a function

    late_updates(after)   returns a tree like `updates`, completed

  in which `after(x)` returns x with a data dependency on the exchange of this
  stage's own leaves.

  Wire: as `powersgd` at the rank in use, or dense. Entropy samples add a few
  values per matrix, once in 1 / step_rate steps. Over stages: 12 bytes per
  step, and 8 per window.

  Args:
    axis_name: Axis averaged over, or a tuple of axes; must be bound where
      `update` runs.
    rank_max: Largest rank, and the rank of the first window after warm-up.
      None is 32, or with a `link` the largest rank that is no slower than dense
      (`plan.ladder.rank_ceiling`); the ladder then has at most 16 ranks. It
      leaves out ranks at which no leaf would be compressed.
    rank_min: Smallest rank; None is a quarter of rank_max, rounded down to a
      multiple of `rule.rank_multiple`.
    total_steps: Steps of the run, if known. Window, warm-up and sampling follow
      from it, unless they are given.
    window: Steps between two choices of the rank. None is a fortieth of
      `total_steps`, at most 1000; 1000 if that is not given.
    warmup_steps: Steps before the rule applies, rounded up to whole windows,
      at least one. None is a tenth of `total_steps`, or 1000.
    min_ratio: Least m n / (r (m + n)) at which a matrix is compressed.
    wire_dtype: As for `powersgd`.
    matrix_view: Maps a leaf's path and shape to (count, rows, cols), or to None
      for dense; by default `edgc_jax.layer_matrix`.
    link: Time of an all-reduce over the replicas, measured (`measure_link`)
      or given by hand; needed for alignment by slack.
    compression: Time to compute an exchange (`measure_compression`); None
      counts no time.
    sampling: Steps and entries whose entropy is sampled. None is `Sampling()`,
      or `Sampling.for_window` if `total_steps` is given.
    rule: How the rank follows the entropy.
    allocation: How matrices share the bytes that a rank allows.
    stages: Pipeline stages; None if every device holds the whole model.
    fast_axis: Axis, or axes, over which gradients are averaged before, dense,
      unless JAX's types show that they are equal along it already; for batches
      that are split over the fast links of a host, too. In their own dtype, or
      in bfloat16 with `FastAxis(axis, "bfloat16")`.
    seed: Seed of the first factors.
    check_every: Steps between two comparisons of the replicas: of their
      parameters, or of their updates if `update` is not given parameters, up to
      rounding. 40 bytes for up to 32 leaves; `metrics` counts the comparisons
      that found diverged replicas.

  Returns:
    A gradient transformation, from local gradients to their mean. A step in
    which any replica or stage has a non-finite gradient returns zeros and
    leaves residuals and Q unchanged.

  Raises:
    TypeError: if an argument that decides shapes is not a Python number.
    ValueError: if an argument is out of range, or the times are missing that
      alignment by slack needs.

  Warns:
    RuntimeWarning: if dense is no slower than any rank on this link; gradients
      are then sent dense.

  References:
    EDGC, arXiv:2511.10333. Departures: the entropy is differential, and always
    of the local gradient; g is the square root of T from the Marchenko-Pastur
    law instead of a Monte Carlo estimate; the reference stays fixed; ranks of
    stages are rounded down, so that no stage ends after stage 0 (rounding up
    lets them). See docs/algorithm.md.

  >>> tx = optax.chain(edgc(total_steps=400), optax.adamw(3e-4))
  """
  for name, value, kind, remedy in (
    ("rule", rule, RankRule, 'pass RankRule(name="linear")'),
    ("allocation", allocation, Allocation, "pass Allocation()"),
  ):
    validation.require_kind(name, value, kind, remedy, optional=False)
  for name, value, kind, remedy in (
    ("sampling", sampling, Sampling, "pass Sampling(step_rate=0.1)"),
    ("stages", stages, Stages, 'pass Stages("stage")'),
    ("link", link, LinkModel, "create one, or measure it"),
    ("compression", compression, CompressionModel, "create one, or measure it"),
  ):
    validation.require_kind(name, value, kind, remedy)
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

  def plan_for(tree: optax.Params, **how: Any) -> Plan:
    whole = make_plan(tree, (0,), min_ratio, code=code, **how)
    ranks = ladder.given or ladder.ranks_on_link(by_exchange(whole)[0])
    whole = dataclasses.replace(whole, ladder=ranks, spread=allocation.spread)
    whole = whole.without_idle_ranks()
    # Only a dense warm-up, or the slack of a stage, leads to dense.
    never_dense = any(whole.ladder) and rule.warmup_rank and not is_aligned
    return dataclasses.replace(whole, first_rung=1 if never_dense else 0)

  def policy_for(plan: Plan, shards: tuple[str, ...]) -> Policy:
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
      stage_axis=stages.axis_name if stages else None,
      rung_seconds=seconds,
      backward_seconds=stages.backward_seconds if is_aligned else 0.0,
      shards=shards,
    )
    allocator = None
    if plan.spread > 1 and plan.compressible:
      allocator = Allocator(plan, allocation)
    return EntropyPolicy(plan, controller, allocator, axis_name, sampling)

  return make_reducer(
    axis_name,
    plan_for,
    policy_for,
    seed=seed,
    matrix_view=matrix_view,
    stages=stages,
    fast_axis=fast_axis,
    check_every=check_every,
  )


def _require_times(link: LinkModel | None, stages: Stages) -> None:
  """Raises unless the times are given that alignment by slack needs."""
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
