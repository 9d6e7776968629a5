"""From a change of entropy to a rank: pure functions, swappable.

Both rules answer in real numbers; `settle` makes of that a rank that may be
used. Ranks are compared with the reference window, the last one of warm-up.
"""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from edgc_jax import validation

RULES = ("cqm", "linear")
_MAX_RANK_STEP = 4


@dataclasses.dataclass(frozen=True)
class RankRule:
  """How the rank of a stage follows the entropy.

  Attributes:
    name: "cqm", the model of `error_model`, or "linear", the heuristic of the
      public codes: rank in proportion to the last change of entropy.
    exponent: Of e^(H_ref - H) on the squared error T; 2 keeps the absolute
      error constant.
    rank_multiple: Ranks are multiples of this.
    max_rank_step: Largest change of rank from one window to the next; None
      is 4, or the step of the ladder if that is more.
    warmup_rank: Rank of the warm-up, "max" for the largest; None is dense. A
      rank between two ranks of the ladder is rounded down.
    max_warmup_steps: Longest that warm-up may go on while the model expects
      the smallest rank to lose too much; None is twice the warm-up.

  Raises:
    TypeError: if an attribute is not a Python number.
    ValueError: if an attribute is out of range.
  """

  name: str = "cqm"
  exponent: float = 2.0
  rank_multiple: int = 4
  max_rank_step: int | None = None
  warmup_rank: int | str | None = "max"
  max_warmup_steps: int | None = None

  def __post_init__(self) -> None:
    validation.require_one_of("rule.name", self.name, RULES)
    validation.require_number("exponent", self.exponent)
    validation.require(
      self.exponent > 0, "exponent", self.exponent, "positive", "use 2"
    )
    validation.require_int("rank_multiple", self.rank_multiple, 1)
    if self.max_rank_step is not None:
      validation.require_int(
        "max_rank_step", self.max_rank_step, self.rank_multiple
      )
    if isinstance(self.warmup_rank, str):
      validation.require(
        self.warmup_rank == "max",
        "warmup_rank",
        self.warmup_rank,
        '"max", a rank or None',
        "None is dense",
      )
    elif self.warmup_rank is not None:
      validation.require_int("warmup_rank", self.warmup_rank, 1)
    if self.max_warmup_steps is not None:
      validation.require_int("max_warmup_steps", self.max_warmup_steps, 0)

  def warmup_rung(self, ranks: Sequence[int]) -> int:
    """Returns the rung of the warm-up on a ladder without dense."""
    if self.warmup_rank is None:
      return 0
    if self.warmup_rank == "max":
      return len(ranks)
    validation.require(
      self.warmup_rank >= ranks[0],
      "warmup_rank",
      self.warmup_rank,
      f"at least the smallest rank ({ranks[0]})",
      'pass "max" for the largest, or None for a dense warm-up',
    )
    return sum(rank <= self.warmup_rank for rank in ranks)

  def rank_step(self, ranks: Sequence[int]) -> int:
    """Returns the largest change of rank, at least one step of the ladder."""
    spacing = ranks[1] - ranks[0] if len(ranks) > 1 else 1
    if self.max_rank_step is None:
      return max(_MAX_RANK_STEP, spacing)
    validation.require(
      self.max_rank_step >= spacing,
      "max_rank_step",
      self.max_rank_step,
      f"at least the step of the ladder ({spacing})",
      "raise it, or leave it None",
    )
    return self.max_rank_step


def cqm_rank(
  errors: jax.Array,
  rank_max: int,
  entropy: jax.Array,
  reference: jax.Array,
  exponent: float = 2.0,
) -> jax.Array:
  """The rank at which the modelled error is that of `rank_max` before.

  Entries of a gradient with entropy H have a standard deviation in proportion
  to e^H, so the absolute error stays the same where

    T(r) = e^(exponent (H_ref - H)) T(rank_max),

  with exponent 2 for the squared error T. Lower entropy gives a lower rank.

  Args:
    errors: float32 [rank_max + 1], from `log_error`.
    rank_max: The rank used at the reference entropy.
    entropy: float32 [], mean of the newest window, nats.
    reference: float32 [], mean of the reference window, nats.
    exponent: 2, or 1 for the paper's text read with g as squared error.

  Returns:
    float32 [], in [0, rank_max].

  Source: arXiv:2511.10333, r = g^-1(e^(H_ref - H) g(r_ref)) with g = sqrt(T).
  """
  target = errors[rank_max] + exponent * (reference - entropy)
  ranks = jnp.arange(rank_max + 1, dtype=jnp.float32)
  return jnp.interp(-target, -errors[: rank_max + 1], ranks)


def linear_rank(
  rank_min: int,
  rank_max: int,
  entropy: jax.Array,
  previous: jax.Array,
  first_change: jax.Array,
) -> jax.Array:
  """The heuristic of the public codes: rank in proportion to recent change.

    r = rank_min + (rank_max - rank_min) |H_k - H_(k-1)| / |H_1 - H_0|

  Args:
    rank_min: Rank when the entropy stands still.
    rank_max: Rank when it changes as much as between the first two windows.
    entropy: float32 [], mean of the newest window, nats.
    previous: float32 [], mean of the window before it.
    first_change: float32 [], H_1 - H_0.

  Returns:
    float32 [], at least rank_min; rank_max where `first_change` is zero.
  """
  reference = jnp.abs(first_change)
  share = jnp.abs(entropy - previous) / jnp.where(reference > 0, reference, 1)
  share = jnp.where(reference > 0, share, 1.0)
  return rank_min + (rank_max - rank_min) * share


def settle(
  wish: jax.Array,
  current: jax.Array,
  ranks: Sequence[int],
  max_rank_step: int,
) -> jax.Array:
  """The index of the rank to use next.

  Clamps to the ladder, rounds down to one of its ranks, and moves at most
  `max_rank_step` away from the current rank. A rank in use is left for a lower
  one only where the answer is below it by more than half a step of the ladder:
  rounding down alone would change the rank at every other window while the
  entropy stands still near a bound.

  Args:
    wish: float32 [], the rule's answer.
    current: int32 [], index of the rank in use.
    ranks: The ladder without dense, rising in equal steps.
    max_rank_step: Largest change of rank in one window.

  Returns:
    int32 [], an index into `ranks`.

  >>> [int(settle(jnp.float32(w), jnp.int32(3), (8, 12, 16, 20), 4))
  ...  for w in (0, 15.9, 16, 99)]
  [2, 2, 2, 3]
  >>> [int(settle(jnp.float32(14.5), jnp.int32(i), (8, 12, 16, 20), 4))
  ...  for i in (1, 2, 3)]
  [1, 2, 2]
  """
  ladder = np.asarray(ranks, np.float32)
  # The tolerance keeps a rank that only float32 rounding put below itself.
  nearest = jnp.searchsorted(ladder, wish + 1e-3, side="right") - 1
  spacing = ranks[1] - ranks[0] if len(ranks) > 1 else 1
  is_near = wish >= jnp.asarray(ladder)[current] - 0.5 * spacing
  nearest = jnp.where(is_near, jnp.maximum(nearest, current), nearest)
  limit = max_rank_step // spacing
  lowest = jnp.maximum(current - limit, 0)
  highest = jnp.minimum(current + limit, len(ranks) - 1)
  return jnp.clip(nearest, lowest, highest).astype(jnp.int32)
