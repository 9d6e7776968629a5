"""Makes the gradient transformations of this package."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import optax


def transformation(
  init: Callable[..., Any], update: Callable[..., Any]
) -> optax.GradientTransformationExtraArgs:
  """Returns a transformation whose arithmetic promotes ranks and dtypes.

  Args:
    init: From parameters to a state.
    update: From gradients, a state and parameters to updates and a state.
  """
  return optax.GradientTransformationExtraArgs(
    promoting(init), promoting(update)
  )


def promoting(function: Callable[..., Any]) -> Callable[..., Any]:
  """Lets the arithmetic of a function promote ranks and dtypes.

  A user may have forbidden that for code of their own, by
  `jax_numpy_rank_promotion` and `jax_numpy_dtype_promotion`.
  """

  @functools.wraps(function)
  def run(*args: Any, **kwargs: Any) -> Any:
    with (
      jax.numpy_rank_promotion("allow"),
      jax.numpy_dtype_promotion("standard"),
    ):
      return function(*args, **kwargs)

  return run
