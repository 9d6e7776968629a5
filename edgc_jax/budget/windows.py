"""Lengths of the window and of the warm-up: defaults and checks."""

from edgc_jax import validation
from edgc_jax.budget.entropy import Sampling

_WINDOW = 1000  # steps; of the warm-up, too, if the run's length is unknown


def choose_windows(
  total_steps: int | None,
  window: int | None,
  warmup_steps: int | None,
  least: int = 1,
) -> tuple[int, int]:
  """Returns the window and the warm-up of a run, in steps.

  Args:
    total_steps: Steps of the run; None if unknown.
    window: The window; None for a fortieth of the run, at most 1000 steps, or
      1000 if the run's length is unknown.
    warmup_steps: The warm-up; None for a tenth of the run, or 1000.
    least: Steps from one sample to the next, of which a window that is chosen
      here has at least one.

  Raises:
    TypeError: if an argument is not a Python integer.
    ValueError: if an argument is out of range.

  >>> choose_windows(400, None, None), choose_windows(None, 50, None)
  ((10, 40), (50, 1000))
  """
  if total_steps is not None:
    validation.require_int("total_steps", total_steps, 1)
  if window is None:
    window = _WINDOW
    if total_steps is not None:
      window = max(least, min(total_steps // 40, _WINDOW))
  if warmup_steps is None:
    warmup_steps = _WINDOW if total_steps is None else total_steps // 10
  validation.require_int("window", window, 1)
  validation.require_int("warmup_steps", warmup_steps, 0)
  return window, warmup_steps


def require_windows(
  window: int, warmup_steps: int, most: int | None, sampling: Sampling
) -> None:
  """Raises unless the window and the warm-up fit each other and the sampling.

  Args:
    window: The window.
    warmup_steps: The warm-up.
    most: Its most steps, or None.
    sampling: Steps that are sampled.

  Raises:
    ValueError: if `most` is less than `warmup_steps`, or a window is too short
      for a sample.
  """
  if most is not None:
    validation.require_int("max_warmup_steps", most, 0)
  validation.require(
    most is None or most >= warmup_steps,
    "max_warmup_steps",
    most,
    f"at least warmup_steps ({warmup_steps})",
    "raise it, or leave it None for twice warmup_steps",
  )
  validation.require(
    window >= sampling.period,
    "window",
    window,
    f"at least 1 / step_rate ({sampling.period})",
    "every window needs a sample: lengthen it, or raise step_rate",
  )
