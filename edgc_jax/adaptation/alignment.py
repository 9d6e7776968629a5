"""Ranks of pipeline stages whose exchanges end together.

In a pipeline the last stage ends its backward pass first and stage 0 last, so
all but stage 0 have time to spare: they may send more and still not be the
ones that are waited for.
"""

import numpy as np

from edgc_jax import validation


def aligned_rungs(
  seconds: np.ndarray, num_stages: int, backward_seconds: float
) -> np.ndarray:
  """The rung of every stage, for every rung that stage 0 may be on.

  Stage s ends its backward pass s t_b before stage 0, with t_b the time of
  one microbatch's backward pass. With T(i) the exchange time of rung i, its
  exchange may take

    budget = T(i) + s t_b     while stage 0 is on rung i

  and its rung is dense (0) if the budget reaches T(0), or else the highest
  rank whose time is within the budget. So no stage ends after stage 0, and
  none is on a lower rank; when stage 0 is dense all are, and without time to
  spare (s t_b = 0) all are on its rung. Where rungs are no faster than dense,
  stages with time to spare go dense.

  Args:
    seconds: [num_rungs], modelled time of each rung: dense first, then rising
      ranks, whose times do not fall (`link.exchange_seconds`).
    num_stages: Stages of the pipeline.
    backward_seconds: t_b, seconds.

  Returns:
    int32 [num_stages, num_rungs]; entry [s, i] is the rung of stage s while
    stage 0 is on rung i. Row 0 is 0, 1, 2, ...

  Raises:
    TypeError: if `num_stages` or `backward_seconds` is not a Python number.
    ValueError: if an argument is out of range.

  References:
    EDGC, arXiv:2511.10333, asks for T(r_s) = T(r_0) + s t_b. Public code
    rounds the rank that solves this up to a multiple, and ends after stage 0;
    here it is rounded down to a rung.

  >>> aligned_rungs(np.array([9.0, 1.0, 2.0, 3.0, 4.0]), 3, 1.5)
  array([[0, 1, 2, 3, 4],
         [0, 2, 3, 4, 4],
         [0, 4, 4, 4, 4]], dtype=int32)
  """
  seconds = _checked(seconds)
  validation.require_int("num_stages", num_stages, 1)
  require_backward(backward_seconds)
  slack = np.arange(num_stages)[:, None] * backward_seconds
  budget = seconds + slack
  highest = np.searchsorted(seconds[1:], budget, side="right")
  rungs = np.where(budget >= seconds[0], 0, highest)
  # Not left to the times, which may be equal for several rungs.
  rungs = np.where(slack > 0, rungs, np.arange(len(seconds)))
  return rungs.astype(np.int32)


def finish_seconds(
  seconds: np.ndarray, rungs: np.ndarray, backward_seconds: float
) -> np.ndarray:
  """When each stage's exchange ends, after stage 0's backward pass did.

  Args:
    seconds: [num_rungs], as for `aligned_rungs`.
    rungs: Integers [num_stages], each stage's rung: a column of what
      `aligned_rungs` returns.
    backward_seconds: Seconds of one microbatch's backward pass.

  Returns:
    float64 [num_stages], T(rungs[s]) - s backward_seconds; negative where an
    exchange is over before stage 0 starts its own.

  >>> finish_seconds(np.array([9.0, 1.0, 2.0, 3.0]), np.array([1, 2, 3]), 1.5)
  array([1. , 0.5, 0. ])
  """
  seconds, rungs = _checked(seconds), np.asarray(rungs)
  require_backward(backward_seconds)
  return seconds[rungs] - np.arange(len(rungs)) * backward_seconds


def _checked(seconds: np.ndarray) -> np.ndarray:
  """The times as float64 [num_rungs]; raises unless they fit a ladder."""
  seconds = np.asarray(seconds, np.float64)
  validation.require(
    seconds.ndim == 1 and len(seconds) > 0,
    "seconds",
    seconds.shape,
    "of shape [num_rungs], at least one",
    "give one time per rung, dense first",
  )
  validation.require(
    bool(np.all(np.isfinite(seconds) & (seconds > 0))),
    "seconds",
    seconds.tolist(),
    "positive and finite",
    "give the time of each rung's exchange",
  )
  validation.require(
    bool(np.all(np.diff(seconds[1:]) >= 0)),
    "seconds",
    seconds.tolist(),
    "non-decreasing after the first",
    "order rungs by rank, or take link.exchange_seconds, which levels dips",
  )
  return seconds


def require_backward(backward_seconds: float) -> None:
  """Raises unless the time of a microbatch is a finite number, at least 0."""
  validation.require_finite(
    "backward_seconds",
    backward_seconds,
    "give one microbatch's time; 0 puts all stages on one rung",
  )
