"""Rules: from the statistics of a window to a rank.

A rule is a function of a `Window` that returns a real-valued rank:

    def my_rule(window):
      return window.rank_max - 4.0 * (window.reference - window.entropy)

    tx = edgc(rule=my_rule)

`cqm` is the rule of the paper. `round_to_ladder` turns the result of a rule
into a rank of the ladder.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np


class Window(NamedTuple):
  """Statistics of the newest window, equal on all replicas; nats.

  The reference window is the last window of the warm-up.

  Attributes:
    entropy: float32 [], H, mean of this window.
    previous: float32 [], mean of the window before it.
    reference: float32 [], H_ref, mean of the reference window.
    first: float32 [], H_0, mean of the first window.
    first_change: float32 [], H_1 - H_0.
    errors: float32 [rank_max + 1], ln of the modelled squared error by rank,
      for the variances of the reference window (`error_model.log_error`).
    rank_min: Smallest rank of the ladder.
    rank_max: Largest rank of the ladder.
  """

  entropy: jax.Array
  previous: jax.Array
  reference: jax.Array
  first: jax.Array
  first_change: jax.Array
  errors: jax.Array
  rank_min: int
  rank_max: int


Rule = Callable[[Window], jax.Array]
"""A function from the statistics of a window to a real-valued rank."""


def cqm(window: Window, exponent: float = 2.0) -> jax.Array:
  """Returns the rank that keeps the modelled absolute error constant.

  The standard deviation of a gradient's entries is in proportion to e^H, with H
  their entropy. So the absolute error equals the one of `rank_max` in the
  reference window if

    T(r) = e^(exponent (H_ref - H)) T(rank_max),

  with exponent 2 for the squared error T. Lower entropy gives a lower rank.

  Args:
    window: The newest window.
    exponent: 2, or 1 to read the g of the paper's text as a squared error.

  Returns:
    float32 [], in [0, rank_max].

  Source: arXiv:2511.10333, r = g^-1(e^(H_ref - H) g(r_ref)) with g = sqrt(T).
  """
  # ln T(r) = ln T(rank_max) + exponent (H_ref - H), solved by interpolation.
  errors = window.errors
  target = errors[-1] + exponent * (window.reference - window.entropy)
  ranks = jnp.arange(len(errors), dtype=jnp.float32)
  return jnp.interp(-target, -errors, ranks)


def round_to_ladder(
  target: jax.Array,
  current: jax.Array,
  ranks: Sequence[int],
  max_rank_step: int,
) -> jax.Array:
  """Chooses the rank of the ladder to use next.

  Clamps `target` to the ladder, rounds it down to a rank, and limits the change
  to `max_rank_step`. A lower rank replaces the current one only if `target` is
  below the current rank by more than half a step of the ladder: rounding down
  alone would change the rank at every other window while the entropy stays
  near the bound between two ranks. If `target` is NaN, the rank stays.

  Args:
    target: float32 [], the rank that the rule returns.
    current: int32 [], index of the rank in use.
    ranks: The ladder without dense, rising in equal steps.
    max_rank_step: Largest change of rank in one window.

  Returns:
    int32 [], an index into `ranks`.

  >>> [int(round_to_ladder(jnp.float32(w), jnp.int32(3), (8, 12, 16, 20), 4))
  ...  for w in (0, 15.9, 16, 99)]
  [2, 2, 2, 3]
  >>> [int(round_to_ladder(jnp.float32(14.5), jnp.int32(i), (8, 12, 16, 20), 4))
  ...  for i in (1, 2, 3)]
  [1, 2, 2]
  """
  ladder = np.asarray(ranks, np.float32)
  # The tolerance keeps a target that float32 put just below its rank.
  index = jnp.searchsorted(ladder, target + 1e-3, side="right") - 1
  spacing = ranks[1] - ranks[0] if len(ranks) > 1 else 1
  is_near = target >= jnp.asarray(ladder)[current] - 0.5 * spacing
  index = jnp.where(is_near, jnp.maximum(index, current), index)
  index = jnp.where(jnp.isnan(target), current, index)
  limit = max_rank_step // spacing
  lowest = jnp.maximum(current - limit, 0)
  highest = jnp.minimum(current + limit, len(ranks) - 1)
  return jnp.clip(index, lowest, highest).astype(jnp.int32)
