"""Checks of the reducers' arguments: an error names what to change."""

from collections.abc import Sequence
from typing import Any

from edgc_jax import validation
from edgc_jax.adaptation import alignment, allocation, entropy, rank_rule
from edgc_jax.comm.codes import code_of
from edgc_jax.plan.leaves import PlacementFn
from edgc_jax.plan.link_model import CompressionModel, LinkModel

GRANULARITIES = ("matrix", "stage")
_MAX_RANK_STEP = 4


def require_models(
  link: LinkModel | None, compression: CompressionModel | None
) -> None:
  """Raises unless both are what they are called, or None."""
  for name, value, kind in (
    ("link", link, LinkModel),
    ("compression", compression, CompressionModel),
  ):
    if not isinstance(value, kind | None):
      raise TypeError(
        f"`{name}` must be an edgc_jax.{kind.__name__}, got {value!r}; make"
        " one, or measure it."
      )


def require_sampling(entry_rate: float, estimator: str, bins: int) -> None:
  """Raises unless entropies can be sampled so."""
  validation.require_int("bins", bins, 1)
  validation.require_number("entry_rate", entry_rate)
  validation.require(
    0 < entry_rate <= 1, "entry_rate", entry_rate, "in (0, 1]", "1 reads all"
  )
  validation.require_one_of("estimator", estimator, entropy.ESTIMATORS)


def require_rule(rule: str, exponent: float) -> None:
  """Raises unless there is such a rule, with a positive exponent."""
  validation.require_one_of("rule", rule, rank_rule.RULES)
  validation.require_number("exponent", exponent)
  validation.require(exponent > 0, "exponent", exponent, "positive", "use 2")


def require_warmup_rank(warmup_rank: int | str | None) -> None:
  """Raises unless it is a rank, "max" or None."""
  if isinstance(warmup_rank, str):
    validation.require(
      warmup_rank == "max",
      "warmup_rank",
      warmup_rank,
      '"max", a rank or None',
      "None is dense",
    )
  elif warmup_rank is not None:
    validation.require_int("warmup_rank", warmup_rank, 1)


def require_allocation(
  granularity: str, curves: str, scale_exponent: float
) -> None:
  """Raises unless ranks can be shared out so."""
  validation.require_one_of("granularity", granularity, GRANULARITIES)
  validation.require_one_of("curves", curves, allocation.CURVES)
  validation.require_number("scale_exponent", scale_exponent)
  validation.require(
    0 <= scale_exponent <= 2,
    "scale_exponent",
    scale_exponent,
    "between 0 (absolute errors) and 2 (relative ones)",
    "use 1",
  )


def require_ratio(min_ratio: float) -> None:
  """Raises unless `min_ratio` is a number of at least 0."""
  validation.require_number("min_ratio", min_ratio)
  validation.require(
    min_ratio >= 0, "min_ratio", min_ratio, "at least 0", "use 2 or more"
  )


def travel(
  wire_dtype: Any, alternating: bool, refresh_every: int | None
) -> dict[str, Any]:
  """How factors travel, for a plan; raises where they cannot so."""
  require_flag("alternating", alternating)
  if refresh_every is not None:
    validation.require_int("refresh_every", refresh_every, 1)
  return {
    "code": code_of(wire_dtype),
    "alternating": alternating,
    "refresh_every": refresh_every or 0,
  }


def require_share(name: str, value: float) -> None:
  """Raises unless `value` is a number in (0, 1]."""
  validation.require_number(name, value)
  validation.require(
    0 < value <= 1, name, value, "in (0, 1]", "1 is everything"
  )


def require_flag(name: str, value: bool) -> None:
  """Raises unless `value` is True or False."""
  if not isinstance(value, bool):
    raise TypeError(
      f"`{name}` must be True or False, got {value!r}; under"
      " optax.inject_hyperparams list it in `static_args`."
    )


def require_placement(
  placement: PlacementFn | None, stage_axis: str | None
) -> None:
  """Raises where placements are given for stages that are not."""
  validation.require(
    placement is None or stage_axis is not None,
    "placement",
    placement,
    "None without a `stage_axis`",
    "name the axis of the stages; without stages every leaf is everywhere",
  )


def require_windows(
  window: int, warmup_steps: int, max_warmup_steps: int, step_rate: float
) -> None:
  """Raises unless windows and warm-up fit together."""
  validation.require_int("window", window, 1)
  validation.require_int("warmup_steps", warmup_steps, 0)
  validation.require_int("max_warmup_steps", max_warmup_steps, 0)
  validation.require(
    max_warmup_steps >= warmup_steps,
    "max_warmup_steps",
    max_warmup_steps,
    f"at least warmup_steps ({warmup_steps})",
    "raise it, or leave it None for twice that",
  )
  validation.require_number("step_rate", step_rate)
  validation.require(
    0 < step_rate <= 1, "step_rate", step_rate, "in (0, 1]", "1 samples always"
  )
  validation.require(
    window >= round(1 / step_rate),
    "window",
    window,
    f"at least 1 / step_rate ({round(1 / step_rate)})",
    "every window needs a sample: lengthen it, or raise step_rate",
  )


def require_times(
  link: LinkModel | None, backward_seconds: float | None
) -> None:
  """Raises unless there are times to align stages by."""
  for name, value, measure in (
    ("link", link, "measure_link"),
    ("backward_seconds", backward_seconds, "measure_backward"),
  ):
    validation.require(
      value is not None,
      name,
      value,
      "given where stages are aligned by their slack",
      f"measure it with edgc_jax.{measure}, or pass align='none'",
    )
  alignment.require_backward(backward_seconds)


def warmup_rung(ranks: Sequence[int], warmup_rank: int | str | None) -> int:
  """The rung of the warm-up: the highest rank that is not above it."""
  if warmup_rank is None:
    return 0
  if warmup_rank == "max":
    return len(ranks)
  validation.require(
    warmup_rank >= ranks[0],
    "warmup_rank",
    warmup_rank,
    f"at least the smallest rank ({ranks[0]})",
    'pass "max" for the largest, or None for a dense warm-up',
  )
  return sum(rank <= warmup_rank for rank in ranks)


def rank_step(ranks: Sequence[int], max_rank_step: int | None) -> int:
  """The step limit of a window, wide enough for the ladder."""
  spacing = ranks[1] - ranks[0] if len(ranks) > 1 else 1
  if max_rank_step is None:
    return max(_MAX_RANK_STEP, spacing)
  validation.require(
    max_rank_step >= spacing,
    "max_rank_step",
    max_rank_step,
    f"at least the step of the ladder ({spacing})",
    "raise it, or leave it None",
  )
  return max_rank_step
