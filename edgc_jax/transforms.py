"""Gradient transformations that do the all-reduce: edgc, powersgd, allreduce.

They take *local* gradients and return their mean over the replicas, so they
come first in an optax chain: clipping and Adam then see the mean. Use them
wherever the axis name is bound, under `jax.pmap` or `jax.shard_map`.
"""

import optax

from edgc_jax import entropy, guards, rank_rule
from edgc_jax.comm_cost import Plan, make_plan
from edgc_jax.controller import Controller
from edgc_jax.matrices import ViewFn, trailing_matrix
from edgc_jax.policy import EntropyPolicy, FixedPolicy
from edgc_jax.reducer import make_reducer


def allreduce(
  axis_name: str = "data",
) -> optax.GradientTransformationExtraArgs:
  """Averages gradients over replicas, dense: the baseline.

  Wire: every value once, float32, in one all-reduce.

  Args:
    axis_name: Axis averaged over; must be bound where `update` runs.

  Returns:
    A gradient transformation, from local gradients to their mean.

  >>> tx = optax.chain(allreduce(), optax.sgd(0.1))
  """
  return make_reducer(
    axis_name,
    lambda tree: make_plan(tree, (0,)),
    lambda plan: FixedPolicy(len(plan.ladder), warmup_steps=0),
    seed=0,
  )


def powersgd(
  rank: int,
  axis_name: str = "data",
  *,
  warmup_steps: int = 0,
  min_ratio: float = 2.0,
  matrix_view: ViewFn | None = None,
  seed: int = 714,
) -> optax.GradientTransformationExtraArgs:
  """Averages gradients over replicas through factors of a fixed rank.

  For every matrix M [m, n] = gradient + residual:

    P = orth(mean M Q), Q' = mean M^T P, update = P Q'^T,
    residual' = M - update

  Wire: r (m + n) values instead of m n, in two all-reduces; vectors and
  matrices that save less than `min_ratio` travel dense with the first.

  Args:
    rank: Columns of the factors, clipped to the smaller side of a matrix.
    axis_name: Axis averaged over; must be bound where `update` runs.
    warmup_steps: First steps sent dense.
    min_ratio: Least m n / (r (m + n)) at which a matrix is compressed.
    matrix_view: From a leaf's path and shape to (count, rows, cols), or None
      for dense; by default `edgc_jax.trailing_matrix`.
    seed: Seed of the first Q.

  Returns:
    A gradient transformation, from local gradients to their mean.

  Raises:
    TypeError: if an argument that decides shapes is not a Python number.
    ValueError: if an argument is out of range.

  References:
    Vogels et al. 2019, Algorithms 1 and 2, arXiv:1905.13727; `low_rank`
    names the differences.

  >>> tx = optax.chain(powersgd(rank=4), optax.adam(1e-3))
  """
  guards.require_int("rank", rank, 1)
  guards.require_int("warmup_steps", warmup_steps, 0)
  _require_ratio(min_ratio)
  ladder = (0, rank) if warmup_steps else (rank,)
  view = matrix_view or trailing_matrix
  return make_reducer(
    axis_name,
    lambda tree: make_plan(tree, ladder, min_ratio, view),
    lambda plan: FixedPolicy(len(plan.ladder), warmup_steps),
    seed,
  )


def edgc(
  axis_name: str = "data",
  *,
  rank_max: int = 32,
  rank_min: int | None = None,
  window: int = 1000,
  warmup_steps: int = 1000,
  max_warmup_steps: int | None = None,
  step_rate: float = 0.1,
  entry_rate: float = 0.25,
  estimator: str = "gaussian",
  bins: int = 1000,
  rule: str = "cqm",
  exponent: float = 2,
  rank_multiple: int = 4,
  max_rank_step: int = 4,
  min_ratio: float = 2.0,
  matrix_view: ViewFn | None = None,
  seed: int = 714,
) -> optax.GradientTransformationExtraArgs:
  """Averages gradients through factors whose rank follows their entropy.

  Every window, the mean of sampled gradient entropies H is compared with
  that of the last window of a dense warm-up, H_ref, and the rank r becomes
  the one at which the model expects the same absolute error:

    T(r) = e^(exponent (H_ref - H)) T(rank_max)

  with T the energy fraction lost by rank-r approximation of a random matrix
  (`spectrum`). The exchange at a rank is that of `powersgd`; the residual is
  kept over all rank changes. The rank is chosen in the graph: one program is
  compiled, and at each step it sends the bytes of the rank in use.

  Wire: as `powersgd` at the rank in use, or dense; entropy samples add a few
  values per leaf, once in 1 / step_rate steps.

  Args:
    axis_name: Axis averaged over; must be bound where `update` runs.
    rank_max: Largest rank, and that of the first window after warm-up. Ranks
      at which no leaf at all would be compressed are left out of the ladder.
    rank_min: Smallest rank; None is a quarter of rank_max, rounded down to
      `rank_multiple`.
    window: Steps between two choices of the rank.
    warmup_steps: First steps sent dense, rounded up to whole windows, at
      least one. A tenth of the run is usual.
    max_warmup_steps: Longest that warm-up may go on while the model expects
      rank_min to lose too much; None is twice `warmup_steps`.
    step_rate: Share of steps whose entropy is sampled.
    entry_rate: Share of entries read in such a step.
    estimator: "gaussian" or "histogram".
    bins: Bins of the histogram.
    rule: "cqm", the model above, or "linear", the heuristic of the public
      codes: rank in proportion to the last change of entropy.
    exponent: Of e^(H_ref - H) on the squared error T; 2 keeps the absolute
      error constant.
    rank_multiple: Ranks are multiples of this.
    max_rank_step: Largest change of rank from one window to the next.
    min_ratio: Least m n / (r (m + n)) at which a matrix is compressed.
    matrix_view: From a leaf's path and shape to (count, rows, cols), or None
      for dense; by default `edgc_jax.trailing_matrix`.
    seed: Seed of the first Q.

  Returns:
    A gradient transformation, from local gradients to their mean. A step in
    which any replica has a non-finite gradient returns zeros and leaves
    residual and Q as they were.

  Raises:
    TypeError: if an argument that decides shapes is not a Python number.
    ValueError: if an argument is out of range.

  References:
    EDGC, arXiv:2511.10333. Differences: the entropy is that of the local
    gradient all through training and is differential; g is the square root
    of T from the Marchenko-Pastur law instead of a Monte Carlo estimate; the
    reference stays fixed. See docs/algorithm.md.

  >>> tx = optax.chain(edgc(axis_name="data"), optax.adamw(3e-4))
  """
  guards.require_int("rank_multiple", rank_multiple, 1)
  if rank_min is None and isinstance(rank_max, int):
    rank_min = rank_multiple * max(1, rank_max // (4 * rank_multiple))
  for name, value in (
    ("rank_max", rank_max),
    ("rank_min", rank_min),
    ("window", window),
    ("bins", bins),
  ):
    guards.require_int(name, value, 1)
  guards.require_int("warmup_steps", warmup_steps, 0)
  if max_warmup_steps is None:
    max_warmup_steps = 2 * warmup_steps
  guards.require_int("max_warmup_steps", max_warmup_steps, 0)
  guards.require(
    max_warmup_steps >= warmup_steps,
    "max_warmup_steps",
    max_warmup_steps,
    f"at least warmup_steps ({warmup_steps})",
    "raise it, or leave it None for twice that",
  )
  guards.require(
    rank_min <= rank_max,
    "rank_min",
    rank_min,
    f"at most rank_max ({rank_max})",
    "lower it, or leave it None for a quarter of rank_max",
  )
  for name, value in (("rank_max", rank_max), ("rank_min", rank_min)):
    guards.require(
      value % rank_multiple == 0,
      name,
      value,
      f"a multiple of rank_multiple ({rank_multiple})",
      "round it, or set rank_multiple=1 for a finer ladder",
    )
  guards.require_int("max_rank_step", max_rank_step, rank_multiple)
  for name, value in (("step_rate", step_rate), ("entry_rate", entry_rate)):
    guards.require_number(name, value)
    guards.require(
      0 < value <= 1, name, value, "in (0, 1]", "1 samples everything"
    )
  guards.require(
    window >= round(1 / step_rate),
    "window",
    window,
    f"at least 1 / step_rate ({round(1 / step_rate)})",
    "every window needs a sample: lengthen it, or raise step_rate",
  )
  for name, value, options in (
    ("estimator", estimator, entropy.ESTIMATORS),
    ("rule", rule, rank_rule.RULES),
  ):
    guards.require(
      value in options, name, value, f"one of {options}", "pick one of them"
    )
  guards.require_number("exponent", exponent)
  guards.require(exponent > 0, "exponent", exponent, "positive", "use 2")
  _require_ratio(min_ratio)

  ladder = (0, *range(rank_min, rank_max + 1, rank_multiple))
  view = matrix_view or trailing_matrix

  def policy_for(plan: Plan) -> EntropyPolicy:
    controller = Controller.for_plan(
      plan,
      window=window,
      warmup_steps=warmup_steps,
      max_warmup_steps=max_warmup_steps,
      rule=rule,
      exponent=float(exponent),
      max_rank_step=max_rank_step,
    )
    return EntropyPolicy(
      plan,
      controller,
      axis_name,
      period=round(1 / step_rate),
      entry_rate=entry_rate,
      estimator=estimator,
      bins=bins,
    )

  return make_reducer(
    axis_name,
    lambda tree: make_plan(tree, ladder, min_ratio, view),
    policy_for,
    seed,
  )


def _require_ratio(min_ratio: float) -> None:
  guards.require_number("min_ratio", min_ratio)
  guards.require(
    min_ratio >= 0, "min_ratio", min_ratio, "at least 0", "use 2 or more"
  )
