"""Defines `edgc`, the reducer whose rank follows the gradients' entropy."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import optax

from edgc_jax import validation
from edgc_jax.budget import windows
from edgc_jax.budget.allocation import (
  BY_ERROR,
  ErrorAllocation,
  allocation_of,
  most_columns,
)
from edgc_jax.budget.entropy import Sampling
from edgc_jax.budget.entropy_budget import EntropyBudget
from edgc_jax.budget.fixed_budget import FixedBudget
from edgc_jax.budget.ladder import Ladder, exchange_seconds
from edgc_jax.budget.rules import Rule, cqm
from edgc_jax.leaves.leaf import Leaf
from edgc_jax.leaves.views import ViewFn
from edgc_jax.methods.low_rank import (
  allocator_for,
  with_factors,
)
from edgc_jax.reducer import rounds
from edgc_jax.reducer.reducer import (
  Plan,
  make_reducer,
  matrices_of,
  shards_of,
)
from edgc_jax.stages.stages import Stages
from edgc_jax.wire.agreement import CHECK_EVERY
from edgc_jax.wire.codes import code_of
from edgc_jax.wire.link_model import CompressionModel, LinkModel
from edgc_jax.wire.order import AxisName

_MAX_RANK_STEP = 4  # default, from one window to the next


def edgc(
  axis_name: AxisName = "data",
  *,
  rank_max: int | None = None,
  rank_min: int | None = None,
  total_steps: int | None = None,
  window: int | None = None,
  warmup_steps: int | None = None,
  rule: Rule = cqm,
  rank_multiple: int = 4,
  max_rank_step: int | None = None,
  warmup_rank: int | str | None = "max",
  max_warmup_steps: int | None = None,
  sampling: Sampling | None = None,
  allocation: str | ErrorAllocation = BY_ERROR,
  min_ratio: float = 2.0,
  wire_dtype: Any = "int4",
  matrix_view: ViewFn | None = None,
  link: LinkModel | None = None,
  compression: CompressionModel | None = None,
  stages: Stages | None = None,
  seed: int = 714,
  check_every: int = CHECK_EVERY,
) -> optax.GradientTransformationExtraArgs:
  """All-reduces gradients as low-rank factors; the rank follows entropy.

  At the end of every window, the mean H of the sampled gradient entropies is
  compared with H_ref, the mean of the last window of the warm-up. The next rank
  r is the rank at which the model expects the same absolute error as then:

    T(r) = e^(exponent (H_ref - H)) T(rank_max)

  with T the share of energy that the best approximation of rank r loses of a
  random matrix (`budget.error_model`). The exchange at a rank is the
  exchange of `powersgd`; residuals are kept over all changes of the rank. The
  rank is chosen in the graph: one program is compiled, and at each step it
  sends only the bytes of the rank in use.

  On pipeline stages (`stages`) every stage has its own entropy, budget and
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
  values per matrix, once in 1 / step_rate steps. The end of a window adds 8
  bytes, 12 on stages, and 4 per matrix if matrices share the rank by
  error. Over stages: 12 bytes per step, and 4 per window, or 8 if aligned by
  slack.

  Args:
    axis_name: Axis averaged over, or a tuple of axes. `pmap`, `shard_map` or
      `vmap` bind it where `update` runs; or `jax.set_mesh` names a mesh that
      has it: then the step is in plain `jax.jit`, and `update` takes gradients
      stacked over the replicas, as `edgc_jax.value_and_grad` returns them
      (`on_mesh`).
    rank_max: Largest rank, and the rank of the first window after warm-up.
      None is 32, or with a `link` the largest rank that is no slower than dense
      (`budget.ladder.rank_ceiling`); the ladder then has at most 16 ranks. It
      leaves out ranks that no matrix can use.
    rank_min: Smallest rank; None is a quarter of rank_max, rounded down to a
      multiple of `rank_multiple`.
    total_steps: Steps of the run. Set it: window, warm-up and sampling default
      from it.
    window: Steps between two choices of the rank. None is a fortieth of
      `total_steps`, at most 1000; 1000 if that is not given.
    warmup_steps: Steps before the rule applies, rounded up to whole windows,
      at least one. None is a tenth of `total_steps`, or 1000.
    min_ratio: As for `powersgd`.
    wire_dtype: As for `powersgd`.
    matrix_view: Maps a leaf's path and shape to (count, rows, cols), or to None
      for dense; by default `edgc_jax.layer_matrix`.
    link: Time of an all-reduce over the replicas, measured (`measure_link`)
      or given by hand; needed for alignment by slack.
    compression: Time to compute an exchange (`measure_compression`); None
      counts no time.
    sampling: Steps and entries whose entropy is sampled. None is `Sampling()`,
      or `Sampling.for_window` if `total_steps` is given.
    rule: From the statistics of a window to a rank (`budget.rules`).
    rank_multiple: Ranks are multiples of this.
    max_rank_step: Largest change of rank from one window to the next; None for
      4, or the step of the ladder if that is more.
    warmup_rank: Rank of the warm-up, rounded down to a rank of the ladder;
      "max" for the largest rank, None for dense: every entry, in the code of
      `wire_dtype`.
    max_warmup_steps: Steps after which the warm-up ends even if the model
      expects the smallest rank to lose too much; None for twice the warm-up.
    allocation: How matrices share the bytes of the rank, as for `powersgd`.
    stages: Pipeline stages; None if every device holds the whole model.
    seed: Seed of the first factors, and of all random draws in the steps.
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
    lets them); factors are sent in 4 bits, and not in float32. See
    docs/method.md.

  >>> tx = optax.chain(edgc(total_steps=400), optax.adamw(3e-4))
  """
  for name, value, kind, remedy in (
    ("sampling", sampling, Sampling, "pass Sampling(step_rate=0.1)"),
    ("stages", stages, Stages, 'pass Stages("stage")'),
    ("link", link, LinkModel, "create one, or measure it"),
    ("compression", compression, CompressionModel, "create one, or measure it"),
  ):
    validation.require_kind(name, value, kind, remedy)
  validation.require(
    callable(rule), "rule", rule, "a function of a Window", "pass edgc_jax.cqm"
  )
  _require_warmup_rank(warmup_rank)
  compression = compression or CompressionModel(0.0, 0.0)
  ladder = Ladder(rank_max, rank_min, rank_multiple, link, compression)
  if max_rank_step is not None:
    validation.require_int("max_rank_step", max_rank_step, rank_multiple)
  window, warmup_steps = windows.choose_windows(
    total_steps, window, warmup_steps, sampling.period if sampling else 1
  )
  if sampling is None:
    sampling = Sampling()
    if total_steps is not None:
      sampling = Sampling.for_window(window)
  windows.require_windows(window, warmup_steps, max_warmup_steps, sampling)
  validation.require_finite("min_ratio", min_ratio, "use 2 or more")
  code, options = code_of(wire_dtype), allocation_of(allocation)
  is_aligned = stages is not None and stages.align == "slack"
  if is_aligned:
    _require_times(link, stages)

  def plan_for(leaves: tuple[Leaf, ...]) -> Plan:
    num_reduces = 2 if code is None else 3
    most = most_columns if options else None

    def bytes_at(ranks: Sequence[int], found: Sequence[Leaf]) -> np.ndarray:
      own = [leaf for leaf in found if leaf.exchange == 0]
      return rounds.count_bytes(own, ranks, code)

    # Of any rank: the ladder is not known yet.
    found = [
      dataclasses.replace(leaf, is_fixed=False)
      for leaf in with_factors(leaves, (ladder.least,), min_ratio, code)
    ]
    cap = max((leaf.cap for leaf in found if leaf.exchange == 0), default=0)
    ranks = ladder.ranks(
      cap, functools.partial(bytes_at, found=found), min_ratio, num_reduces
    )
    leaves = with_factors(leaves, ranks, min_ratio, code, most)
    if not ranks or not matrices_of(leaves):
      return Plan(leaves, FixedBudget({0: max(ranks, default=0)}))
    # Only a dense warm-up, or the slack of a stage, leads to dense.
    may_be_dense = is_aligned or warmup_rank is None
    used = (0, *ranks) if may_be_dense else ranks
    seconds = None
    if is_aligned and link is not None:
      seconds = exchange_seconds(
        used, bytes_at(used, leaves), link, compression, num_reduces
      )
    budget = EntropyBudget(
      ladder=used,
      window=window,
      warmup_steps=warmup_steps,
      max_warmup_steps=(
        2 * warmup_steps if max_warmup_steps is None else max_warmup_steps
      ),
      warmup_rank=_warmup_rank(warmup_rank, ranks),
      rule=rule,
      max_rank_step=_rank_step(max_rank_step, ranks),
      sampling=sampling,
      matrices=matrices_of(leaves),
      total_steps=total_steps or 0,
      stage_axis=stages.axis_name if stages else None,
      seconds=seconds,
      backward_seconds=(stages.backward_seconds or 0.0) if stages else 0.0,
      shards=shards_of(leaves),
    )
    return Plan(leaves, budget, allocator_for(leaves, used, options))

  return make_reducer(
    axis_name,
    plan_for,
    code=code,
    min_ratio=min_ratio,
    seed=seed,
    matrix_view=matrix_view,
    stages=stages,
    check_every=check_every,
  )


def _require_warmup_rank(rank: int | str | None) -> None:
  """Raises unless `rank` is "max", a rank or None."""
  if isinstance(rank, str):
    validation.require(
      rank == "max",
      "warmup_rank",
      rank,
      '"max", a rank or None',
      "use None for dense",
    )
  elif rank is not None:
    validation.require_int("warmup_rank", rank, 1)


def _warmup_rank(rank: int | str | None, ranks: Sequence[int]) -> int:
  """Returns the rank of the warm-up, 0 for dense.

  Args:
    rank: "max", a rank, or None for dense.
    ranks: The ladder without dense, rising.

  Raises:
    ValueError: if `rank` is below the smallest rank.
  """
  if rank is None:
    return 0
  if isinstance(rank, str):  # "max"
    return ranks[-1]
  validation.require(
    rank >= ranks[0],
    "warmup_rank",
    rank,
    f"at least the smallest rank ({ranks[0]})",
    'pass "max" for the largest, or None for a dense warm-up',
  )
  return max(own for own in ranks if own <= rank)


def _rank_step(step: int | None, ranks: Sequence[int]) -> int:
  """Returns the largest change of rank in one window.

  Args:
    step: As given; None for 4, or the step of the ladder if that is more.
    ranks: The ladder without dense, rising in equal steps.

  Raises:
    ValueError: if `step` is less than the step of the ladder.
  """
  spacing = ranks[1] - ranks[0] if len(ranks) > 1 else 1
  if step is None:
    return max(_MAX_RANK_STEP, spacing)
  validation.require(
    step >= spacing,
    "max_rank_step",
    step,
    f"at least the step of the ladder ({spacing})",
    "raise it, or leave it None",
  )
  return step


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
