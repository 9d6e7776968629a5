"""Aligns the ranks of pipeline stages, so that exchanges end together.

The last stage ends its backward pass first and stage 0 ends it last. All stages
but stage 0 have slack: they can send more without delaying the step.
"""

import numpy as np

from edgc_jax import validation


def aligned_levels(
  seconds: np.ndarray, num_stages: int, backward_seconds: float
) -> np.ndarray:
  """Chooses the level of every stage for every level of stage 0.

  Stage s ends its backward pass s t_b before stage 0, where t_b is the time of
  one microbatch's backward pass. While stage 0 is on level i, with exchange
  time T(i), the exchange of stage s may take

    budget = T(i) + s t_b

  Stage s is dense (0) if the budget reaches T(0), and otherwise on the highest
  rank whose time is within the budget. So no stage ends after stage 0 or has a
  lower rank. If stage 0 is dense, all stages are; without slack (s t_b = 0) all
  are on its level. Where no rank is faster than dense, stages with slack are
  dense.

  Args:
    seconds: [num_levels], modelled time of each level: dense first, then rising
      ranks of non-decreasing times (`budget.ladder.exchange_seconds`).
    num_stages: Number of pipeline stages.
    backward_seconds: t_b, seconds.

  Returns:
    int32 [num_stages, num_levels]; entry [s, i] is the level of stage s while
    stage 0 is on level i. Row 0 is 0, 1, 2, ...

  Raises:
    TypeError: if `num_stages` or `backward_seconds` is not a Python number.
    ValueError: if an argument is out of range.

  References:
    EDGC, arXiv:2511.10333, asks for T(r_s) = T(r_0) + s t_b. Public code
    rounds the rank that solves this up to a multiple, so that stage s ends
    after stage 0; this function rounds it down to a level.

  >>> aligned_levels(np.array([9.0, 1.0, 2.0, 3.0, 4.0]), 3, 1.5)
  array([[0, 1, 2, 3, 4],
         [0, 2, 3, 4, 4],
         [0, 4, 4, 4, 4]], dtype=int32)
  """
  seconds = _checked(seconds)
  validation.require_int("num_stages", num_stages, 1)
  _require_backward(backward_seconds)
  slack = np.arange(num_stages)[:, None] * backward_seconds
  # budget = T(i) + s t_b
  budget = seconds + slack
  highest = np.searchsorted(seconds[1:], budget, side="right")
  levels = np.where(budget >= seconds[0], 0, highest)
  # Without slack the level is stage 0's: several levels may take equal times.
  levels = np.where(slack > 0, levels, np.arange(len(seconds)))
  return levels.astype(np.int32)


def finish_seconds(
  seconds: np.ndarray, levels: np.ndarray, backward_seconds: float
) -> np.ndarray:
  """Returns the time at which each stage's exchange ends.

  Time 0 is the end of stage 0's backward pass.

  Args:
    seconds: [num_levels], as for `aligned_levels`.
    levels: Integers [num_stages], the level of each stage: a column of the
      result of `aligned_levels`.
    backward_seconds: Seconds of one microbatch's backward pass.

  Returns:
    float64 [num_stages], T(levels[s]) - s backward_seconds; negative if the
    exchange ends before stage 0 starts its own.

  Raises:
    TypeError: if `backward_seconds` is not a Python number.
    ValueError: if an argument is out of range.

  >>> finish_seconds(np.array([9.0, 1.0, 2.0, 3.0]), np.array([1, 2, 3]), 1.5)
  array([1. , 0.5, 0. ])
  """
  seconds, levels = _checked(seconds), np.asarray(levels)
  _require_backward(backward_seconds)
  return seconds[levels] - np.arange(len(levels)) * backward_seconds


def _checked(seconds: np.ndarray) -> np.ndarray:
  """Returns `seconds` as float64; raises unless they fit a ladder."""
  seconds = np.asarray(seconds, np.float64)
  validation.require(
    seconds.ndim == 1 and len(seconds) > 0,
    "seconds",
    seconds.shape,
    "of shape [num_levels], at least one",
    "give one time per level, dense first",
  )
  validation.require(
    bool(np.all(np.isfinite(seconds) & (seconds > 0))),
    "seconds",
    seconds.tolist(),
    "positive and finite",
    "give the time of each level's exchange",
  )
  validation.require(
    bool(np.all(np.diff(seconds[1:]) >= 0)),
    "seconds",
    seconds.tolist(),
    "non-decreasing after the first",
    "order levels by rank",
  )
  return seconds


def _require_backward(backward_seconds: float) -> None:
  """Raises unless `backward_seconds` is a finite number, at least 0."""
  validation.require_finite(
    "backward_seconds",
    backward_seconds,
    "give the time of one microbatch; 0 puts all stages on one level",
  )
