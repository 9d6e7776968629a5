"""Rank rules by name: the package's, and an example of a rule of one's own."""

import functools

import jax
import jax.numpy as jnp

import edgc_jax
from edgc_jax import Window


def linear(window: Window) -> jax.Array:
  """Returns a rank in proportion to the last change of entropy.

    r = rank_min + (rank_max - rank_min) |H_k - H_(k-1)| / |H_1 - H_0|

  Args:
    window: The newest window, k.

  Returns:
    float32 [], at least rank_min; rank_max if the first change was zero.

  Source: the heuristic of the public code of arXiv:2511.10333.
  """
  reference = jnp.abs(window.first_change)
  change = jnp.abs(window.entropy - window.previous)
  share = change / jnp.where(reference > 0, reference, 1.0)
  share = jnp.where(reference > 0, share, 1.0)
  return window.rank_min + (window.rank_max - window.rank_min) * share


def reverse(window: Window, exponent: float = 2.0) -> jax.Array:
  """Returns a rank that rises as the entropy falls, as a control.

    r = rank_min + rank_max - clip(cqm, rank_min, rank_max)

  Args:
    window: The newest window.
    exponent: As for `edgc_jax.cqm`.

  Returns:
    float32 [], between rank_min and rank_max.
  """
  rank = edgc_jax.cqm(window, exponent)
  rank = jnp.clip(rank, window.rank_min, window.rank_max)
  return window.rank_min + window.rank_max - rank


def rule_of(name: str, exponent: float) -> edgc_jax.Rule:
  """Returns the rule that a configuration names.

  Raises:
    ValueError: if the name is unknown, or the exponent is not positive.
  """
  if exponent <= 0:
    raise ValueError(
      f"`edgc.exponent` must be positive, got {exponent}; use 2."
    )
  rules = {
    "cqm": functools.partial(edgc_jax.cqm, exponent=exponent),
    "linear": linear,
    "reverse": functools.partial(reverse, exponent=exponent),
  }
  if name not in rules:
    raise ValueError(
      f"`edgc.rule` must be one of {', '.join(rules)}, got {name!r}; add a"
      " function of a Window to experiments/trainer/training/rules.py."
    )
  return rules[name]
